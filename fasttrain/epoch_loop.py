"""Lightning's training loop with the optimization step handed to somebody else, and its per-batch path made short.

Reaches into `_AutomaticOptimization` and `_TrainingEpochLoop`; written against Lightning 2.6.
`tests/test_epoch_loop.py` fails when one of them changes its shape.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fasttrain.step_results import StepResults

Arguments = OrderedDict[str, Any]
"""What `training_step` is called with: `batch`, and `batch_idx` where it takes one."""

Outputs = dict[str, Any]
"""What a step hands to `on_train_batch_end`: `loss`, and the other keys that `training_step` returned."""


class Window(NamedTuple):
    """What a batch does within its accumulation window. Steps of the same window kind run the same code."""

    accumulate: int
    """Batches a window, by which the loss is divided."""
    zeroes: bool
    """Whether gradients are zeroed before its backward."""
    steps: bool
    """Whether the optimizer steps after it."""


class DelegatedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization whose `run` asks a delegate, which may use the parts of Lightning's own.

    Args:
        trainer: its loop's optimization is replaced until `put_back`.
        delegate: called with the batch index and `training_step`'s arguments; returns the step's outputs.
    """

    def __init__(self, trainer: pl.Trainer, delegate: Callable[[int, Arguments], Outputs]) -> None:
        super().__init__(trainer)
        loop: Any = trainer.fit_loop.epoch_loop
        # In a tuple: a loop saves every loop among its attributes with itself.
        self._replaced: tuple[_AutomaticOptimization] = (loop.automatic_optimization,)
        self._delegate = delegate
        self.optim_progress = loop.automatic_optimization.optim_progress
        self.results = StepResults(loop._results, trainer)
        loop.automatic_optimization = self
        loop._results = self.results

    def put_back(self) -> None:
        """Give Lightning its own optimization and results again."""
        loop: Any = self.trainer.fit_loop.epoch_loop
        if loop.automatic_optimization is self:
            loop.automatic_optimization = self._replaced[0]
            loop._results = self.results.plain()

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Arguments) -> Outputs:
        """Called by Lightning for each batch."""
        return self._delegate(batch_idx, kwargs)

    def run_plain(self, batch_idx: int, arguments: Arguments) -> Outputs:
        """Do the whole step as Lightning does, every hook included."""
        self._have_ddp_sync_buffers(self.window(batch_idx).zeroes)
        return super().run(self.trainer.optimizers[0], batch_idx, arguments)

    def forward_and_backward(self, batch_idx: int, arguments: Arguments) -> Outputs:
        """Do Lightning's closure alone: `training_step`, zeroing where it is due, backward."""
        self._have_ddp_sync_buffers(self.window(batch_idx).zeroes)
        closure = self._make_closure(arguments, self.trainer.optimizers[0], batch_idx)
        with _block_parallel_sync_behavior(self.trainer.strategy, block=not self.window(batch_idx).steps):
            closure()
        result = closure.consume_result()
        return {} if result.loss is None else dict(result.asdict())

    def step_optimizer(self, batch_idx: int, loss: Tensor | None) -> None:
        """Do Lightning's optimizer step on the gradients that are there: hooks, unscaling, clipping, update."""
        self._optimizer_step(batch_idx, lambda: loss)

    def window(self, batch_idx: int) -> Window:
        """Return what the batch that is being trained on does within its accumulation window."""
        accumulate = self.trainer.accumulate_grad_batches
        steps = not self.trainer.fit_loop._should_accumulate()
        return Window(accumulate, batch_idx % accumulate == 0, steps)

    def next_window(self, batch_idx: int, is_last: bool) -> Window:
        """Return the same for a batch that has been fetched and not yet begun."""
        accumulate = self.trainer.accumulate_grad_batches
        ready = batch_idx + 1
        is_last = is_last or ready == self.trainer.num_training_batches
        return Window(accumulate, batch_idx % accumulate == 0, is_last or ready % accumulate == 0)

    @contextmanager
    def progress_kept(self) -> Iterator[None]:
        """Within, running a step leaves Lightning's counts as they are."""
        step, zero_grad = self.optim_progress.optimizer.step, self.optim_progress.optimizer.zero_grad
        trackers = (step.total, step.current, zero_grad.total, zero_grad.current)
        kept = [dict(vars(tracker)) for tracker in trackers]
        try:
            yield
        finally:
            for tracker, values in zip(trackers, kept, strict=True):
                vars(tracker).update(values)

    def count(self, window: Window, stepped: bool) -> None:
        """Count a step that was done without Lightning's own code."""
        self._have_ddp_sync_buffers(window.steps)
        if window.zeroes:
            zero_grad: Any = self.optim_progress.optimizer.zero_grad
            for progress in (zero_grad.total, zero_grad.current):
                progress.ready += 1
                progress.started += 1
                progress.completed += 1
        if stepped:
            step = self.optim_progress.optimizer.step
            for tracker in (step.total, step.current):
                tracker.ready += 1
                tracker.completed += 1

    def _have_ddp_sync_buffers(self, does: bool) -> None:
        """Tell DDP whether its next forward takes over the first rank's buffers.

        It does after a step that averaged gradients, which it notes on the host, where a replay notes nothing. Told
        before each step, every rank does the same whether it replays or not, and an evaluation changes nothing.
        """
        model: Any = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = does
