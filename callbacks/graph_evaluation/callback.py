"""`GraphedEvaluation`: installs captured calls for the time of each evaluation, and says what came of them."""

from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info

from fasttrain.batches import Signature
from fasttrain.callback_door import ActingCallback
from fasttrain.callbacks.graph_evaluation.captured_call import CapturedCall
from fasttrain.callbacks.graph_evaluation.places import METHOD, places, why_none
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Change, Table

COLUMNS = ("call", "input signature", "replays", "eager", "captures")


@dataclass(frozen=True)
class GraphEvaluationConfig:
    """The parameters of `GraphedEvaluation`."""

    max_graphs: int = 4
    """Graphs kept of each call, one an input signature; the one unused for longest makes room."""
    check: bool = True
    """Compare the first replay of each new graph with an eager call from the same state."""

    def __post_init__(self) -> None:
        if self.max_graphs < 1:
            raise ConfigError(f"optimizations.graph_evaluation.max_graphs is {self.max_graphs}; it must be at least 1.")


class GraphedEvaluation(ActingCallback):
    """Replays the device's part of each validation step as a CUDA graph: `Trainer(callbacks=[GraphedEvaluation()])`.

    That part is the module's method `evaluate_batch`, if it has one, or else the forward of each network that the
    module holds. What the step does with the result stays as it is. Between evaluations the module is untouched.

    Args:
        stand_in: without a CUDA device, run the captured call again instead of replaying a graph. For tests: all
            bookkeeping is the same, and nothing gets faster.
        parameters: those of `GraphEvaluationConfig`.

    Raises:
        OptimizationError: at `setup`, when the module has no such part.
    """

    def __init__(self, stand_in: bool = False, **parameters: Any) -> None:
        super().__init__()
        self.config, self.stand_in = GraphEvaluationConfig(**parameters), stand_in
        self.notes: list[str] = []
        self.calls: list[CapturedCall] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """See that there is something to capture."""
        if stage in ("fit", "validate") and not places(pl_module):
            raise OptimizationError(f"graph_evaluation: {why_none(pl_module)}; leave it out.")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the calls, to be installed at each evaluation."""
        if trainer.enable_validation:
            self._make(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install them. Not for Lightning's sanity check, before training has what memory it needs."""
        if trainer.sanity_checking:
            return
        if trainer.state.fn != "fit" and not self.calls:
            self._make(trainer, pl_module)
        for call in self.calls:
            call.install()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove them; their graphs are kept for the next evaluation."""
        for call in self.calls:
            call.remove()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the graphs' memory back."""
        for call in self.calls:
            call.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same; Lightning calls nothing else then."""
        self.teardown(trainer, pl_module, "")

    def table(self) -> Table:
        """Return what happened to the calls, by input signature."""
        rows = [
            (call.place.path, str(cast(Signature, key)), tally.hits, tally.eager, tally.captures)
            for call in self.calls
            for key, tally in call.pool.tallies.items()
        ]
        return Table("evaluation calls by input signature", COLUMNS, rows, note="; ".join(self.notes))

    def _make(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda" and not self.stand_in:
            rank_zero_info(
                f"GraphedEvaluation: this run is on the {device.type}, without CUDA graphs; nothing changes."
            )
            return
        if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
            self._note(f"nothing is captured, since the strategy is {type(trainer.strategy).__name__}")
            return
        config, busy = self.config, list[CapturedCall]()
        self.calls = [
            CapturedCall(place, device, config.max_graphs, config.check, self.stand_in, self._note, busy)
            for place in places(module)
        ]
        self.changes = [
            Change(call.place.path, "replayed as a CUDA graph in evaluations")
            if call.place.name == METHOD
            else Change(call.place.path, "its forward replayed as a CUDA graph in evaluations")
            for call in self.calls
        ]

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        rank_zero_info(f"GraphedEvaluation: {sentence}.")
