"""A module's training step, run on copies outside of a fit, and everything that a capture of it would stumble over."""

import copy
import inspect
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn

from fasttrain.batches import map_tensors
from fasttrain.callbacks.cuda_graph_step.host_state import (
    Contents,
    attribute,
    changed,
    host_random_state,
    is_bookkeeping,
    plain_attributes,
    random_changed,
    tensor_attributes,
)
from fasttrain.callbacks.cuda_graph_step.sync_finder.finder import Finding, SyncFinder, finding
from fasttrain.callbacks.cuda_graph_step.sync_finder.line_trace import lines_that_change
from fasttrain.errors import FasttrainError, OptimizationError
from fasttrain.measure import AUTOCAST
from fasttrain.quiet import quiet_libraries
from fasttrain.randomness import random_state_kept

TRUE_PRECISION = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
# An ordinary step: at batch 0 many modules draw pictures or print.
BATCH_INDEX = 1
HOST_GENERATORS = {"python": "Python's random module", "numpy": "numpy.random"}


def examine(
    module: pl.LightningModule, batch: Any, device: torch.device | str, precision: str = "32-true"
) -> list[Finding]:
    """Return what a capture of the module's training step, forward and backward, would stumble over.

    First the lines that break a capture, then those that would freeze a value. What is done in the first step only is
    none: a capture comes after warm-up steps. The step runs on copies, twice, and a third time if it changes something
    on the host; module, batch and random state are left as they were.

    Args:
        module: with automatic optimization. `self.log` in its step does nothing, and `self.trainer` is one that has
            not begun, unless there is one.
        batch: as the loader gives it.
        device: to run on; see `sync_finder.UNSEEN_ON_CPU` for what a CPU can't show.
        precision: Lightning's name of it.

    Raises:
        OptimizationError: the step can't be run by itself.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise OptimizationError(
            f"{name} optimizes by itself (automatic_optimization=False), so that its step is not one forward and "
            "backward to be captured; the parts of it that are can be, each by itself."
        )
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.init()  # before that its random state can't be kept
    try:
        with random_state_kept(), quiet_libraries(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return _examine(module, batch, device, precision)
    except FasttrainError:
        raise
    except Exception as error:  # a user's step may ask its Trainer for something, and this one has not begun
        raise OptimizationError(
            f"{name}.training_step could not be run outside of a fit ({type(error).__name__}: "
            f"{str(error).rstrip('.')})."
        ) from error


def _examine(module: pl.LightningModule, batch: Any, device: torch.device, precision: str) -> list[Finding]:
    step = _StepOnCopies(module, batch, device, precision)
    finder = SyncFinder(device, _left_on_host(step.module))
    step.finder = finder
    finder.run(step.with_new_batch())
    random, before = host_random_state(), (plain_attributes(step.module), tensor_attributes(step.module))
    findings = finder.run(step.with_new_batch())
    drawn = [name for name in random_changed(random) if name in HOST_GENERATORS]  # torch's are seen as operators
    after = (plain_attributes(step.module), tensor_attributes(step.module))
    findings += _host_changes(step, drawn, before, after)
    return sorted(findings, key=lambda each: not each.breaks)


class _StepOnCopies:
    """Forward and backward of copies of a module and a batch, on a device and in a precision."""

    def __init__(self, module: pl.LightningModule, batch: Any, device: torch.device, precision: str) -> None:
        self.finder: SyncFinder | None = None
        self.module = copy.deepcopy(module).to(device)  # without its Trainer, which Lightning leaves out
        if not module.training:
            self.module.train()
        self.module.trainer = _trainer_of(module) or _idle_trainer(device)
        self.module.log = self._log  # type: ignore[method-assign]
        self._device, self._batch = device, batch
        self._autocast, self._dtype = AUTOCAST.get(precision), TRUE_PRECISION.get(precision)
        if self._dtype is not None:
            self.module.to(self._dtype)
        self._takes_index = "batch_idx" in inspect.signature(module.training_step).parameters

    def with_new_batch(self) -> Callable[[], None]:
        """Return the step on another copy of the batch: a step may change its batch."""
        batch = self.module.on_before_batch_transfer(copy.deepcopy(self._batch), 0)
        batch = self.module.transfer_batch_to_device(batch, self._device, 0)
        batch = self.module.on_after_batch_transfer(batch, 0)
        if self._dtype is not None:
            batch = map_tensors(batch, self._as_configured)
        return lambda: self._run(batch)

    def _run(self, batch: Any) -> None:
        dtype, is_on = self._autocast or torch.bfloat16, self._autocast is not None
        # Lightning enters autocast without its cache of weights, too.
        with torch.autocast(self._device.type, dtype, enabled=is_on, cache_enabled=False):
            output = self.module.training_step(batch, *([BATCH_INDEX] if self._takes_index else []))
        loss: Any = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            raise OptimizationError(
                f"{type(self.module).__name__}.training_step returned None for the first batch: there is nothing to "
                "go backward from, and a captured step can't decide that anew."
            )
        torch.autograd.backward(loss)
        self.module.zero_grad()

    def _as_configured(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _log(self, name: str, value: Any, *rest: Any, **options: Any) -> None:
        if isinstance(value, (int, float)) and self.finder is not None:
            self.finder.report("host number logged")


def _host_changes(
    step: _StepOnCopies,
    drawn: list[str],
    before: tuple[Mapping[str, Any], Mapping[str, Any]],
    after: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Iterator[Finding]:
    plain = [path for path in changed(before[0], after[0]) if path not in after[1]]
    replaced = [path for path in changed(before[1], after[1]) if not is_bookkeeping(*_owner(step.module, path))]
    if not (drawn or plain or replaced):
        return
    watched: dict[str, Callable[[], Any]] = {
        name: partial(lambda name: host_random_state()[name], name) for name in drawn
    }
    watched |= {path: partial(attribute, *_owner(step.module, path)) for path in [*plain, *replaced]}
    sites = lines_that_change(step.with_new_batch(), watched)
    for name in drawn:
        yield finding("host random numbers", sites.get(name), op=HOST_GENERATORS[name])
    for path in plain:
        was, now = before[0].get(path), after[0].get(path)
        kind = "container changed" if isinstance(now, Contents) else "host value changed"
        words = {"path": f"self.{path}", "before": reprlib.repr(was), "after": reprlib.repr(now)}
        yield finding(kind, sites.get(path), **words)
    for path in replaced:
        yield finding("tensor replaced", sites.get(path), path=f"self.{path}")


def _trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    try:
        return module.trainer
    except RuntimeError:  # Lightning's way of saying that there is none
        return None


def _idle_trainer(device: torch.device) -> pl.Trainer:
    """Return a Trainer that answers what steps ask: the global step is 0, the world is of size 1, nothing is logged."""
    on_gpu = device.type == "cuda"
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu", devices=[device.index or 0] if on_gpu else 1, logger=False,
        plugins=[LightningEnvironment()], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def _left_on_host(module: nn.Module) -> list[Tensor]:
    """Return the tensors that stay where they are when the module moves: plain attributes that are no buffers."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    # A module with an `_apply` of its own, such as a metric, moves more than its buffers.
    moves_more = {
        f"{path}." for path, each in module.named_modules() if path and type(each)._apply is not nn.Module._apply
    }
    attributes = tensor_attributes(module).items()
    return [t for path, t in attributes if path not in buffers and f"{path.rpartition('.')[0]}." not in moves_more]


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name
