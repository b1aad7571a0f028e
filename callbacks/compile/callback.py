"""`RegionalCompile`: compiles a Lightning module's regions for its fits, and says what came of it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fasttrain.callback_door import ActingCallback
from fasttrain.callbacks.compile.cache import compiled_folder, kept_in
from fasttrain.callbacks.compile.compiled import WITHOUT_GRAPHS, CompiledRegions
from fasttrain.callbacks.compile.config import CompileConfig, Mode
from fasttrain.callbacks.compile.regions import why_no_region
from fasttrain.callbacks.compile.tally import COLUMNS, Tally, total
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Table

MOST_ROWS = 20


class RegionalCompile(ActingCallback):
    """Compiles parts of a model by torch.compile: `Trainer(callbacks=[RegionalCompile()])`.

    Acts before the optimizer is made; a region compiles when it is first called. Weights, their names and checkpoints
    are what they are without. `undo()` puts everything back.

    Args:
        parameters: those of `CompileConfig`; `measure` and `least_gain` are the plan's.

    Raises:
        OptimizationError: at `setup`, when there is nothing to compile, a module that was named is missing, or the
            mode's CUDA graphs would be in the one of a `CUDAGraphStep`; in training, when a region can't be compiled.
    """

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        self.config = CompileConfig(**parameters)
        self._compiled: list[CompiledRegions] = []
        self._cache = ExitStack()
        self._folder: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have the regions compiled when they are called, with the cache where it belongs."""
        others = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu and "CUDAGraphStep" in others and (reason := why_not_in_graph(self.config.mode)):
            raise OptimizationError(f"compile: {reason}.")
        self._cache.close()
        self._folder = compiled_folder(self.config.cache_dir, str(trainer.precision))
        self._cache.enter_context(kept_in(self._folder))
        config = self.config
        compiled = CompiledRegions(
            pl_module, config.modules, mode=config.mode, dynamic=config.dynamic, fullgraph=config.fullgraph,
            backend=config.backend,
        )  # fmt: skip
        try:
            changes = compiled.apply()
        except OptimizationError as error:
            raise OptimizationError(f"compile: {error}") from None
        # At a second stage, or with a second Trainer, they are compiled already.
        if not changes and not any(done.model is pl_module for done in self._compiled):
            raise OptimizationError(f"compile: {why_no_region(pl_module)}; leave it out.")
        if changes:
            self.changes = changes
            self._compiled.append(compiled)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the place of torch's cache back. The regions stay compiled."""
        self._cache.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same; Lightning calls nothing else then."""
        self._cache.close()

    def undo(self) -> None:
        """Have everything run in Python again, in every module that this callback has changed."""
        for compiled in self._compiled:
            compiled.undo()
        self._compiled.clear()

    @property
    def tallies(self) -> list[Tally]:
        """What has happened to each region so far."""
        return [tally for compiled in self._compiled for tally in compiled.tallies]

    def table(self) -> Table:
        """Return what was compiled, by region, since this process began: a resumed run starts anew."""
        tallies = self.tallies
        rows = [tally.row() for tally in tallies[:MOST_ROWS]]
        if rest := tallies[MOST_ROWS:]:
            rows.append(total(rest).row(f"{len(rest)} further regions"))
        rows.append(total(tallies).row())
        return Table("compiled regions", COLUMNS, rows, note="; ".join(self._notes(tallies)))

    def _notes(self, tallies: list[Tally]) -> list[str]:
        counts = total(tallies).counts
        notes = [f"cache in {self._folder}"] if self.config.backend == "inductor" else []
        if counts.failed:
            notes.append(f"{counts.failed} pieces of code stay in Python: torch's log says why")
        if counts.bypasses:
            notes.append(f"{counts.bypasses} graphs can't be kept for the next run: custom operators have no key")
        return notes


def why_not_in_graph(mode: Mode) -> str | None:
    """Return why a mode can't be within a captured step, or None."""
    if WITHOUT_GRAPHS[mode] == mode:
        return None
    return (
        f"mode='{mode}' replays CUDA graphs of its own, and cuda_graph_step captures the whole step, in which no other "
        f"graph can be; mode='{WITHOUT_GRAPHS[mode]}' goes with it"
    )
