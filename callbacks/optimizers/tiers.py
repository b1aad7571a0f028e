"""Which parameters the Triton kernels take, how they are cut into chunks, and tensors laid out for them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.environment import triton_runs

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Tiling:
    """How much a program of the kernels takes."""

    chunk: int = 2**12
    """Elements of one tensor, a multiple of `block`."""
    block: int = 2**10
    """Elements at once, a power of two."""
    warps: int = 8
    keep_updates: bool = False
    """Have LAMB's updates written, in as much memory as the weights in fp32 have, and not computed again: as many bytes
    are moved."""


TILING = Tiling()


def takes_kernels(param: Tensor, fused: bool | None, name: str) -> bool:
    """Whether a parameter is updated by the kernels.

    Args:
        param: of any kind.
        fused: the user's choice: None takes them on a GPU for parameters that they can update.
        name: the optimizer's, for the error.

    Raises:
        RuntimeError: they can't and were asked for.
    """
    if fused is None:
        return param.is_cuda and triton_runs() and why_not(param) is None and not torch.compiler.is_compiling()
    if not fused:
        return False
    reason = why_not(param) if triton_runs() else "Triton isn't installed, or torch is built for ROCm"
    if reason is not None:
        raise RuntimeError(
            f"{name}(fused=True) has no kernel for a parameter of shape {tuple(param.shape)}: {reason}; with "
            "fused=None such parameters are updated by torch's multi-tensor operators."
        )
    return True


def why_not(param: Tensor) -> str | None:
    """Return a sentence's end with the reason why the kernels can't update a parameter, None if they can."""
    if type(param) not in (Tensor, nn.Parameter):
        return f"it is a {type(param).__name__}, whose memory is not its own"
    if not param.is_cuda and not (param.device.type == "cpu" and _interpreted()):
        return f"it is on {param.device}, and they run on NVIDIA GPUs"
    if param.dtype not in KERNEL_DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)
        return f"it is {str(param.dtype).removeprefix('torch.')}, and they take {dtypes}"
    if not is_dense(param):
        return f"its elements don't fill its memory, with strides {param.stride()}, and they walk through it"
    return None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps and overlaps, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def laid_out_like(tensor: Tensor, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor, or a copy beside the parameter if its device, order in memory or dtype is another."""
    dtype = dtype or tensor.dtype
    alike = tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous())
    if alike and tensor.dtype == dtype and tensor.device == param.device and type(tensor) in (Tensor, nn.Parameter):
        return tensor
    copied: Any = torch.empty_like(param, dtype=dtype, requires_grad=False)
    return copied.copy_(tensor)  # type: ignore[no-any-return]


@cache
def _interpreted() -> bool:
    from fasttrain.callbacks.optimizers.kernel import INTERPRETED  # where Triton isn't installed it can't be imported

    return bool(INTERPRETED.value)
