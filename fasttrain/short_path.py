"""Lightning's path from one batch to the next, without the work that no hook of this run asks for.

Lightning calls some twenty hooks a batch, most of them empty, reads every logged value, and inspects `training_step`'s
signature: a few hundred microseconds, which is more than a captured step of a small model takes. Here a hook is called
if somebody overrides it, in Lightning's order, and values are read when they are due. What a batch goes through is
otherwise `_TrainingEpochLoop.advance` of Lightning 2.6; `tests/test_epoch_loop.py` fails when that changes.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, cast

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from fasttrain.batches import OpaqueLeaf, Signature, flatten
from fasttrain.clock import RunClock
from fasttrain.epoch_loop import DelegatedOptimization, Outputs, Window
from fasttrain.overriding import overridden
from fasttrain.trainer import changes_only_layout

SECONDS_BETWEEN_DRAWS = 0.1
"""A progress bar is drawn at most ten times a second: each time costs a step's time and waits for the device."""

KNOWN = ("lightning.", "pytorch_lightning.", "fasttrain.")

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Replays(Protocol):
    """Captured steps by signature."""

    def find(self, signature: Signature, window: Window) -> Any | None:
        """Return the captured step, or None."""

    def replay(self, graph: Any, leaves: list[Tensor], batch_idx: int) -> None:
        """Do the step on these tensors."""

    def outputs(self, graph: Any, to_keep: bool) -> Outputs:
        """Return what the step hands to `on_train_batch_end`; copies, if somebody may keep them."""


class ShortPath:
    """Takes the place of an epoch loop's `advance`.

    Args:
        trainer: in a fit, with everything attached.
        optimization: runs the steps that are not replayed.
        replays: knows those that are.
    """

    def __init__(self, trainer: pl.Trainer, optimization: DelegatedOptimization, replays: Replays) -> None:
        self.trainer = cast(Any, trainer)
        self.optimization, self.replays = optimization, replays
        self._loop = cast(Any, trainer.fit_loop.epoch_loop)
        self._connector: Any = trainer._logger_connector
        self._plain: Callable[[_DataFetcher], None] = self._loop.advance
        self._callbacks: list[pl.Callback] = []
        self._drawn_at = 0.0
        profiler = self.trainer.profiler
        self._clock = profiler if isinstance(profiler, RunClock) else None
        self._is_watched = not isinstance(profiler, (PassThroughProfiler, RunClock))
        self._copies_directly = transfer_is_plain(trainer)
        self._takes_batch_idx = "batch_idx" in self._loop._build_kwargs(OrderedDict(), None, 0)
        self._loop.advance = self.advance

    def put_back(self) -> None:
        """Give Lightning its own path again."""
        vars(self._loop).pop("advance", None)

    def advance(self, fetcher: _DataFetcher) -> None:
        """Fetch one batch and train on it."""
        loop, trainer, connector = self._loop, self.trainer, self._connector
        # Restarting, a loader iterator handed to the step, and somebody who measures Lightning: rare, and its own.
        if loop.restarting or self._is_watched or isinstance(fetcher, _DataLoaderIterDataFetcher):
            self._plain(fetcher)
            return
        loop.val_loop.restarting = False
        if trainer.callbacks != self._callbacks:
            self._find_hooks()
        batch = next(fetcher)[0]
        batch_idx = loop.batch_progress.current.ready
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        loop.batch_progress.is_last_batch = fetcher.done

        graph: Any = None
        leaves: list[Tensor] = []
        if self._finds_early:
            graph, leaves = self._find(batch, self.optimization.next_window(batch_idx, fetcher.done))
        if graph is None:
            batch = self._transfer(batch)
        loop.batch_progress.increment_ready()
        connector.on_batch_start(batch)
        skips_epoch, outputs = False, None
        if batch is None:
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            skips_epoch = self._call_start_hooks(batch, batch_idx)
        if skips_epoch:
            loop.batch_progress.increment_by(0, is_last_batch=True)
        elif batch is not None:
            loop.batch_progress.increment_started()
            if not self._finds_early:
                graph, leaves = self._find(batch, self.optimization.window(batch_idx))
            outputs, graph = self._step(graph, leaves, batch, batch_idx)
        loop.batch_progress.increment_processed()
        if trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skips_epoch:
            connector.on_batch_end()  # the last batch of this epoch was the one before
            raise StopIteration

        # What was logged in a replay is read where Lightning would show or lose it; in between nobody has to wait.
        reads = graph is None or loop._is_training_done or connector.should_update_logs or trainer.fast_dev_run
        reads = bool(reads or trainer.should_stop or loop._should_check_val_fx(fetcher))
        self._call_end_hooks(outputs, batch, batch_idx, draws=reads)
        if reads or trainer.should_stop:
            connector.on_batch_end()
        loop.batch_progress.increment_completed()
        if reads or trainer.should_stop:
            connector.update_train_step_metrics()

    def _find(self, batch: Any, window: Window) -> tuple[Any | None, list[Tensor]]:
        try:
            leaves, signature = flatten(batch)
        except OpaqueLeaf:
            return None, []
        return self.replays.find(signature, window), leaves

    def _transfer(self, batch: Any) -> Any:
        trainer = self.trainer
        module: Any = trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _step(self, graph: Any, leaves: list[Tensor], batch: Any, batch_idx: int) -> tuple[Outputs, Any]:
        """Return the step's outputs, and its graph if it was a replay."""
        clock = self._clock
        if clock is not None:
            clock.start("run_training_batch")
        try:
            if graph is None:
                arguments: Any = OrderedDict(batch=batch)
                if self._takes_batch_idx:
                    arguments["batch_idx"] = batch_idx
                return self.optimization.run(self.trainer.optimizers[0], batch_idx, arguments), None
            self.replays.replay(graph, leaves, batch_idx)
            return self.replays.outputs(graph, to_keep=self._somebody_keeps), graph
        finally:
            if clock is not None:
                clock.stop("run_training_batch")

    def _call_start_hooks(self, batch: Any, batch_idx: int) -> bool:
        """Return whether the module asks to skip the rest of the epoch."""
        trainer, module = self.trainer, self.trainer.lightning_module
        if self._start_hooks:
            with _named(module, "on_train_batch_start"):
                for hook in self._start_hooks:
                    hook(trainer, module, batch, batch_idx)
        if not self._module_starts:
            return False
        with _named(module, "on_train_batch_start"):
            return bool(module.on_train_batch_start(batch, batch_idx) == -1)

    def _call_end_hooks(self, outputs: Any, batch: Any, batch_idx: int, draws: bool) -> None:
        trainer, module = self.trainer, self.trainer.lightning_module
        if not draws and self._has_bars and (batch_idx + 1) % self._batches_between_draws == 0:
            now = time.perf_counter()
            draws = now - self._drawn_at >= SECONDS_BETWEEN_DRAWS
            self._drawn_at = now if draws else self._drawn_at
        if self._end_hooks:
            with _named(module, "on_train_batch_end"):
                for is_bar, hook in self._end_hooks:
                    if not is_bar:
                        hook(trainer, module, outputs, batch, batch_idx)
                    elif draws:
                        self._draw(hook, outputs, batch, batch_idx)
        if self._module_ends:
            with _named(module, "on_train_batch_end"):
                module.on_train_batch_end(outputs, batch, batch_idx)
        if self._has_bars and trainer.should_stop and not draws:  # asked for after the bar had its turn
            for is_bar, hook in self._end_hooks:
                if is_bar:
                    self._draw(hook, outputs, batch, batch_idx)

    def _draw(self, hook: Callable[..., None], outputs: Any, batch: Any, batch_idx: int) -> None:
        """Have a bar stand where it would stand if it had been told of every batch."""
        rate = self._batches_between_draws
        for index in sorted({(batch_idx + 1) // rate * rate - 1, batch_idx}):
            if index >= 0:
                hook(self.trainer, self.trainer.lightning_module, outputs, batch, index)

    def _find_hooks(self) -> None:
        callbacks: Any = self.trainer.callbacks
        module = self.trainer.lightning_module
        starting = [c.on_train_batch_start for c in callbacks if overridden(c, "on_train_batch_start")]
        ending = [(c, c.on_train_batch_end) for c in callbacks if overridden(c, "on_train_batch_end")]
        bars = [c for c, _ in ending if _is_lightnings_bar(c)]
        self._start_hooks = starting
        self._end_hooks = [(c in bars, hook) for c, hook in ending]
        self._has_bars = bool(bars)
        self._batches_between_draws = max(1, *(int(bar.refresh_rate) for bar in bars)) if bars else 1
        self._module_starts = overridden(module, "on_train_batch_start")
        self._module_ends = overridden(module, "on_train_batch_end")
        # A start hook may change the batch, what the step has built in, or whether there is a step; any hook may keep
        # the batch. Then it is brought to the device first, and a graph is looked for after the start hooks.
        strangers_start = self._module_starts or any(not _keeps_nothing(hook) for hook in starting)
        strangers_end = self._module_ends or any(not _keeps_nothing(hook) for _, hook in ending)
        self._somebody_keeps = strangers_start or strangers_end
        self._finds_early = self._copies_directly and not self._somebody_keeps
        self._callbacks = list(callbacks)


class _named:
    """Within, `self.log` knows which hook it is called in. A class, since a generator would take twice as long."""

    __slots__ = ("attributes", "before", "name")

    def __init__(self, module: pl.LightningModule, name: str) -> None:
        self.attributes, self.name = vars(module), name

    def __enter__(self) -> None:
        self.before = self.attributes["_current_fx_name"]
        self.attributes["_current_fx_name"] = self.name

    def __exit__(self, *exception: object) -> None:
        self.attributes["_current_fx_name"] = self.before


def transfer_is_plain(trainer: Any) -> bool:
    """Whether a batch reaches the device as it is, so that it may be copied straight into static inputs."""
    strategy: Any = trainer.strategy
    owners = (trainer.lightning_module, trainer.datamodule)
    if any(overridden(owner, hook) for owner in owners for hook in TRANSFER_HOOKS):
        return False
    if type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        return False
    return changes_only_layout(trainer) and type(strategy).batch_to_device is Strategy.batch_to_device


def _is_lightnings_bar(callback: pl.Callback) -> bool:
    """Whether leaving an update out loses nothing: Lightning's own bars are told the batch's number each time."""
    return isinstance(callback, pl.callbacks.ProgressBar) and type(callback).__module__.startswith("lightning.")


def _keeps_nothing(hook: Any) -> bool:
    """Whether a callback's hook is known not to keep or change batches and outputs. Lightning's own and ours do not.

    A user's function in Lightning's `LambdaCallback` is the user's, and so is a subclass.
    """
    owner = getattr(hook, "__self__", None)
    modules = [str(getattr(thing, "__module__", "")) for thing in (hook, type(owner))]
    return all(name.startswith(KNOWN) and not name.startswith("fasttrain.recipes.") for name in modules)
