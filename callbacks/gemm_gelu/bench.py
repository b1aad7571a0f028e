"""Forward and backward of BERT-large's feed-forward block, beside the floor of its arithmetic."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fasttrain.bench import Case
from fasttrain.callbacks.gemm_gelu import bench_apex
from fasttrain.callbacks.gemm_gelu.feed_forward import linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.form import Approximate
from fasttrain.callbacks.gemm_gelu.reference import reference
from fasttrain.floor import H200_FLOP_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms
from fasttrain.peers import runs_beside

# BERT-large of MLPerf Training: 32 sequences of 512 tokens.
TOKENS, WIDTH, HIDDEN = 16384, 1024, 4096
# Two products forward and four backward.
FLOP = 6 * 2 * TOKENS * WIDTH * HIDDEN
KINDS: tuple[tuple[str, torch.dtype, Approximate], ...] = (
    ("", torch.float16, "none"),
    ("_bf16", torch.bfloat16, "none"),
    ("_tanh", torch.float16, "tanh"),
)


def cases() -> list[Case]:
    """Return the room's bench cases."""
    size = f"{WIDTH} -> {HIDDEN} -> {WIDTH}, {TOKENS} tokens"
    kinds = "fp16, bf16, and fp16 with GELU's tanh form"
    return [Case("gemm_gelu", "bert_large_ffn_16384", f"{size}, forward and backward, {kinds}", bert_large_ffn, True)]


def bert_large_ffn() -> Iterator[Row]:
    """Yield milliseconds of forward and backward, and the rate of arithmetic they come to, by way of computing it.

    Everything is a replay of a CUDA graph. Weights are in the case's dtype already: no variant casts them.
    """
    for suffix, dtype, form in KINDS:
        case = f"bert_large_ffn_16384{suffix}"
        note = (
            f"{str(dtype).removeprefix('torch.')}, GELU's {'erf' if form == 'none' else 'tanh'} form, in a CUDA graph"
        )
        for variant, block in _variants(form).items():
            times = sample_ms(captured(_step(block, dtype, form)), "cuda", warmup=20, repeats=100)
            yield make_row("gemm_gelu", case, variant, "fwd_bwd_ms", "ms", times, note)
            rates = [FLOP / time / 1e9 for time in times]
            yield make_row("gemm_gelu", case, variant, "rate", "TFLOP/s", rates, f"{note}; 6 products in the time")
        floor_ms = FLOP / H200_FLOP_PER_SECOND * 1e3
        floor_note = f"6 products of {FLOP / 6e9:.0f} GFLOP at 790 TFLOP/s"
        yield make_row("gemm_gelu", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], floor_note)
        yield make_row("gemm_gelu", case, "floor", "rate", "TFLOP/s", [H200_FLOP_PER_SECOND / 1e12], floor_note)


Block = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Approximate], Tensor]


def _variants(form: Approximate) -> dict[str, Block]:
    torch._dynamo.reset()
    variants: dict[str, Block] = {
        "eager": reference,
        "compile": torch.compile(reference, fullgraph=True, dynamic=False),
        "ours": linear_gelu_linear,
    }
    if form == bench_apex.FORM and runs_beside(bench_apex.TRIAL):
        variants["apex"] = bench_apex.linear_gelu_linear
    return variants


def _step(block: Block, dtype: torch.dtype, form: Approximate) -> Callable[[], tuple[Tensor, ...]]:
    """Return what goes forward and backward once and yields the five gradients."""
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
    spreads = (1.0, WIDTH**-0.5, 0.1, HIDDEN**-0.5, 0.1)
    leaves = [
        (torch.randn(shape, device="cuda") * spread).to(dtype).requires_grad_()
        for shape, spread in zip(shapes, spreads, strict=True)
    ]
    dy = torch.randn(TOKENS, WIDTH, device="cuda").to(dtype)

    def step() -> tuple[Tensor, ...]:
        x, weight, bias, weight_2, bias_2 = leaves
        return torch.autograd.grad(block(x, weight, bias, weight_2, bias_2, form), leaves, dy)

    return step
