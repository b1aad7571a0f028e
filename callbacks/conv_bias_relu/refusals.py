"""What an error of cuDNN means: that this is not to be had from it, or that nothing goes on."""

import torch
from torch import Tensor


def is_refusal(error: Exception, x: Tensor) -> bool:
    """Whether an error says that cuDNN can't compute this, so that something else can be asked.

    The texts of refusals depend on the versions of PyTorch and cuDNN, so that the others are told apart: too little
    memory; an error of CUDA, after which nothing on the GPU goes on; and whatever happens in a capture, which it may
    have made invalid.
    """
    broken = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) or "CUDA error" in str(error)
    return not broken and not is_capturing(x)


def is_capturing(x: Tensor) -> bool:
    """Whether what is done with a tensor now goes into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
