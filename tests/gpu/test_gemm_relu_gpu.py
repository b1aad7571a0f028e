"""gemm_relu on a GPU: DLRM's shapes against float64 and PyTorch, on two streams, in a captured graph, and compiled."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasttrain.callbacks.gemm_relu import FusedMLP, MLPPatches, fused_mlp, linear_relu_chain
from fasttrain.callbacks.gemm_relu.bench import BATCH, BOTTOM, TOP, Work
from fasttrain.callbacks.gemm_relu.reference import TOLERANCE, reference
from fasttrain.patches import PatchSurgery

pytestmark = pytest.mark.gpu

CASES = {
    "bottom": (BOTTOM.widths, True, False),
    "top": (TOP.widths, False, True),
    "top of 479": ((479, *TOP.widths[1:]), False, True),
}
AUTOCASTS = [None, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    kernel = pytest.importorskip("fasttrain.callbacks.gemm_relu.kernel")
    if kernel.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


def every_way() -> dict[str, Any]:
    from fasttrain.callbacks.gemm_relu.layers import Ways

    return {
        "default": Ways(),
        "one stream": Ways(side_stream=False),
        "products only": Ways(narrow=False),
        "casts of PyTorch": Ways(cast="foreach", float32_gradients=False),
        "epilogue": Ways(mask="epilogue", data_gradient_first=True),
        "epilogue alone": Ways(mask="epilogue", side_stream=False, narrow=False),
    }


WAYS = ["default", "one stream", "products only", "casts of PyTorch", "epilogue", "epilogue alone"]


def whole_numbers(widths: Sequence[int], rows: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return a chain whose activations and their gradients 16 bits hold exactly, so that no rounding decides a ReLU."""
    x = torch.randint(-1, 2, (rows, widths[0]), device="cuda").float()
    weights, biases = [], []
    for inputs, outputs in pairwise(widths):
        weight = torch.zeros(outputs, inputs, device="cuda")
        for factor, shift in ((1, 0), (7, 3)):
            i = torch.arange(outputs, device="cuda")
            weight[i, (factor * i + shift) % inputs] = torch.randint(0, 2, (outputs,), device="cuda") * 2.0 - 1
        weights.append(weight)
        biases.append(torch.randint(-1, 2, (outputs,), device="cuda").float())
    return x, weights, biases


def leaf(tensor: Tensor, wanted: bool = True) -> Tensor:
    return tensor.detach().clone().requires_grad_(wanted)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def gradients(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], relu_last: bool, wants_dx: bool, dy: Tensor, chain: Any,
    autocast: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the output and all gradients."""
    x, weights, biases = leaf(x, wants_dx), [leaf(w) for w in weights], [leaf(b) for b in biases]
    with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None, cache_enabled=False):
        y = chain(x, weights, biases, relu_last)
    leaves = [*weights, *biases, *([x] if wants_dx else [])]
    return (y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype)))


def double(*tensors: Any) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) else [one.double() for one in t] for t in tensors]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", AUTOCASTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_dlrm_in_whole_numbers(case: str, autocast: torch.dtype | None, way: str) -> None:
    torch.manual_seed(0)
    widths, relu_last, wants_dx = CASES[case]
    chain = whole_numbers(widths, BATCH)
    dy = torch.randint(-2, 3, (BATCH, widths[-1]), device="cuda")

    def ours(*arguments: Any) -> Tensor:
        return linear_relu_chain(*arguments, ways=every_way()[way])

    found = gradients(*chain, relu_last, wants_dx, dy, ours, autocast)
    wanted = gradients(*double(*chain), relu_last, wants_dx, dy.double(), reference, None)
    for one, exact in zip(found, wanted, strict=True):
        assert_close(one, exact, TOLERANCE[autocast or torch.float32])


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", AUTOCASTS, ids=str)
@pytest.mark.parametrize("case", ["bottom", "top"])
def test_dlrm_on_random_data_is_no_worse_than_pytorch(case: str, autocast: torch.dtype | None, way: str) -> None:
    torch.manual_seed(0)
    widths, relu_last, wants_dx = CASES[case]
    x = torch.rand(BATCH, widths[0], device="cuda")
    weights = [torch.randn(n, k, device="cuda") * (2 / (n + k)) ** 0.5 for k, n in pairwise(widths)]
    biases = [torch.randn(n, device="cuda") / n**0.5 for n in widths[1:]]
    # Of the values that autocast hands on: their sum is the last bias's gradient, which has no other rounding.
    dy = torch.randn(BATCH, widths[-1], device="cuda").to(autocast or torch.float32).float()

    def ours(*arguments: Any) -> Tensor:
        return linear_relu_chain(*arguments, ways=every_way()[way])

    wanted = gradients(*double(x, weights, biases), relu_last, wants_dx, dy.double(), reference, None)
    plain = gradients(x, weights, biases, relu_last, wants_dx, dy, reference, autocast)
    found = gradients(x, weights, biases, relu_last, wants_dx, dy, ours, autocast)
    for one, other, exact in zip(found, plain, wanted, strict=True):
        # One of seven million values that passes a ReLU on one side alone is 4e-4 of a gradient.
        assert off(one, exact) < 1.25 * off(other, exact) + 1e-3
    again = gradients(x, weights, biases, relu_last, wants_dx, dy, ours, autocast)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "sums have a fixed order"


@pytest.mark.parametrize("autocast", AUTOCASTS, ids=str)
@settings(max_examples=20, deadline=None)
@given(  # of widths only a few, because kernels are compiled for each
    rows=st.integers(1, 300), inputs=st.sampled_from([1, 13, 16, 31, 33, 64]),
    hidden=st.lists(st.sampled_from([1, 7, 24, 136]), max_size=3), outputs=st.sampled_from([1, 24, 33]),
    relu_last=st.booleans(), wants_dx=st.booleans(), way=st.sampled_from(WAYS), strided=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_odd_shapes(
    autocast: torch.dtype | None, rows: int, inputs: int, hidden: list[int], outputs: int, relu_last: bool,
    wants_dx: bool, way: str, strided: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    x, weights, biases = whole_numbers([inputs, *hidden, outputs], rows)
    if strided:
        x = x.repeat(2, 2)[::2, ::2].reshape(rows, inputs)
    dy = torch.randint(-2, 3, (rows, outputs), device="cuda")

    def ours(*arguments: Any) -> Tensor:
        return linear_relu_chain(*arguments, ways=every_way()[way])

    found = gradients(x, weights, biases, relu_last, wants_dx, dy, ours, autocast)
    wanted = gradients(*double(x, weights, biases), relu_last, wants_dx, dy.double(), reference, None)
    for one, exact in zip(found, wanted, strict=True):
        assert_close(one, exact, TOLERANCE[autocast or torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parameters_of_16_bits(dtype: torch.dtype) -> None:
    x, weights, biases = whole_numbers(TOP.widths, 256)
    half = x.to(dtype), [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
    dy = torch.randint(-2, 3, (256, 1), device="cuda")
    found = gradients(*half, False, True, dy, linear_relu_chain, None)
    wanted = gradients(*double(x, weights, biases), False, True, dy.double(), reference, None)
    for one, exact in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert_close(one, exact, TOLERANCE[dtype])


def test_empty_and_used_twice() -> None:
    x, (weight,), (bias,) = whole_numbers((64, 64), 100)
    w, b, wd, bd = leaf(weight), leaf(bias), leaf(weight.double()), leaf(bias.double())
    with torch.autocast("cuda", torch.float16):
        y = linear_relu_chain(linear_relu_chain(x, [w, w], [b, b]), [w], [b])
        empty = linear_relu_chain(x[:0], [w], [b])
    assert empty.shape == (0, 64)
    yd = reference(reference(x.double(), [wd, wd], [bd, bd]), [wd], [bd])
    for found, wanted in zip(
        torch.autograd.grad(y.float().sum() + empty.float().sum(), [w, b]),
        torch.autograd.grad(yd.sum(), [wd, bd]),
        strict=True,
    ):
        assert_close(found, wanted, TOLERANCE[torch.float16])


@pytest.mark.parametrize("way", WAYS)
def test_in_a_captured_graph(way: str) -> None:
    """Replays on other data, with memory that others use in between."""
    torch.manual_seed(0)
    for mlp in (BOTTOM, TOP):
        work = Work(mlp)
        step = work.step(work.ours(every_way()[way]))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for _ in range(3):
            with torch.no_grad():
                work.x.copy_(torch.rand_like(work.x))
                for parameter in work.net.parameters():
                    parameter.mul_(1.01)
            graph.replay()
            replayed = [gradient.clone() for gradient in found]
            assert all(off(one, other.double()) < 1e-3 for one, other in zip(replayed, step(), strict=True))


def test_memory_of_both_streams_in_a_long_loop() -> None:
    """What the second stream reads is not given to others before it is done."""
    torch.manual_seed(0)
    work = Work(TOP)
    step = work.step(work.ours(every_way()["default"]))
    wanted = [gradient.clone() for gradient in step()]
    torch.cuda.synchronize()
    for _ in range(50):
        found = step()
        torch.full((2**20,), float("nan"), device="cuda")  # takes and spoils what was freed
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_nothing_waits_for_the_gpu() -> None:
    steps = [work.step(work.ours(every_way()["default"])) for work in (Work(BOTTOM, 64), Work(TOP, 64))]
    for step in steps:
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.bottom(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("autocast", AUTOCASTS, ids=str)
def test_a_model_with_surgery_and_compiled(autocast: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = DLRM().cuda(), torch.rand(512, 13, device="cuda")

    def run(forward: Any) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
            y = forward(x)
        (y.float().square().mean() * 1024).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    exact = [gradient.double() for gradient in run(model)]
    PatchSurgery(model, MLPPatches()).apply()
    assert type(model.bottom) is type(model.top) is FusedMLP
    tolerance = 1e-4 if autocast is None else 0.1
    for one, other in zip(run(model), exact, strict=True):
        assert off(one, other) < tolerance
    for one, other in zip(run(torch.compile(model, fullgraph=True)), exact, strict=True):
        assert off(one, other) < tolerance


def test_what_is_no_number_stays_none() -> None:
    mlp, x = fused_mlp(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()), torch.rand(4, 16).cuda()
    x[0, 0] = float("nan")
    with torch.autocast("cuda", torch.float16):
        assert mlp(x)[0].isnan().all()
