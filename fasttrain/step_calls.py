"""What each module of a model is called with in its training step, found by running that step once on a copy."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from fasttrain.batches import map_tensors
from fasttrain.measure import AUTOCAST, StepProbe, Timing
from fasttrain.site_key import Call, call_of

TRUE_PRECISION = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
Saw = Callable[[str, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class Arguments:
    """What a module was called with, once: copies on the host, and under what."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    autocast: torch.dtype | None
    grad: bool
    """Whether gradients were recorded."""


class StepCalls:
    """The calls of a training step, as the run will make them: on its device, in its precision and memory format.

    The step runs when it is first asked for; module, batch and random state are left as they were.

    Args:
        module: the model, with no optimization applied.
        example: returns a batch, on the CPU.
        device: to run on.
        precision: Lightning's name of it.
        channels_last: whether weights and images will be in that format.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        example: Callable[[], Any],
        device: str,
        precision: str = "32-true",
        channels_last: bool = False,
    ) -> None:
        self.module, self.example, self.device = module, example, device
        self.precision, self.channels_last = precision, channels_last

    def __call__(self) -> Mapping[str, tuple[Call, ...]]:
        """Return the texts of the calls by module path, in order; a module that is not called has no entry.

        Raises:
            DataError: from the data.
            OptimizationError: there is no batch, or the step does not run outside of a Trainer.
        """
        return self._calls

    def arguments(self, paths: Collection[str]) -> tuple[pl.LightningModule, dict[str, list[Arguments]]]:
        """Run the step again; return the copy of the model that did, on the device, and the calls of some modules.

        Raises:
            DataError, OptimizationError: as above.
        """
        seen: dict[str, list[Arguments]] = {path: [] for path in paths}

        def keep(path: str, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            positional, named = map_tensors((positional, named), lambda tensor: copied(tensor, "cpu"))
            seen[path].append(Arguments(positional, named, self._autocast_now(), torch.is_grad_enabled()))

        return self._run(paths, keep), seen

    def time(self, in_graph: bool) -> Timing:
        """Return the time of the whole step; in a graph as of `StepProbe`.

        Raises:
            DataError, OptimizationError: as above.
        """
        return StepProbe(self.module, self.example(), self.device, in_graph)(self._as_the_run, self._autocast)

    @cached_property
    def _calls(self) -> Mapping[str, tuple[Call, ...]]:
        seen: dict[str, list[Call]] = {}

        def note(path: str, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.setdefault(path, []).append(call_of(positional, named, self._mode_now()))

        self._run([path for path, _ in self.module.named_modules(remove_duplicate=False) if path], note)
        return {path: tuple(calls) for path, calls in seen.items()}

    def _run(self, paths: Collection[str], saw: Saw) -> pl.LightningModule:
        copies: list[pl.LightningModule] = []
        handles: list[Any] = []

        def prepare(module: pl.LightningModule, batch: Any) -> Any:
            copies.append(module)
            batch = self._as_the_run(module, batch)
            handles.extend(_watch(module.get_submodule(path), path, saw) for path in paths)
            return batch

        probe = StepProbe(self.module, self.example(), self.device)
        try:
            probe.sample_ms(prepare, self._autocast, warmup=0, repeats=1)
        finally:
            for handle in handles:
                handle.remove()
        return copies[0]

    def _as_the_run(self, module: pl.LightningModule, batch: Any) -> Any:
        dtype = TRUE_PRECISION.get(self.precision)
        if dtype is not None:
            module.to(dtype)
            batch = map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        if self.channels_last:
            module.to(memory_format=torch.channels_last)
            batch = map_tensors(batch, _image_to_channels_last)
        return batch

    @property
    def _autocast(self) -> torch.dtype | None:
        return AUTOCAST.get(self.precision)

    def _autocast_now(self) -> torch.dtype | None:
        kind = torch.device(self.device).type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _mode_now(self) -> str:
        autocast = self._autocast_now()
        words = [f"autocast {str(autocast).removeprefix('torch.')}"] if autocast is not None else []
        return ", ".join(words if torch.is_grad_enabled() else [*words, "no gradients recorded"])


@contextmanager
def as_called(arguments: Arguments, device: torch.device) -> Iterator[None]:
    """Set autocast and the recording of gradients as they were at a call."""
    dtype, is_on = arguments.autocast or torch.bfloat16, arguments.autocast is not None
    # Lightning enters autocast without its cache of weights, too.
    with torch.autocast(device.type, dtype, enabled=is_on, cache_enabled=False), torch.set_grad_enabled(arguments.grad):
        yield


def copied(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a leaf on a device with a tensor's values, dtype, strides and need of a gradient."""
    plain = tensor.detach()
    if type(plain) is not Tensor or plain.layout != torch.strided or not plain.numel():
        return plain.to(device, copy=True).requires_grad_(tensor.requires_grad)
    # By the memory that it spans: a copy of the tensor itself would lose gaps and overlaps.
    length = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
    span = plain.as_strided((length,), (1,)).to(device, copy=True)
    return span.as_strided(plain.shape, plain.stride()).requires_grad_(tensor.requires_grad)


def _watch(module: nn.Module, path: str, saw: Saw) -> Any:
    def before(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        saw(path, positional, named)

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _image_to_channels_last(tensor: Tensor) -> Tensor:
    is_image = tensor.dim() == 4 and tensor.shape[1] > 1 and (tensor.is_floating_point() or tensor.dtype == torch.uint8)
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor
