"""Values given to `self.log` in a replayed training step: kept on the device, handed to Lightning when it reads.

A replayed step runs no Python, so `self.log` is not called again. What it was given are static outputs of the graph;
what Lightning would have added up over the epoch is added up inside the graph. Lightning's own store of results asks
for both when somebody reads: a logger at its interval, a callback, the progress bar when it is drawn.

Reaches into Lightning's `_ResultCollection`; written against Lightning 2.6.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric

from fasttrain.errors import OptimizationError

STEP_HOOKS = (
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
"""Hooks of one step, in Lightning's order; what is logged in them is keyed by their names."""


@dataclass(frozen=True)
class Logged:
    """One `self.log` of a step: its key in Lightning's store, and the value, or the metric that computes one."""

    key: str
    value: Tensor | None
    metric: Metric | None
    batch_size: int
    shown: Tensor | None = None
    """The step's value over all ranks, where that is another one (`sync_dist`)."""
    earlier: "Logged | None" = None
    """What the same step logged under this key before."""

    @property
    def rows(self) -> int:
        """Return what the step weighs in an epoch's mean."""
        return self.batch_size if self.earlier is None else self.batch_size + self.earlier.rows


StepLogs = Mapping[str, Logged]


class StepResults(_ResultCollection):
    """Lightning's store of the fit loop, which also takes what replays leave on the device.

    It takes the place of `plain` and holds the same metrics. Reading settles what is pending, so that every reader
    finds what it would find after an eager step.
    """

    def __init__(self, plain: _ResultCollection, trainer: pl.Trainer) -> None:
        super().__init__(training=plain.training)
        self.update(plain)
        self.batch, self.batch_size, self.dataloader_idx = plain.batch, plain.batch_size, plain.dataloader_idx
        self._connector: Any = trainer._logger_connector
        self._lightnings_reduce = trainer.strategy.reduce
        self._reduce_by(reduce_over_ranks)
        self._collected: dict[str, Logged] | None = None
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._sums_are_loaded = False
        self._pending: StepLogs | None = None
        self._pending_steps = 0
        self._pending_rows: dict[str, int] = {}

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Logged]]:
        """Within, `self.log` is written down instead of acted upon; yields what was."""
        self._collected = {}
        try:
            yield self._collected
        finally:
            self._collected = None

    def prepare(self) -> None:
        """Make the sums for all values known so far, outside of a capture."""
        self.settle()
        for key, metric in self.items():
            if not (metric.is_tensor and metric.meta.on_epoch and metric.meta.fx in STEP_HOOKS):
                continue
            # One made for an earlier graph stays, or that graph would add to a sum that nobody reads.
            if key not in self._sums or self._sums[key].device != metric.value.device:
                dtype = self._dtypes.get(key, metric.value.dtype)  # a reset makes a double single again
                self._sums[key] = metric.value.detach().to(dtype, copy=True)
        self._sums_are_loaded = False
        self.load()

    @property
    def static_tensors(self) -> dict[str, Tensor]:
        """Return the sums by key: state that a replay changes."""
        return self._sums

    def add_up(self, logs: StepLogs) -> None:
        """Add a step's values to the sums on the device, as Lightning's own results would. May be captured."""
        for logged in logs.values():
            self._add_up(logged)

    def before_replay(self) -> None:
        """Do what `self.log` does at the first step of an epoch, and have the sums start from Lightning's values."""
        if self._connector._first_loop_iter is not False:
            for hook in {metric.meta.fx for metric in self.values()}.intersection(STEP_HOOKS):
                self.reset(metrics=False, fx=hook)
        if not self._sums_are_loaded:
            self.load()

    def replayed(self, logs: StepLogs) -> None:
        """Note that a replay computed these static values anew."""
        if not logs:
            return
        if self._pending is not logs:
            if self._pending is not None and self._pending.keys() != logs.keys():
                self.settle()
            self._pending = logs
            self._connector._current_fx = STEP_HOOKS[0]
        self._pending_steps += 1
        for key in self._sums:
            if key in logs:
                self._pending_rows[key] = self._pending_rows.get(key, 0) + logs[key].rows

    def load(self) -> None:
        """Set the sums to Lightning's values, which an eager step or a new epoch has changed."""
        for key, total in self._sums.items():
            total.copy_(self[key].value)
        self._sums_are_loaded = True

    def settle(self) -> None:
        """Give Lightning's metrics the values of the last replay and the sums up to it. Copies, no synchronization."""
        if self._pending is None:
            return
        logs, steps, rows = self._pending, self._pending_steps, self._pending_rows
        self._pending, self._pending_steps, self._pending_rows = None, 0, {}
        for key, logged in logs.items():
            self._settle_one(self[key], logged, rows.get(key, 0), steps)

    def log(self, fx: str, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """Log as Lightning does, or write down."""
        if self._collected is None:
            self.settle()
            self._sums_are_loaded = False
            if options.get("sync_dist"):
                options["sync_dist_fn"] = reduce_over_ranks
            super().log(fx, name, value, *arguments, **options)
            if isinstance(value, Tensor):
                self._dtypes[f"{fx}.{name}"] = self[f"{fx}.{name}"].value.dtype
            return
        key = f"{fx}.{name}"
        metric = self.get(key)
        if metric is None:
            raise OptimizationError(
                f"self.log({name!r}) was not called in the eager steps before the capture, so it depends on something "
                "that changes from step to step; call it in every step, or log it in on_train_batch_end."
            )
        rows = self._extract_batch_size(metric, options.get("batch_size"), metric.meta)
        if isinstance(value, Metric):
            self._collected[key] = Logged(key, value._forward_cache, value, rows)
        else:
            dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else metric.value.dtype
            # A copy, as Lightning takes one: the step may go on changing the tensor in place.
            kept = value.detach().to(dtype, copy=True)
            is_reduced = metric.meta.on_step and metric.meta.sync.should
            shown = metric.meta.sync(kept.clone()) if is_reduced else None
            self._collected[key] = Logged(key, kept, None, rows, shown, self._collected.get(key))

    def metrics(self, on_step: bool) -> Any:
        """Return all values by purpose, those of the last replay included."""
        self.settle()
        return super().metrics(on_step)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset as Lightning does; the sums start anew."""
        if self._collected is not None:
            return  # `self.log` in the first step of an epoch asks for it; `before_replay` has done it
        self.settle()
        super().reset(metrics=metrics, fx=fx)
        self._sums_are_loaded = False

    def to(self, *arguments: Any, **options: Any) -> "StepResults":
        """Move all values."""
        self.settle()
        super().to(*arguments, **options)
        self._sums_are_loaded = False
        return self

    def plain(self) -> _ResultCollection:
        """Return an ordinary store with the same metrics, to be put back in this one's place."""
        self.settle()
        self._reduce_by(self._lightnings_reduce)
        plain = _ResultCollection(training=self.training)
        plain.update(self)
        plain.batch, plain.batch_size, plain.dataloader_idx = self.batch, self.batch_size, self.dataloader_idx
        return plain

    def _reduce_by(self, reduce: Any) -> None:
        for metric in self.values():
            sync = metric.meta.sync
            if sync.should:
                sync.fn = reduce
                sync.should = True  # has Lightning take it up

    def _add_up(self, logged: Logged) -> None:
        if logged.earlier is not None:
            self._add_up(logged.earlier)
        if logged.value is None or logged.key not in self._sums:
            return
        total, meta = self._sums[logged.key], self[logged.key].meta
        if meta.is_mean_reduction:
            total.add_(logged.value * logged.batch_size)
        elif meta.is_max_reduction or meta.is_min_reduction:
            total.copy_(meta.reduce_fx(total, logged.value))
        elif meta.is_sum_reduction:
            total.add_(logged.value)

    def _settle_one(self, result: _ResultMetric, logged: Logged, rows: int, steps: int) -> None:
        result.has_reset = False
        result._computed = None
        result._update_count += steps
        if logged.metric is not None:
            result.value = logged.metric
            result._forward_cache = logged.value.clone() if logged.value is not None else None
            return
        assert logged.value is not None
        if result.meta.on_step:
            result._forward_cache = (logged.value if logged.shown is None else logged.shown).clone()
        if not result.meta.on_epoch:
            result.value = result._forward_cache
            return
        result.value = self._sums[logged.key].clone()
        if result.meta.is_mean_reduction:
            result.cumulated_batch_size = result.cumulated_batch_size + rows


def reduce_over_ranks(value: Tensor, group: Any = None, reduce_op: str = "mean") -> Tensor:
    """Return a value reduced over all ranks, in place, as Lightning's strategy does for `sync_dist`.

    Lightning waits for all ranks on the host before, which no graph can hold. Eager steps use this one as well: while
    one rank replays, another may run a shape that it has not seen before, and both must call the same collectives.
    """
    group = torch.distributed.group.WORLD if group is None else group
    name = {"mean": "AVG"}.get(reduce_op, reduce_op.upper())
    divides = name == "AVG" and torch.distributed.get_backend(group) == "gloo"  # which has no mean
    torch.distributed.all_reduce(value, getattr(torch.distributed.ReduceOp, "SUM" if divides else name), group)
    if divides:
        value.copy_(value / torch.distributed.get_world_size(group))  # a count of rows may be an integer
    return value


@contextmanager
def numbers_logged_as_tensors(module: pl.LightningModule, numbers: dict[str, float]) -> Iterator[None]:
    """Within, `self.log` of a Python number logs a tensor made on the device, which may be captured.

    Args:
        module: gets a `log` of its own meanwhile, and so do the callbacks to which Lightning lent the module's.
        numbers: is filled with name and number of each; a replay would not see them change.
    """
    plain = module.log

    def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(value, (bool, int, float)):
            numbers[name] = float(value)
            value = torch.full((), float(value), device=module.device, dtype=torch.get_default_dtype())
        plain(name, value, *arguments, **options)

    callbacks: list[Any] = [] if module._trainer is None else module._trainer.callbacks  # type: ignore[attr-defined]
    borrowers = [callback for callback in callbacks if vars(callback).get("log") == plain]
    object.__setattr__(module, "log", log)
    for callback in borrowers:
        callback.log = log
    try:
        yield
    finally:
        object.__delattr__(module, "log")
        for callback in borrowers:
            callback.log = plain
