"""A trial of a module on its own data: whether its step keeps packed sequences apart."""

import copy
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from fasttrain.callbacks.sequence_packing.order import PackedDataset, PackedLoader, PackedOrder, RowKey
from fasttrain.randomness import random_state_kept


@dataclass(frozen=True)
class Trial:
    """The loss of some sequences, packed and each in a row of its own, and how much all gradients differ."""

    packed_loss: float
    loss: float
    gradient_difference: float
    """Norm of the difference over the norm of the gradients."""

    def agrees(self, tolerance: float) -> bool:
        """Whether loss and gradients are the same within a relative tolerance."""
        near = abs(self.packed_loss - self.loss) <= tolerance * max(abs(self.loss), 1e-6)
        return near and self.gradient_difference <= tolerance


def try_step(module: pl.LightningModule, loader: PackedLoader, device: str, rows: int = 2) -> Trial:
    """Run the training step on a few of the loader's rows, and on their sequences in rows of their own.

    Works on a copy in evaluation mode, so that nothing is random, in the copy's own precision. The module, its
    gradients and the global random state are left as they were.
    """
    order = loader.order
    members = order.members(0)
    several = members[(members >= 0).sum(axis=1) > 1][:rows].tolist()
    packed: list[tuple[int, ...]] = [tuple(number for number in row if number >= 0) for row in several]
    single: list[tuple[int, ...]] = [(number,) for row in packed for number in row]
    with random_state_kept(), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # Lightning warns that `self.log` has no Trainer
        copied = copy.deepcopy(module).to(device).eval()
        packed_loss, packed_gradients = _step(copied, _batch(loader, packed, order), device)
        loss, gradients = _step(copied, _batch(loader, single, order), device)
    difference = torch.stack([(a - b).norm() for a, b in zip(packed_gradients, gradients, strict=True)]).norm()
    size = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return Trial(packed_loss, loss, float(difference / size.clamp(min=1e-30)))


def _batch(loader: PackedLoader, rows: list[tuple[int, ...]], order: PackedOrder) -> Any:
    dataset: Any = loader.dataset
    assert isinstance(dataset, PackedDataset)
    return loader.as_batch([dataset[RowKey(0, tuple(order.named(number) for number in row))] for row in rows])


def _step(module: pl.LightningModule, batch: Any, device: str) -> tuple[float, list[Tensor]]:
    batch = move_data_to_device(batch, torch.device(device))
    takes_index = "batch_idx" in inspect.signature(module.training_step).parameters
    output: Any = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    loss: Tensor = output["loss"] if isinstance(output, dict) else output
    module.zero_grad()
    loss.backward()
    gradients = [p.grad.detach().clone() for p in module.parameters() if p.grad is not None]
    return float(loss), gradients
