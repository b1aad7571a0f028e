"""When device_prefetch applies, and its two doors: a Lightning callback and the plan's optimization."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn

from fasttrain.batches import tensors_in
from fasttrain.callback_door import ActingCallback, CallbackOptimization
from fasttrain.callbacks.device_prefetch.exchange import Exchange
from fasttrain.callbacks.device_prefetch.loader import PrefetchingLoader, PullAhead, depth_for
from fasttrain.callbacks.device_prefetch.mover import DeviceMover
from fasttrain.callbacks.device_prefetch.streams import CudaStreams, Streams
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.fetching import stand_between
from fasttrain.measure import ms_text, time_ms
from fasttrain.optimization import Applies, Change, Context, Refuses, Stage, Table, Verdict
from fasttrain.trainer import exchange_batches, layout_transforms

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass(frozen=True)
class DevicePrefetchConfig:
    """How batches are moved."""

    depth: int = 2
    """Batches on the device ahead of the one in use."""
    ahead: PullAhead = "auto"
    """Whether a thread pulls batches ahead of their turn: `auto`, where the loader has worker processes; `always`, also
    where samples are made in this process; `never`."""
    channels_last: bool = False
    """Lay images and volumes out in channels_last; what another optimization will lay out is laid out in any case."""
    dtype: str | None = None
    """Cast floating-point tensors to this type (`bfloat16`); null leaves them alone."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(f"optimizations.device_prefetch.depth is {self.depth}; it must be at least 1.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"optimizations.device_prefetch.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}, or "
                "null."
            )


class DevicePrefetcher(ActingCallback):
    """Moves the next batches to the device while the step runs: `Trainer(callbacks=[DevicePrefetcher()])`.

    For training batches of any structure from any loader. If the module has a method `prepare_batch(batch)`, it is
    called there too, and the step is given what it returns.

    Args:
        streams: those of another device than the Trainer's; for tests.
        parameters: those of `DevicePrefetchConfig`.
    """

    def __init__(self, streams: Streams | None = None, **parameters: Any) -> None:
        super().__init__()
        self.config = DevicePrefetchConfig(**parameters)
        self.exchange: Exchange | None = None
        self._streams = streams
        self._loader: PrefetchingLoader | None = None
        self._end_exchange: Callable[[], None] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Be there when training batches are moved."""
        device = trainer.strategy.root_device
        if stage != "fit":
            return
        if self._streams is None and device.type != "cuda":
            rank_zero_info(
                f"DevicePrefetcher: this run is on the {device.type}, without CUDA streams; nothing changes."
            )
            return
        config = self.config
        mover = DeviceMover(
            self._streams or CudaStreams(device),
            config.channels_last,
            DTYPES[config.dtype] if config.dtype else None,
            lambda: layout_transforms(trainer),
            getattr(pl_module, "prepare_batch", None),
        )
        exchange = self.exchange = Exchange(mover, config.depth)
        self._end_exchange = exchange_batches(trainer, lambda batch: exchange(batch) if trainer.training else batch)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Come between Lightning and the loader."""
        self._stand_between(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do so again, in case that Lightning made its loaders anew."""
        self._stand_between(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Wait for the device here if the host is too far ahead: the wait belongs to the step and not to the data."""
        if self.exchange is not None:
            profiler: Any = vars(trainer)["profiler"]
            with profiler.profile("[DevicePrefetcher].wait_for_step"):
                self.exchange.hold_back()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the thread and leave Lightning's own way."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same here; Lightning calls nothing else then."""
        self._release()

    def table(self) -> Table | None:
        """Return how many batches were on the device when the step asked for them; None where none was moved ahead."""
        exchange = self.exchange
        if exchange is None or not self.changes:
            return None
        columns = (
            "batches found on the device",
            "batches moved in their turn",
            "buffers made",
            "buffers left to others",
        )
        pool = exchange.mover.pool
        row = (exchange.exchanged, exchange.unmoved, pool.made, pool.left)
        return Table("batches moved ahead", columns, (row,))

    def _stand_between(self, trainer: pl.Trainer) -> None:
        exchange, config = self.exchange, self.config
        if exchange is None:
            return

        def make(inner: CombinedLoader, kept_back: Callable[[], int]) -> PrefetchingLoader:
            precision = trainer.precision_plugin
            depth = depth_for(inner, config.depth, config.ahead)
            how = f"{depth} batches ahead, by a thread" if depth else "each batch in its turn"
            self.changes = [Change("train_dataloader", f"moved to the device beside the step, {how}")]
            if type(precision).convert_input is Precision.convert_input:
                return PrefetchingLoader(inner, exchange, kept_back, depth)
            return PrefetchingLoader(inner, exchange, kept_back, depth, precision.convert_input)

        self._loader = stand_between(trainer, PrefetchingLoader, make)
        if self._loader is None:
            rank_zero_warn("DevicePrefetcher: the step takes the loader's iterator itself; nothing changes.")

    def _release(self) -> None:
        if self._loader is not None:
            self._loader.stop()
        if self._end_exchange is not None:
            self._end_exchange()
        self._loader = self._end_exchange = None


class DevicePrefetchOptimization(CallbackOptimization[DevicePrefetchConfig, DevicePrefetcher]):
    """The plan's door."""

    name: ClassVar[str] = "device_prefetch"
    summary: ClassVar[str] = "the next batches moved to the GPU beside the step, into memory that is used again"
    config_class: ClassVar[type[Any]] = DevicePrefetchConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    conflicts: ClassVar[Mapping[str, str]] = {"dali_loader": "DALI's batches are made on the device"}
    grade = "same numbers"

    def make_callback(self) -> DevicePrefetcher:
        """Return the callback, with the configuration as its parameters."""
        return DevicePrefetcher(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where there is no GPU or nothing on the host to be moved; else say what a batch's copy takes."""
        if torch.device(context.hardware.device).type != "cuda":
            return Refuses("copies beside the step need an NVIDIA GPU, and this run is on the CPU")
        if context.example is None:
            return Applies("no batch to look at")
        try:
            batch = context.example()
        except OptimizationError as error:
            return Applies(f"not measured, since {error}")
        tensors = list(tensors_in(batch))
        if not tensors:
            return Refuses("there is no tensor in the batch that could be moved ahead")
        if all(tensor.is_cuda for tensor in tensors):
            return Refuses("the loader puts its batches on the GPU by itself, so there is nothing left to move")
        return Applies(_cost_of_copy(batch, torch.device(context.hardware.device)))


def _cost_of_copy(batch: Any, device: torch.device) -> str:
    pinned = [tensor.pin_memory() for tensor in tensors_in(batch) if tensor.device.type == "cpu"]
    timing = time_ms(lambda: [tensor.to(device, non_blocking=True) for tensor in pinned], device)
    megabytes = sum(tensor.nbytes for tensor in pinned) / 1e6
    return (
        f"a batch of {megabytes:,.1f} MB takes {ms_text(timing.median_ms)} ms to copy, which the step need not wait for"
    )
