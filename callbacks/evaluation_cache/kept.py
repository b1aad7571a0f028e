"""Batches that stay on a device, and whether others are the same."""

from typing import Any

import torch
from torch import Tensor

from fasttrain.batches import OpaqueLeaf, Signature, first_difference, flatten, map_tensors, tensors_in
from fasttrain.fetching import Fetched


class KeptBatches:
    """Copies of batches on a device, in order.

    Args:
        device: where they are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0
        self._fetched: list[Fetched] = []
        self._signatures: list[Signature] = []
        self._versions: list[list[int]] = []
        self._differs: Tensor | None = None
        self._difference = ""

    def __len__(self) -> int:
        return len(self._fetched)

    def add(self, fetched: Fetched) -> None:
        """Keep a copy of a batch.

        Raises:
            OpaqueLeaf: it holds an object that can't be told from another.
            torch.OutOfMemoryError: there is no room for it.
        """
        batch, number, loader = fetched
        _, signature = flatten(batch)
        # Tensors that are made in inference mode don't tell whether somebody wrote to them.
        with torch.inference_mode(False):
            kept = map_tensors(batch, lambda tensor: tensor.detach().to(self.device, copy=True))
        self._fetched.append((kept, number, loader))
        self._signatures.append(signature)
        self._versions.append([tensor._version for tensor in tensors_in(kept)])
        self.bytes += sum(tensor.nbytes for tensor in tensors_in(kept))

    def compare(self, index: int, fetched: Fetched) -> None:
        """Compare a batch with the one kept, bit for bit (NaN equals NaN), without waiting for the device."""
        try:
            leaves, signature = flatten(fetched[0])
        except OpaqueLeaf as error:
            self._difference = str(error)
            return
        if index >= len(self) or signature != self._signatures[index] or fetched[1:] != self._fetched[index][1:]:
            known = index < len(self) and signature != self._signatures[index]
            self._difference = first_difference(self._signatures[index], signature) if known else "another number"
            return
        for kept, leaf in zip(tensors_in(self._fetched[index][0]), leaves, strict=True):
            other = leaf.detach().to(self.device, non_blocking=True)
            unequal = kept != other
            if kept.is_floating_point() or kept.is_complex():
                unequal = unequal & ~(kept.isnan() & other.isnan())
            differs = unequal.any()
            self._differs = differs if self._differs is None else self._differs | differs

    def difference(self) -> str | None:
        """Return what differed in the comparisons so far, or None; waits for the device."""
        if not self._difference and self._differs is not None and bool(self._differs):
            self._difference = "other values"
        return self._difference or None

    def hand_out(self, index: int) -> Fetched:
        """Return a batch in containers of its own; its tensors are those that are kept."""
        batch, number, loader = self._fetched[index]
        return map_tensors(batch, lambda tensor: tensor), number, loader

    def was_written_to(self) -> bool:
        """Whether a tensor that was handed out has been changed in place."""
        return any(
            [tensor._version for tensor in tensors_in(fetched[0])] != versions
            for fetched, versions in zip(self._fetched, self._versions, strict=True)
        )

    def clear(self) -> None:
        """Give the memory back."""
        self.bytes, self._differs, self._difference = 0, None, ""
        self._fetched, self._signatures, self._versions = [], [], []


def bytes_of(batch: Any) -> int:
    """Return the size of a batch's tensors."""
    return sum(tensor.nbytes for tensor in tensors_in(batch))
