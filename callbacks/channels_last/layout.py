"""The body: change the memory format of a model's convolution weights and of image batches. Works in any loop.

Source of the method: PyTorch's channels_last memory format, used throughout NVIDIA's MLPerf v2.0 vision submissions,
whose tensor-core convolutions take NHWC and transpose anything else.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.batches import map_tensors, tensors_in
from fasttrain.optimization import Change

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def convolutions_to_change(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of each 2-d convolution whose weight would have other strides in channels_last.

    A weight of shape (O, I, H, W) with I = 1 or H = W = 1 has the same order of elements in both formats. One that is
    computed from others at every access, as under weight_norm, is left alone: a change to it would be lost.
    """
    return [
        (path, module)
        for path, module in model.named_modules()
        if (weight := _weight(module)) is not None and not weight.is_contiguous(memory_format=torch.channels_last)
    ]


def is_channels_last(model: nn.Module) -> bool:
    """Whether a 2-d convolution's weight is in channels_last and in no other format at the same time."""
    weights = [weight for module in model.modules() if (weight := _weight(module)) is not None]
    return any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights)


def to_channels_last(model: nn.Module) -> list[Change]:
    """Put every 2-d convolution weight into channels_last, in place; return what changed.

    Values, parameter objects, names and the state dict stay the same, and optimizers keep their parameters.
    """
    changes = []
    for path, module in convolutions_to_change(model):
        weight = module.weight
        assert isinstance(weight, Tensor)
        # The parameter object stays, so that an optimizer made earlier still holds it.
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if weight.grad is not None:
            weight.grad.data = weight.grad.data.contiguous(memory_format=torch.channels_last)
        changes.append(Change(f"{path}.weight", "channels_last"))
    return changes


def batch_to_channels_last(batch: Any) -> Any:
    """Return the batch with its 4-d floating-point or uint8 tensors of 2 or more channels in channels_last.

    Looks into mappings, sequences, named tuples and dataclasses; everything else is handed on as it is.
    """
    return map_tensors(batch, _image_to_channels_last)


batch_to_channels_last.changes_only_layout = True  # type: ignore[attr-defined]


def images_in(batch: Any) -> Iterable[Tensor]:
    """Yield the tensors of a batch that `batch_to_channels_last` would convert."""
    return filter(is_image, tensors_in(batch))


def is_image(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of images or feature maps: 4-d, of two channels or more, floating or uint8."""
    return tensor.dim() == 4 and tensor.shape[1] > 1 and (tensor.is_floating_point() or tensor.dtype == torch.uint8)


def _image_to_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if is_image(tensor) else tensor


def _weight(module: nn.Module) -> nn.Parameter | None:
    if not isinstance(module, CONVOLUTIONS):
        return None
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return None if isinstance(weight, nn.UninitializedParameter) else weight
