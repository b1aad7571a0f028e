"""Static inputs: the tensors at fixed addresses from which a captured step reads each batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.batches import map_tensors, tensors_in


class StaticInputs:
    """A copy of one batch that stays where it is, and takes the values of later batches of the same signature.

    Args:
        batch: of any structure; layout and dtype of its tensors become the static inputs' own.
        device: where the captured step reads.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self.batch = map_tensors(batch, lambda tensor: _like(tensor, device))
        self.tensors = list(tensors_in(self.batch))
        # A step may ask for gradients of its inputs, and such a leaf can't be written to.
        self._targets = [tensor.detach() for tensor in self.tensors]
        self.copy_from(list(tensors_in(batch)))

    def copy_from(self, leaves: Sequence[Tensor]) -> None:
        """Copy a batch's tensors, in order, from the host or the device. From pinned memory this does not wait.

        A batch of another shape must not come here: `copy_` would broadcast it silently.
        """
        for target, leaf in zip(self._targets, leaves, strict=True):
            target.copy_(leaf.detach() if leaf.requires_grad else leaf, non_blocking=True)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    # Dense tensors keep their strides, channels_last among them; a view or an expanded one becomes dense.
    return torch.empty_like(tensor, device=device, requires_grad=False)
