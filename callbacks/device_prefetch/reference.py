"""The obvious version: the batch moved when its turn has come, on the step's own stream.

Copies and changes of layout keep every bit. A cast rounds on the device as it does on the host.
"""

from typing import Any

import torch
from torch import Tensor

from fasttrain.batches import map_tensors

# Bit for bit: nothing is computed.
TOLERANCE = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0, torch.uint8: 0.0}

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def moved_plainly(
    batch: Any, device: torch.device, channels_last: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """Return the batch on the device, its floating-point tensors cast and its images laid out as asked for."""

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device)
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        is_image = tensor.dim() in FORMATS and (tensor.is_floating_point() or tensor.dtype == torch.uint8)
        if channels_last and is_image and tensor.shape[1] > 1:
            return tensor.contiguous(memory_format=FORMATS[tensor.dim()])
        return tensor

    return map_tensors(batch, move)
