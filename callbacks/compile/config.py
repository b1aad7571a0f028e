"""How the regional compile is configured."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class CompileConfig:
    """The parameters of `RegionalCompile`, and how the plan decides."""

    modules: tuple[str, ...] = ()
    """What to compile: paths of modules (`net.layer1`) or class names (`Bottleneck`). Empty chooses: repeated blocks,
    or else the children of the LightningModule."""
    mode: Mode = "default"
    """Of torch.compile. `reduce-overhead` and `max-autotune` make CUDA graphs of their own."""
    dynamic: bool | None = None
    """Whether sizes are compiled as variables; null: those that are seen to change."""
    fullgraph: bool = False
    """Make it an error if a region is not one graph."""
    backend: str = "inductor"
    """The compiler, by torch.compile's name."""
    cache_dir: str | None = None
    """Where compiled code is kept for later runs; null is $FASTTRAIN_CACHE/compiled or ~/.cache/fasttrain/compiled."""
    measure: bool = True
    """Time the training step with and without first, on this machine, and refuse where it is not faster."""
    least_gain: float = 0.02
    """The share of step time that must be saved; below it the difference is noise."""
