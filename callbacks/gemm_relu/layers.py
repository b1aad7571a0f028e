"""How each layer of a chain is computed: as a matrix product, or by a kernel for ends too narrow for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from fasttrain.callbacks.gemm_relu import in_triton


@dataclass(frozen=True)
class Ways:
    """What there is a choice of, for measuring."""

    side_stream: bool = True
    """Weight gradients run beside the data gradients."""
    data_gradient_first: bool = False
    """Of the two, which depend on the same, the data gradient is launched first."""
    narrow: bool = True
    """Kernels of our own for a first layer of few inputs and a last layer of one output."""
    pad: bool = True
    """Rows of a first product's inputs are padded with zeros to a multiple of 16 bytes, as tensor cores want them."""
    float32_gradients: bool = True
    """Products of 16-bit matrices give a float32 weight's gradient at once, without a cast behind."""
    cast: Literal["triton", "foreach"] = "triton"
    """What makes 16-bit copies of all parameters at once."""
    mask: Literal["pass", "epilogue"] = "pass"
    """Where a gradient is masked by the ReLU below: in a pass of its own behind a product of cuBLAS, or in Triton's."""


class Kind(Enum):
    """How one layer is computed."""

    PRODUCT = "product"
    NARROW_IN = "narrow in"
    NARROW_OUT = "narrow out"


def kinds(
    x: Tensor, weights: Sequence[Tensor], relu_last: bool, dtype: torch.dtype, ways: Ways, x_needs_gradient: bool
) -> list[Kind]:
    """Return the kind of each layer of a chain computed in `dtype`.

    There is no kernel for the gradient of a narrow layer's input, so one that is wanted makes it a product.
    """
    found = [Kind.PRODUCT] * len(weights)
    if not ways.narrow or not in_triton.can_run(x.device) or dtype not in in_triton.DTYPES:
        return found
    is_read_by_kernels = x.dtype in in_triton.DTYPES and all(weight.dtype in in_triton.DTYPES for weight in weights)
    has_relu = relu_last or len(weights) > 1
    inputs = weights[0].shape[1]
    if is_read_by_kernels and has_relu and not x_needs_gradient and inputs <= in_triton.LARGEST_NARROW_INPUT:
        found[0] = Kind.NARROW_IN
    outputs, inputs = weights[-1].shape
    follows_relu = len(weights) > 1 and not relu_last
    if is_read_by_kernels and follows_relu and outputs == 1 and inputs <= in_triton.LARGEST_INPUT_OF_ONE_OUTPUT:
        found[-1] = Kind.NARROW_OUT
    return found
