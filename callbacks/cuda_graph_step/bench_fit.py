"""The fit that this room's bench cases time: everything is on that a user has on, and a clock."""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from fasttrain.batches import map_tensors
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.measure import synchronize
from fasttrain.quiet import quiet_libraries
from fasttrain.trainer import stop_now

OptimizerMaker = Callable[[Any], torch.optim.Optimizer]

NOTE = "logger, progress bar and one self.log per step on; batches pinned in host memory"

WINDOW = 50
"""Steps between two looks at the clock, which wait for the device."""

FEWEST_WINDOWS = 5


class Classifier(pl.LightningModule):
    """Any network, with cross-entropy and one logged value.

    Args:
        net: takes the first part of a batch; the second is the labels.
        make_optimizer: of the parameters.
        logs: whether the loss is logged.
        prog_bar: whether the progress bar shows it.
    """

    def __init__(
        self, net: nn.Module, make_optimizer: OptimizerMaker, logs: bool = True, prog_bar: bool = False
    ) -> None:
        super().__init__()
        self.net, self.make_optimizer, self.logs, self.prog_bar = net, make_optimizer, logs, prog_bar

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = self.loss(batch)
        if self.logs:
            self.log("loss", loss, prog_bar=self.prog_bar)
        return loss

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of inputs and labels."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.make_optimizer(self.parameters())


class Endless:
    """A loader that hands out the same few batches again and again, and costs next to nothing."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[index % len(self.batches)] for index in range(self.count))


class StepTimer(pl.Callback):
    """Takes the time of every `window` steps after some to warm up, and notes how a graph step got going.

    Args:
        warm_up: steps that are not timed.
        window: steps between two looks at the clock, which wait for the device.
        enough_s: timed seconds after which the fit is ended, if they are `FEWEST_WINDOWS` windows at least.
        graph: the fit's own, if it has one. To stand after the timer in the list of callbacks, so that what it does
            before the first step counts.
    """

    def __init__(
        self, warm_up: int, window: int = WINDOW, enough_s: float = math.inf, graph: CUDAGraphStep | None = None
    ) -> None:
        self.warm_up, self.window, self.enough_s, self.graph = warm_up, window, enough_s, graph
        self.step_ms = list[float]()
        """Milliseconds a step, by window."""
        self.capture_s: float | None = None
        """Seconds from the start of training until nothing but replays is left to do: the look at the code, eager
        steps, the capture and the checked replays. None if that was never reached."""
        self.noise = math.nan
        """Largest relative difference of two eager steps in any tensor; 0 where replays were equal bit for bit.

        The self-check allows a multiple of it in every tensor, so where it is large little was checked.
        """
        self.replays = 0
        """Timed steps that were replays, to be compared with `steps`."""

    @property
    def steps(self) -> int:
        """Steps that were timed."""
        return len(self.step_ms) * self.window

    @property
    def why_not_credited(self) -> str | None:
        """Why the times are not those of replays, though there is a graph step; None if they are."""
        if self.graph is None or (self.replays == self.steps > 0 and self.capture_s is not None):
            return None
        return "; ".join([f"{self.replays} of {self.steps} timed steps were replays", *self.graph.notes])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._started = self._then = time.perf_counter()
        self._hits = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the clock when a window is full."""
        if self.graph is not None and self.capture_s is None and _is_checked(self.graph):
            synchronize(pl_module.device)
            self.capture_s = time.perf_counter() - self._started
            self.noise = self.graph.step.worst_noise if self.graph.step is not None else math.nan
        if batch_idx % self.window:
            return
        synchronize(pl_module.device)
        now, hits = time.perf_counter(), self.graph.pool.hits if self.graph is not None else 0
        if batch_idx - self.window >= self.warm_up:
            self.step_ms.append((now - self._then) / self.window * 1e3)
            self.replays += hits - self._hits
        self._then, self._hits = now, hits
        timed_s = sum(self.step_ms) * self.window / 1e3
        if timed_s >= self.enough_s and len(self.step_ms) >= FEWEST_WINDOWS:
            stop_now(trainer)


def timed_fit(
    module: pl.LightningModule,
    batches: Sequence[Any],
    timer: StepTimer,
    steps: int,
    precision: Any = "32-true",
    accelerator: str = "gpu",
    **options: Any,
) -> None:
    """Fit a module for at most `steps` steps under a timer, and under its graph step if it has one.

    Args:
        options: further arguments of lightning.Trainer.
    """
    gc.collect()  # a Trainer and its module hold each other, and the last fit's memory
    if accelerator == "gpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        trainer = pl.Trainer(
            accelerator=accelerator,
            max_epochs=1,
            precision=precision,
            logger=CSVLogger(folder),
            default_root_dir=folder,
            callbacks=[timer, *([timer.graph] if timer.graph is not None else [])],
            enable_model_summary=False,
            **{"devices": 1, **options},
        )
        trainer.fit(module, Endless(batches, steps))


def pinned(batch: Any) -> Any:
    """Return a batch in pinned host memory; as it is where there is no GPU to pin it for."""
    return map_tensors(batch, lambda tensor: tensor.pin_memory()) if torch.cuda.is_available() else batch


def _is_checked(graph: CUDAGraphStep) -> bool:
    # The replay that follows a capture at once is no hit of the pool.
    return graph.pool.captures > 0 and graph.pool.hits >= graph.config.checks - 1
