"""What MLPerf wants to know about a run that only its recipe can tell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as pl

from fasttrain.errors import ConfigError
from fasttrain.sections import import_named
from fasttrain.trainer import training_loaders


@runtime_checkable
class KnowsSizes(Protocol):
    """A data module that can tell how large its sets are without reading them."""

    def sizes(self) -> dict[str, int]:
        """Return the number of samples of `train` and `val`."""
        ...


@dataclass(frozen=True)
class RunFacts:
    """A run about to train, as the functions of a benchmark see it: loaders are made, and no sample was read."""

    trainer: pl.Trainer
    module: Any
    data: Any
    """The data module; None for a fit without one."""

    @property
    def batches_per_step(self) -> int:
        """Loader batches of one optimizer step: processes times accumulated batches."""
        return self.trainer.world_size * self.trainer.accumulate_grad_batches

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run; None where it has no end."""
        steps = self.trainer.estimated_stepping_batches
        return int(steps) if 0 < steps < float("inf") else None  # Lightning's -1 is no end, too

    def loader_batch(self) -> int:
        """Return the samples of a batch of the training loader, or 1 where it doesn't say."""
        sizes = [getattr(loader, "batch_size", None) for loader in training_loaders(self.trainer)]
        return next((int(size) for size in sizes if size), 1)

    def sizes(self) -> dict[str, int]:
        """Return the samples of `train` and `val` as far as the data module or the loaders know them."""
        if isinstance(self.data, KnowsSizes):
            return self.data.sizes()
        val: Any = self.trainer.val_dataloaders
        loaders = {"train": training_loaders(self.trainer), "val": val if isinstance(val, list) else [val]}
        found = {name: [_length(loader) for loader in some] for name, some in loaders.items()}
        return {name: sum(lengths) for name, lengths in found.items() if lengths and all(lengths)}


def _nothing(run: RunFacts) -> Mapping[str, Any]:
    return {}


def _no_tensors(run: RunFacts) -> Sequence[str]:
    return ()


def _global_batch(run: RunFacts) -> int:
    return run.loader_batch() * run.batches_per_step


@dataclass(frozen=True)
class Benchmark:
    """One of MLPerf Training's benchmarks, as a recipe or a foreign project declares it."""

    name: str
    """`submission_benchmark`: resnet, ssd (RetinaNet), maskrcnn, minigo, dlrm, bert, rnnt or unet3d."""
    metric: str
    """Name under which the module logs the score in validation."""
    target: float
    """The score at which a closed run has converged."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller score is better."""
    ruleset: str = "2.0.0"
    """The rules that the file is written for and checked by."""
    progress: Literal["epochs", "samples"] = "epochs"
    """What `epoch_num` counts: epochs from 1, or training samples as in BERT."""
    hyperparameters: Callable[[RunFacts], Mapping[str, Any]] = _nothing
    """Values by the rules' keys; `global_batch_size` and `gradient_accumulation_steps` need not be among them."""
    tensors: Callable[[RunFacts], Sequence[str]] = _no_tensors
    """Names of the initialised weights, as the rules have them."""
    global_batch: Callable[[RunFacts], int] = _global_batch
    """Samples of an optimizer step over all processes."""

    def is_reached_by(self, score: float) -> bool:
        """Whether a score is at least as good as the target. NaN is not."""
        return score >= self.target if self.mode == "max" else score <= self.target


def find_benchmark(path: str) -> Benchmark:
    """Import a benchmark by its dotted path.

    Raises:
        ConfigError: there is nothing, or something else, at that path.
    """
    found = import_named(path, "mlperf.benchmark")
    if not isinstance(found, Benchmark):
        raise ConfigError(
            f"mlperf.benchmark: '{path}' is a {type(found).__name__}, not a fasttrain.mlperf.benchmark.Benchmark; "
            "recipes have theirs in a file mlperf.py, as BENCHMARK."
        )
    return found


def _length(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return 0
