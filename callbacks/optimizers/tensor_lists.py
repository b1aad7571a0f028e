"""Arithmetic on lists of tensors, a few kernels for a whole list, whose factors are numbers or scalars on the device.

A scalar on the device is never read on the host, so that everything here can be captured in a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Number = float | Tensor
"""A Python number, or a 0-dim tensor on the device of what it is applied to."""

MOST_ELEMENTS = 2**26
"""Elements that are updated at a time: it bounds the memory of intermediate lists to 256 MiB each in fp32."""


def buckets(params: Iterable[Tensor], most_elements: int = MOST_ELEMENTS) -> Iterator[list[Tensor]]:
    """Yield the parameters that have a gradient, of one dtype and device at a time, in their order.

    A list holds more than `most_elements` only where a single parameter does.

    Raises:
        RuntimeError: a gradient is sparse, or a parameter complex.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.layout != torch.strided or param.is_complex():
            what = "a complex parameter" if param.is_complex() else "a sparse gradient"
            raise RuntimeError(
                f"{what} of shape {tuple(param.shape)} has no layer-wise update here: real parameters with dense "
                "gradients do (nn.Embedding(sparse=False)); give that parameter to another optimizer."
            )
        alike[param.dtype, param.device].append(param)
    for same in alike.values():
        bucket: list[Tensor] = []
        elements = 0
        for param in same:
            if bucket and elements + param.numel() > most_elements:
                yield bucket
                bucket, elements = [], 0
            bucket.append(param)
            elements += param.numel()
        yield bucket


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that all have one."""
    return [grad for param in params if (grad := param.grad) is not None]


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are updated: fp32 for the half precisions, else their own."""
    return torch.promote_types(dtype, torch.float32)


def in_dtype(dtype: torch.dtype, tensors: list[Tensor]) -> list[Tensor]:
    """Return the list itself where its tensors have the dtype already, else converted copies of them."""
    if all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, shape (len(tensors),), summed in fp32 or wider."""
    dtype = computing_dtype(tensors[0].dtype)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def together(parts: list[Tensor]) -> Tensor | None:
    """Return the 2-norm of what has these, 0-dim float64 on the first one's device; None if there is none."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0].double()
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device).double() for part in parts]))
    return norm


def is_there(number: Number) -> bool:
    """Whether a term with this factor has to be computed: it is not the number 0. One on the device might be."""
    return isinstance(number, Tensor) or number != 0


def scaled(tensors: list[Tensor], factor: Number) -> list[Tensor]:
    """Return each tensor times one factor, in new memory."""
    return list(torch._foreach_mul(tensors, _fitting(factor, tensors)))


def plus(tensors: list[Tensor], others: list[Tensor], factor: Number) -> list[Tensor]:
    """Return each tensor plus `factor` times the other, in new memory."""
    if isinstance(factor, Tensor):
        return list(torch._foreach_add(tensors, scaled(others, factor)))
    return list(torch._foreach_add(tensors, others, alpha=factor))


def scale_(tensors: list[Tensor], factor: Number) -> None:
    """Multiply each tensor by one factor, in place."""
    torch._foreach_mul_(tensors, _fitting(factor, tensors))


def add_(tensors: list[Tensor], others: list[Tensor], factor: Number) -> None:
    """Add `factor` times the others, in place."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(tensors, scaled(others, factor))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


def add_squares_(tensors: list[Tensor], others: list[Tensor], factor: Number) -> None:
    """Add `factor` times the others' squares, in place."""
    if isinstance(factor, Tensor):
        torch._foreach_addcmul_(tensors, scaled(others, factor), others)
    else:
        torch._foreach_addcmul_(tensors, others, others, value=factor)


def add_number_(tensors: list[Tensor], number: Number) -> None:
    """Add one number to every element, in place."""
    if isinstance(number, Tensor):
        torch._foreach_add_(tensors, number.to(tensors[0].dtype), alpha=1)  # without alpha it is read on the host
    else:
        torch._foreach_add_(tensors, number)


def add_each_(tensors: list[Tensor], others: list[Tensor], factors: Tensor) -> None:
    """Add the others, each times its own element of `factors`, shape (len(tensors),), in place.

    One kernel for each tensor: torch has no multi-tensor kernel that takes a factor for each from the device.
    """
    torch._foreach_addcmul_(tensors, others, factors.to(tensors[0].dtype).unbind())


def each(values: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...] | list[float]:
    """Return the elements of a vector for a list of tensors on `device`: as scalars there, or as numbers.

    Numbers, for which torch has multi-tensor kernels, where the vector is on the CPU and the list is not.
    """
    return values.to(dtype).unbind() if values.device == device else values.tolist()


def _fitting(factor: Number, tensors: list[Tensor]) -> Number:
    return factor.to(tensors[0].dtype) if isinstance(factor, Tensor) else factor
