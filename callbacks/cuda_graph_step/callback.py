"""`CUDAGraphStep`: decides when a fit's steps are captured, and says what came of it."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from fasttrain.callback_door import ActingCallback
from fasttrain.callbacks.cuda_graph_step.config import CUDAGraphStepConfig
from fasttrain.callbacks.cuda_graph_step.decide import decide
from fasttrain.callbacks.cuda_graph_step.inspection.hooks import reads_gradients
from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler, take_over_precision
from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer, cycles_momentum
from fasttrain.callbacks.cuda_graph_step.padding import PadToSizes
from fasttrain.callbacks.cuda_graph_step.pool import GraphPool
from fasttrain.callbacks.cuda_graph_step.recording import CudaRecorder, EagerRecorder, Recorder, recorder_for
from fasttrain.callbacks.cuda_graph_step.step import GraphedStep, Key, StepGraph, StepOptions
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change, Table
from fasttrain.overriding import overridden
from fasttrain.ranks_together import RanksTogether
from fasttrain.short_path import ShortPath
from fasttrain.trainer import build_ddp_on, transform_batches

WARM_UP_OF_DDP = 11
"""Eager steps that DDP needs before a capture, to settle its buckets (PyTorch's notes on CUDA graphs)."""

MOST_ROWS = 20


class CUDAGraphStep(ActingCallback):
    """Captures the whole training step as a CUDA graph and replays it: `Trainer(callbacks=[CUDAGraphStep()])`.

    For modules with automatic optimization. On a device without CUDA graphs it says so and changes nothing. Weights,
    metrics and checkpoints are what the eager step gives; a checkpoint loads in plain Lightning, and the other way
    round. After a replayed step `grad` of the parameters is None, unless `keep_gradients` is set or a hook reads it.

    Args:
        stand_in: without a CUDA device, run the captured function again instead of replaying a graph. For tests: all
            bookkeeping is the same, and nothing gets faster.
        parameters: those of `CUDAGraphStepConfig`.

    Raises:
        OptimizationError: in the fit, if `on_failure` is "error" and the step can't be captured.
    """

    def __init__(self, stand_in: bool = False, **parameters: Any) -> None:
        super().__init__()
        self.config = CUDAGraphStepConfig(**parameters)
        self.stand_in = stand_in
        self.step: GraphedStep | None = None
        self.pool: GraphPool[StepGraph] = self._make_pool(self.config.warm_up)
        self.notes: list[str] = []
        self.refusal: str | None = None
        """Why nothing is captured, where that was clear before the first step."""
        self._short_path: ShortPath | None = None
        self._put_precision_back: Any = None
        self._recorder: CudaRecorder | None = None
        self._ranks = RanksTogether()
        """A replay waits for the other ranks without end; somebody has to look after them."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have inputs padded, if asked for, and DDP built on the stream on which the step will be captured."""
        device = trainer.strategy.root_device
        captures = device.type == "cuda" and not self.stand_in
        if captures or self.stand_in:
            self._ranks.setup(trainer, pl_module, stage)
        if stage == "fit" and captures and isinstance(trainer.strategy, DDPStrategy):
            self._recorder = CudaRecorder(device)
            build_ddp_on(trainer, self._recorder.stream)
        if stage == "fit" and self.config.pad is not None:
            transform_batches(trainer, PadToSizes(self.config.pad, lambda: trainer.training))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the step and take Lightning's place in running it."""
        device = trainer.strategy.root_device
        if device.type != "cuda" and not self.stand_in:
            rank_zero_info(f"CUDAGraphStep: this run is on the {device.type}, without CUDA graphs; nothing changes.")
            return
        decision = decide(trainer, pl_module, self.config.scope, self.config.trusted)
        if decision.scope is None:
            self.refusal = decision.reason
            self._fail(decision.reason)
            return
        optimizer = self._prepare_optimizer(trainer) if decision.scope == "step" else None
        if decision.scope == "fwd_bwd":
            self._note(f"the optimizer's step is left outside of the graph: {decision.reason}")
        if optimizer is not None:
            self._put_precision_back = take_over_precision(trainer.precision_plugin)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None and not isinstance(scaler, DeviceGradScaler):
                self._note(f"the optimizer's step is left outside, since {type(scaler).__name__} scales the loss")
                optimizer.release()
                optimizer = None
        # A single process may have DDP, too: the one that trains beside evaluation ranks, for instance.
        averages = isinstance(trainer.strategy.model, DistributedDataParallel)
        self.pool = self._make_pool(max(self.config.warm_up, WARM_UP_OF_DDP if averages else 0))
        keeps = self.config.keep_gradients or _somebody_reads_gradients(trainer, pl_module)
        self.step = GraphedStep(
            trainer,
            self._recorder_of(device),
            optimizer,
            self.pool,
            StepOptions(self.config.checks, keeps),
            self._fail,
            self._note,
        )
        if self.config.short_path:
            self._short_path = ShortPath(trainer, self.step.loop, self.step)
        what = "the whole step" if optimizer is not None else "forward and backward"
        self.changes = [Change("training_step", f"{what} captured as a CUDA graph")]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look closely at what is built in before the next replay: callbacks freeze and unfreeze here."""
        if self.step is not None:
            self.step.expect_changes()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The same after an evaluation."""
        if self.step is not None:
            self.step.expect_changes()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give everything back, before the process group goes."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give everything back here too; Lightning calls nothing else then."""
        self._ranks.on_exception(trainer, pl_module, exception)
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the other ranks go."""
        self._ranks.teardown(trainer, pl_module, stage)

    def table(self) -> Table:
        """Return what happened to the steps, by input signature."""
        tallies = sorted(self.pool.tallies.items(), key=lambda item: -(item[1].hits + item[1].eager))
        rows: list[tuple[str | int | float, ...]] = []
        for key, tally in tallies[:MOST_ROWS]:
            signature, window = cast(Key, key)
            name = f"{signature} {_window_text(window)}".strip()
            rows.append((name, tally.hits, tally.eager, tally.captures, tally.evictions))
        if rest := [tally for _, tally in tallies[MOST_ROWS:]]:
            sums = [sum(getattr(t, name) for t in rest) for name in ("hits", "eager", "captures", "evictions")]
            rows.append((f"{len(rest)} further signatures", *sums))
        columns = ("input signature", "hits", "eager", "captures", "evictions")
        return Table("steps by input signature", columns, rows, note="; ".join(self.notes))

    def _prepare_optimizer(self, trainer: pl.Trainer) -> CapturableOptimizer | None:
        optimizer = CapturableOptimizer(trainer.optimizers[0], trainer.strategy.root_device)
        reason = optimizer.problem() if optimizer.is_known else None
        if reason is None and any(cycles_momentum(config.scheduler) for config in trainer.lr_scheduler_configs):
            reason = optimizer.device_values_problem()
            if reason is None:
                optimizer.use_device_values()
        if reason is None:
            return optimizer
        optimizer.release()
        self._note(f"the optimizer's step is left outside of the graph, since {reason}")
        return None

    def _make_pool(self, warm_up: int) -> GraphPool[StepGraph]:
        return GraphPool(self.config.max_graphs, warm_up, self.config.eager_first)

    def _recorder_of(self, device: torch.device) -> Recorder:
        if self.stand_in:
            return EagerRecorder()
        return self._recorder if self._recorder is not None else recorder_for(device)

    def _release(self) -> None:
        if self._short_path is not None:
            self._short_path.put_back()
        if self.step is not None:
            self.step.release()
        if self._put_precision_back is not None:
            self._put_precision_back()
        self._short_path = self.step = self._put_precision_back = self._recorder = None

    def _fail(self, reason: str) -> None:
        if self.config.on_failure == "error":
            raise OptimizationError(f"cuda_graph_step: {reason}.")
        self.notes.append(f"steps run eagerly, since {reason}")
        rank_zero_warn(f"CUDAGraphStep: steps run eagerly, since {reason}.")

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        rank_zero_info(f"CUDAGraphStep: {sentence}.")


def _somebody_reads_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    owners: list[Any] = [module, *trainer.callbacks]  # type: ignore[attr-defined]
    ends = [(owner.on_train_batch_end, owner) for owner in owners if overridden(owner, "on_train_batch_end")]
    return any(reads_gradients(function, owner, module) for function, owner in ends)


def _window_text(window: Any) -> str:
    if window.accumulate == 1:
        return ""
    parts = [name for name, is_on in (("first", window.zeroes), ("last", window.steps)) if is_on] or ["middle"]
    return f"({' and '.join(parts)} of {window.accumulate})"
