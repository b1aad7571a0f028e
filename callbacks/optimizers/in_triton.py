"""LAMB and LARS by Triton kernels that find all tensors of a list by a table of their addresses. Nothing waits.

LAMB moves 11 values an element: the gradient for the global norm; gradient, weight and both moments, of which the
latter are written; weight and moments again, of which the first is written. Without adaptation it moves 8, LARS 7.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fasttrain.callbacks.optimizers import lamb_kernel, lars_kernel
from fasttrain.callbacks.optimizers.kernel import squares_kernel
from fasttrain.callbacks.optimizers.tables import ADDRESSES, DeviceTables
from fasttrain.callbacks.optimizers.tensor_lists import Number, is_there
from fasttrain.callbacks.optimizers.tiers import Tiling

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
PREPARED = 128  # tensors of a program that prepares a step
SUMMED = 1024  # parts that a program adds at once


class TensorTables:
    """A list of parameters, and what else there is for each of them, as the kernels find it.

    Args:
        tables: where they are looked up.
        name: of the list there.
        dtype: of what is updated.
        param_dtype: of the parameters.
        addresses: of what is updated, of the parameters, and of each kind of state, which is in fp32, one list after
            the other; all dense and laid out alike.
        grads: laid out like those, of one dtype.
        tiling: how they are cut.
    """

    def __init__(
        self,
        tables: DeviceTables,
        name: Hashable,
        dtype: torch.dtype,
        param_dtype: torch.dtype,
        addresses: Sequence[int],
        grads: Sequence[Tensor],
        tiling: Tiling,
    ) -> None:
        self.tables, self.name, self.tiling, self.grads = tables, name, tiling, grads
        self.device, self.tensors = grads[0].device, len(grads)
        self.dtypes = {"WEIGHT": DTYPES[dtype], "PARAM": DTYPES[param_dtype], "GRAD": DTYPES[grads[0].dtype]}
        sizes = tuple(grad.numel() for grad in grads)
        self.chunks = sum(-(-size // tiling.chunk) for size in sizes)
        grad_addresses = [grad.data_ptr() for grad in grads]
        aligned = all(address % 16 == 0 for address in (*addresses, *grad_addresses))
        self.options = {"ALIGNED": aligned, "CHUNK": tiling.chunk, "BLOCK": tiling.block, "num_warps": tiling.warps}
        with torch.cuda.device_of(grads[0]):
            self.layout = tables.get((name, "layout"), (tiling.chunk, *sizes), torch.int64, self.device, _layout)
            self.addresses = tables.get((name, ADDRESSES), addresses, torch.int64, self.device)
            self.grad_addresses = tables.get((name, "gradients"), grad_addresses, torch.int64, self.device)

    def scalars(self, numbers: Mapping[str, Number]) -> dict[str, Tensor]:
        """Return numbers where kernels read them: those on the device as they are, the others from one table."""
        here = {
            key: value for key, value in numbers.items() if isinstance(value, Tensor) and value.device == self.device
        }
        held = {key: float(value) for key, value in numbers.items() if key not in here}
        if not held:
            return here
        table = self.tables.get((self.name, "numbers"), list(held.values()), torch.float64, self.device)
        return {**here, **dict(zip(held, table.unbind(), strict=True))}

    def empty(self, *shape: int) -> Tensor:
        """Return float32 memory beside the tensors."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def squares(self, row: Tensor, dtype: Any) -> Tensor:
        """Return the sum of the squares of each chunk, float32 (chunks,), for the tensors with these addresses."""
        parts = self.empty(self.chunks)
        if self.chunks:
            with torch.cuda.device_of(parts):
                squares_kernel[(self.chunks,)](self.layout, row, parts, self.tensors, DTYPE=dtype, **self.options)
        return parts


def gradients_norm(lists: TensorTables) -> Tensor:
    """Return the 2-norm of the gradients together, 0-dim float64."""
    return lists.squares(lists.grad_addresses, lists.dtypes["GRAD"]).sum(dtype=torch.float64).sqrt()


def lamb(
    lists: TensorTables,
    *,
    norm: Tensor | None,
    max_grad_norm: Number | None,
    lr: Number,
    betas: tuple[Number, Number],
    eps: Number,
    weight_decay: Number,
    bias_correction: bool,
    grad_averaging: bool,
    adam_w_mode: bool,
    adapt: bool,
) -> None:
    """Count a step and update moments and weights in place.

    Args:
        lists: with rows of weights, parameters, first and second moments, and steps (0-dim float32).
        norm: of all gradients together, 0-dim float64 on this device.
        max_grad_norm: what the gradients are scaled down to; None leaves them.
        lr: this number and the others as `LAMB` has them.
        betas: decay of the moments.
        eps: added to the root of the corrected second moment.
        weight_decay: a number of 0 is not read.
        bias_correction: divide the moments by 1 - beta^step.
        grad_averaging: weigh the gradient by 1 - beta1 in the first moment.
        adam_w_mode: decoupled weight decay.
        adapt: rescale each tensor's update by the norm of its weights over that of its update.
    """
    clips, decays = norm is not None and max_grad_norm is not None, is_there(weight_decay)
    numbers = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "decay": weight_decay}
    if max_grad_norm is not None:
        numbers["most"] = max_grad_norm
    at = {f"{key}_at": value for key, value in lists.scalars(numbers).items()}
    tensors, tiling = lists.tensors, lists.tiling
    factors = lists.empty(tensors, lamb_kernel.FACTORS.value)
    kinds = lamb_kernel.DECOUPLED.value if adam_w_mode else lamb_kernel.L2.value
    decay_kind = kinds if decays else lamb_kernel.NONE.value
    weight_dtypes = {key: lists.dtypes[key] for key in ("WEIGHT", "PARAM")}
    common = {**lists.options, "DECAYS": decay_kind, "KEEPS": adapt and tiling.keep_updates}
    with torch.cuda.device_of(factors):
        lamb_kernel.prepare_kernel[(-(-tensors // PREPARED),)](
            lists.addresses, factors, tensors=tensors, CLIPPED=clips, DECAYS=decays, CORRECTED=bias_correction,
            AVERAGED=grad_averaging, BLOCK=PREPARED,
            **{"norm_at": norm if clips else factors, "most_at": factors, **at},
        )  # fmt: skip
        if not lists.chunks:
            return
        parts = lists.empty(2, lists.chunks) if adapt else factors
        updates = lists.empty(lists.chunks, tiling.chunk) if common["KEEPS"] else factors
        lamb_kernel.moments_kernel[(lists.chunks,)](
            lists.layout, lists.addresses, lists.grad_addresses, factors, parts, updates, tensors, ADAPTS=adapt,
            **lists.dtypes, **common,
        )  # fmt: skip
        if adapt:
            lamb_kernel.ratio_kernel[(tensors,)](lists.layout, factors, parts, tensors, lists.chunks, BLOCK=SUMMED)
            lamb_kernel.apply_kernel[(lists.chunks,)](
                lists.layout, lists.addresses, factors, updates, tensors, **weight_dtypes, **common
            )


def lars(
    lists: TensorTables,
    *,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
    trust_coefficient: Number,
    eps: Number,
    nesterov: bool,
    adapt: bool,
    lr_in_momentum: bool,
) -> None:
    """Update momentum buffers and weights in place.

    Args:
        lists: with rows of weights, parameters, and, if there is momentum, buffers.
        lr: this number and the others as `LARS` has them.
        momentum: decay of the buffers.
        weight_decay: L2.
        trust_coefficient: eta.
        eps: added to the denominator of trust.
        nesterov: descend along the gradient plus the momentum.
        adapt: scale by trust.
        lr_in_momentum: the paper's and MLPerf's form.
    """
    if not lists.chunks:
        return
    numbers = {"lr": lr, "momentum": momentum, "decay": weight_decay, "trust": trust_coefficient, "eps": eps}
    at = {f"{key}_at": value for key, value in lists.scalars(numbers).items()}
    factors = lists.empty(lists.tensors, lars_kernel.FACTORS.value)
    weights = lists.squares(lists.addresses, lists.dtypes["WEIGHT"]) if adapt else factors
    grads = lists.squares(lists.grad_addresses, lists.dtypes["GRAD"]) if adapt else factors
    with torch.cuda.device_of(factors):
        lars_kernel.trust_kernel[(lists.tensors,)](
            lists.layout, factors, weights, grads, tensors=lists.tensors, chunks=lists.chunks, ADAPTS=adapt,
            LR_INSIDE=lr_in_momentum, BLOCK=SUMMED, **at,
        )  # fmt: skip
        lars_kernel.update_kernel[(lists.chunks,)](
            lists.layout, lists.addresses, lists.grad_addresses, factors, lists.tensors, BUFFERED=is_there(momentum),
            NESTEROV=nesterov, **lists.dtypes, **lists.options,
        )  # fmt: skip


def _layout(numbers: Sequence[float]) -> list[float]:
    """Return what `kernel` says, of the size of a chunk and those of the tensors."""
    chunk, *sizes = map(int, numbers)
    chunks = [-(-size // chunk) for size in sizes]
    owners = [tensor for tensor, count in enumerate(chunks) for _ in range(count)]
    return [0, *accumulate(chunks), *sizes, *owners]
