"""Forward and backward at the size of BERT-large's pre-training, in CUDA graphs, beside the floor of memory traffic."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.bench import Case
from fasttrain.callbacks.layer_norm_dropout.fused import dropout_add_layer_norm, twin
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms

# MLPerf Training v2.0, BERT: hidden 1024, dropout 0.1, eps 1e-12; 32 sequences of 512 tokens.
ROWS, HIDDEN, P, EPS = 16384, 1024, 0.1, 1e-12
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}

Outputs = Callable[[], list[Tensor]]


def cases() -> list[Case]:
    """Return the room's bench cases."""
    size = f"{ROWS:,} x {HIDDEN}, p {P}, fp16 and bf16, in CUDA graphs"
    name, room = "bert_large_16384x1024", "layer_norm_dropout"
    return [
        Case(room, name, f"forward and backward, {size}", once, True),
        Case(room, f"{name}_twice", f"with a result that is used twice, {size}", twice, True),
    ]


def once() -> Iterator[Row]:
    """Yield milliseconds of forward and backward by precision and variant."""
    for precision, dtype in PRECISIONS.items():
        work, case = _Work(dtype), f"bert_large_16384x1024_{precision}"
        compiled = torch.compile(work.formula, fullgraph=True, dynamic=False)
        yield work.row(case, "eager", lambda work=work: [work.formula(work.residual)])  # type: ignore[misc]
        yield work.row(case, "eager_autocast", work.under_autocast, "float32 weights, residual and result")
        yield work.row(case, "compile", lambda work=work, compiled=compiled: [compiled(work.residual)])  # type: ignore[misc]
        yield work.row(case, "ours", lambda work=work: [work.ours()])  # type: ignore[misc]
        yield work.row(case, "ours_x_bias", lambda work=work: [work.ours(work.x_bias)], "with a bias of x")  # type: ignore[misc]
        # x, the residual, dy and y itself read, from which the rest can be known; y and two gradients written.
        yield work.floor(case, 7)


def twice() -> Iterator[Row]:
    """Yield the same where the next layer and its shortcut both read the result, and give it two gradients."""
    for precision, dtype in PRECISIONS.items():
        work, case = _Work(dtype), f"bert_large_16384x1024_twice_{precision}"
        compiled = torch.compile(work.formula, fullgraph=True, dynamic=False)
        yield work.row(case, "eager", lambda work=work: _two(work.formula(work.residual)))  # type: ignore[misc]
        yield work.row(case, "compile", lambda work=work, compiled=compiled: _two(compiled(work.residual)))  # type: ignore[misc]
        yield work.row(case, "ours", lambda work=work: _two(work.ours(twice=True)))  # type: ignore[misc]
        yield work.floor(case, 8)


def _two(y: Tensor) -> list[Tensor]:
    return [y, twin(y).view_as(y)]


class _Work:
    """Tensors, and a row for each way to compute with them."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.x, self.residual, *self.gradients = (
            torch.randn(ROWS, HIDDEN, device="cuda", dtype=dtype) for _ in range(4)
        )
        self.wide_residual = self.residual.float()
        self.weight, self.bias, self.x_bias = (torch.randn(HIDDEN, device="cuda", dtype=dtype) for _ in range(3))
        self.leaves = [self.x, self.residual, self.weight, self.bias, self.x_bias, self.wide_residual]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def formula(self, residual: Tensor) -> Tensor:
        """Compute with PyTorch's operators."""
        return F.layer_norm(residual + F.dropout(self.x, P), (HIDDEN,), self.weight, self.bias, EPS)

    def under_autocast(self) -> list[Tensor]:
        """Compute as a plain model does under autocast, whose stream of residuals is float32."""
        with torch.autocast("cuda", self.dtype):
            return [self.formula(self.wide_residual)]

    def ours(self, x_bias: Tensor | None = None, twice: bool = False) -> Tensor:
        """Compute with the room's kernels."""
        return dropout_add_layer_norm(
            self.x, self.weight, self.bias, self.residual, p=P, eps=EPS, x_bias=x_bias, twice=twice
        )  # fmt: skip

    def row(self, case: str, variant: str, outputs: Outputs, note: str = "") -> Row:
        """Return the row of forward and backward, captured."""

        def step() -> Any:
            ys = outputs()
            gradients = [gradient.to(y.dtype) for y, gradient in zip(ys, self.gradients, strict=False)]
            return torch.autograd.grad(ys, self.leaves, gradients, allow_unused=True)

        times = sample_ms(captured(step), "cuda", warmup=5, repeats=30)
        note = "; ".join(["CUDA graph", *([note] if note else [])])
        return make_row("layer_norm_dropout", case, variant, "fwd_bwd_ms", "ms", times, note)

    def floor(self, case: str, transfers: int) -> Row:
        """Return the time of reading or writing so many of these tensors."""
        moved = transfers * self.x.numel() * self.x.element_size()
        note = f"{transfers} transfers of 34 MB at 4.3 TB/s"
        return make_row(
            "layer_norm_dropout", case, "floor", "fwd_bwd_ms", "ms", [moved / H200_BYTES_PER_SECOND * 1e3], note
        )  # fmt: skip
