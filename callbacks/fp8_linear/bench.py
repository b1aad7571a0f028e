"""Forward and backward of BERT-large's feed-forward block and projections in FP8 and in bf16, beside a floor."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from fasttrain.bench import Case
from fasttrain.callbacks.fp8_linear.functions import fp8_feed_forward, fp8_linear
from fasttrain.callbacks.fp8_linear.scaling import Scales, Scaling, no_scales
from fasttrain.callbacks.gemm_gelu import linear_gelu_linear
from fasttrain.measure import Row, captured, make_row, sample_ms

# 32 rows of 512 tokens of MLPerf's BERT-large.
TOKENS, WIDTH, HIDDEN = 16384, 1024, 4096
Run = Callable[..., Tensor]


class Work(NamedTuple):
    """Products and what goes before, between and after them."""

    case: str
    leaves: list[Tensor]
    dy: Tensor
    variants: dict[str, Run]
    flop: float


def cases() -> list[Case]:
    """Return the room's bench cases."""
    size = f"{TOKENS} tokens, forward and backward, bf16 against FP8"
    return [
        Case("fp8_linear", "bert_large_ffn_16384", f"{WIDTH} -> {HIDDEN} -> {WIDTH}, {size}", feed_forward, True),
        Case("fp8_linear", "bert_large_qkv_16384", f"{WIDTH} -> three times {WIDTH}, {size}", projections, True),
    ]


def feed_forward() -> Iterator[Row]:
    """Yield milliseconds and rates of the block with GELU's tanh form."""
    leaves = _leaves((TOKENS, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))

    def plain(x: Tensor, w: Tensor, b: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
        return linear(gelu(linear(x, w, b), approximate="tanh"), w_2, b_2)

    def fp8(scaling: Scaling) -> Run:
        scales = Scales(no_scales(6).cuda(), set(), scaling)
        return lambda x, w, b, w_2, b_2: fp8_feed_forward(x, w, b, w_2, b_2, scales, "tanh")

    variants: dict[str, Run] = {
        "eager": plain,
        "compile": torch.compile(plain, fullgraph=True, dynamic=False),
        "gemm_gelu": partial(linear_gelu_linear, approximate="tanh"),
        "ours": fp8(Scaling()),
        "ours_current": fp8(Scaling("current")),
    }
    flop = 6.0 * 2 * TOKENS * WIDTH * HIDDEN
    yield from _rows(Work("bert_large_ffn_16384", leaves, _random(TOKENS, WIDTH), variants, flop))


def projections() -> Iterator[Row]:
    """Yield milliseconds and rates of three projections of one input."""
    leaves = _leaves((TOKENS, WIDTH), *[(WIDTH, WIDTH)] * 3, *[(WIDTH,)] * 3)

    def plain(x: Tensor, *parameters: Tensor) -> Tensor:
        return linear(x, torch.cat(parameters[:3]), torch.cat(parameters[3:]))

    def fp8(scaling: Scaling) -> Run:
        scales = Scales(no_scales(3).cuda(), set(), scaling)
        return lambda x, *parameters: torch.cat(fp8_linear(x, parameters[:3], parameters[3:], scales), dim=1)

    variants: dict[str, Run] = {
        "eager": plain,
        "compile": torch.compile(plain, fullgraph=True, dynamic=False),
        "ours": fp8(Scaling()),
        "ours_current": fp8(Scaling("current")),
    }
    flop = 3.0 * 2 * TOKENS * WIDTH * 3 * WIDTH
    yield from _rows(Work("bert_large_qkv_16384", leaves, _random(TOKENS, 3 * WIDTH), variants, flop))


def _rows(work: Work) -> Iterator[Row]:
    """Weights are bf16 for all variants: none has to cast them from float32, and FP8's gradients are bf16 too."""
    torch._dynamo.reset()
    note = "bf16 in and out, in a CUDA graph"
    for variant, run in work.variants.items():

        def step(run: Run = run) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(*work.leaves), work.leaves, work.dy)

        times = sample_ms(captured(step), "cuda", warmup=20, repeats=100)
        yield make_row("fp8_linear", work.case, variant, "fwd_bwd_ms", "ms", times, note)
        yield make_row("fp8_linear", work.case, variant, "rate", "TFLOP/s", [work.flop / t / 1e9 for t in times], note)
    floor = work.flop / large_product_rate() * 1e3
    note = "the products at the rate of one of 8192 x 8192 x 8192 in FP8, measured beside"
    yield make_row("fp8_linear", work.case, "floor", "fwd_bwd_ms", "ms", [floor], note)
    yield make_row("fp8_linear", work.case, "floor", "rate", "TFLOP/s", [work.flop / floor / 1e9], note)


def large_product_rate(size: int = 8192) -> float:
    """Return the FLOP/s of a large FP8 product here."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def run() -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    times = sorted(sample_ms(run, "cuda", warmup=5, repeats=20))
    return 2 * size**3 / (times[10] * 1e-3)


def _random(*shape: int, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * spread).to(torch.bfloat16)


def _leaves(x: tuple[int, ...], *parameters: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = [_random(*x), *(_random(*shape, spread=0.03) for shape in parameters)]
    return [tensor.requires_grad_() for tensor in tensors]
