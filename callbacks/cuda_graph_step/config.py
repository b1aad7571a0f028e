"""How the graph step is configured."""

from dataclasses import dataclass, field
from typing import Literal

Scope = Literal["auto", "step", "fwd_bwd"]


@dataclass(frozen=True)
class PadConfig:
    """Which inputs are padded to which sizes."""

    values: dict[str, float] = field(default_factory=dict)
    """Inputs to pad, by their place in the batch (`input_ids`, `0`, `1.labels`), and what they are padded with."""
    sizes: tuple[int, ...] = ()
    """Sizes to pad to; each input takes the smallest that holds it, a larger one stays as it is."""
    dimension: int = 1


@dataclass(frozen=True)
class CUDAGraphStepConfig:
    """The parameters of `CUDAGraphStep`."""

    scope: Scope = "auto"
    """`step` captures everything, the optimizer too; `fwd_bwd` leaves the optimizer's step outside; `auto` captures
    everything that can be."""
    warm_up: int = 3
    """Eager steps before the first capture; with several processes 11, which DDP needs."""
    eager_first: int = 1
    """Eager steps of every further input signature before it is captured."""
    max_graphs: int = 16
    """Graphs kept at the same time; the one unused for longest makes room."""
    checks: int = 2
    """Replays of each new graph that are compared with the eager step from the same state."""
    on_failure: Literal["eager", "error"] = "eager"
    """What happens when the step can't be captured or a replay is wrong: go on eagerly with a warning, or stop."""
    trusted: tuple[str, ...] = ()
    """Hooks that may be captured although inspection refuses them, as `Owner.hook`."""
    keep_gradients: bool = False
    """Keep `grad` of every parameter after the step; it costs memory for each signature."""
    short_path: bool = True
    """Leave out what Lightning does between steps for hooks and readers that this run does not have."""
    pad: PadConfig | None = None
    """Pad a dimension of some inputs, so that a few graphs serve every length."""
