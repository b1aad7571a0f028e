"""gemm_gelu's kernels on a GPU: against the reference in float64, and in all that a training step does with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.callbacks.gemm_gelu import FeedForward, FeedForwardPatches, linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.reference import TOLERANCE, reference
from fasttrain.callbacks.gemm_gelu.ways import Ways
from fasttrain.errors import OptimizationError
from fasttrain.measure import captured
from fasttrain.patches import PatchSurgery

pytestmark = pytest.mark.gpu

HALVES = [torch.float16, torch.bfloat16]
both_ways = pytest.mark.parametrize("ways", [Ways(gelu="pass"), Ways(gelu="epilogue")], ids=str)
NAMES = ("y", "dx", "d_weight", "d_bias", "d_weight_2", "d_bias_2")
# Tokens, in, hidden, out: BERT-large's, ragged in tokens, ragged in all, fewer than a tile.
SHAPES = [(4096, 1024, 4096, 1024), (1000, 768, 3072, 768), (777, 104, 520, 72), (3, 16, 40, 8)]


def leaves_of(tokens: int, width: int, hidden: int, out: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((tokens, width), (hidden, width), (hidden,), (out, hidden), (out,))
    spreads = (1.0, width**-0.5, 0.2, hidden**-0.5, 0.2)
    return [
        (torch.randn(shape, device="cuda") * spread).to(dtype).requires_grad_()
        for shape, spread in zip(shapes, spreads, strict=True)
    ]


def forward_and_backward(block: Any, leaves: list[Tensor], dy: Tensor, **options: Any) -> list[Tensor]:
    y = block(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_equals_reference(found: list[Tensor], leaves: list[Tensor], dy: Tensor, form: str, dtype: Any) -> None:
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = forward_and_backward(reference, exact, dy.double(), approximate=form)
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        error = float((one.double() - other).abs().max()) / float(other.abs().max())
        assert error <= TOLERANCE[dtype], f"{name} is off by {error:.1e}"


@both_ways
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_the_reference(
    dtype: torch.dtype, form: str, shape: tuple[int, ...], ways: Ways
) -> None:
    leaves = leaves_of(*shape, dtype)
    dy = torch.randn(shape[0], shape[3], device="cuda").to(dtype)
    found = forward_and_backward(linear_gelu_linear, leaves, dy, approximate=form, ways=ways)
    assert all(one.dtype == dtype for one in found)
    assert_equals_reference(found, leaves, dy, form, dtype)
    again = forward_and_backward(linear_gelu_linear, leaves, dy, approximate=form, ways=ways)
    assert all(map(torch.equal, found, again)), "sums are taken in one order"


@both_ways
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_widths_that_tensor_descriptors_do_not_take(dtype: torch.dtype, ways: Ways) -> None:
    leaves = leaves_of(300, 33, 77, 19, dtype)
    dy = torch.randn(300, 19, device="cuda").to(dtype)
    for tier in ("auto", "triton"):
        found = forward_and_backward(linear_gelu_linear, leaves, dy, tier=tier, ways=ways)
        assert_equals_reference(found, leaves, dy, "none", dtype)


@both_ways
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_it_is_as_near_to_float64_as_pytorch_is(dtype: torch.dtype, ways: Ways) -> None:
    leaves = leaves_of(2048, 1024, 4096, 1024, dtype)
    dy = torch.randn(2048, 1024, device="cuda").to(dtype)
    exact = forward_and_backward(reference, [leaf.detach().double().requires_grad_() for leaf in leaves], dy.double())
    ours = forward_and_backward(linear_gelu_linear, leaves, dy, ways=ways)
    plain = forward_and_backward(reference, leaves, dy)
    for name, one, other, wanted in zip(NAMES, ours, plain, exact, strict=True):
        errors = [float((found.double() - wanted).square().mean().sqrt()) for found in (one, other)]
        assert errors[0] <= 1.1 * errors[1], f"{name}: {errors[0]:.2e}, PyTorch's {errors[1]:.2e}"


def test_float32_is_pytorchs() -> None:
    leaves = leaves_of(100, 64, 128, 64, torch.float32)
    dy = torch.randn(100, 64, device="cuda")
    found = forward_and_backward(linear_gelu_linear, leaves, dy)
    assert all(map(torch.equal, found, forward_and_backward(reference, leaves, dy)))
    with pytest.raises(OptimizationError, match="takes tensors of one dtype"):
        linear_gelu_linear(*leaves, tier="triton")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_extreme_values(dtype: torch.dtype) -> None:
    from fasttrain.callbacks.gemm_gelu import in_triton

    x = torch.zeros(8, 8, device="cuda", dtype=dtype)
    x[:6, 0] = torch.tensor([60000.0, -60000.0, 300.0, -300.0, 0.0, float("nan")], device="cuda")
    weight = torch.zeros(8, 8, device="cuda", dtype=dtype)
    weight[:, 0] = 1
    for form in ("none", "tanh"):
        hidden, slope = in_triton.forward(x, weight, None, form, True)
        assert slope is not None
        for activation in (hidden, in_triton.gelu(x, form)):
            assert activation[:5, 0].tolist() == [float(x[0, 0]), 0, float(x[2, 0]), 0, 0]
            assert torch.isnan(activation[5, 0])
        assert slope[:5, 0].tolist() == [1, 0, 1, 0, 0.5]
        assert torch.isnan(hidden[5]).all()
        assert torch.isnan(slope[5]).all()


def test_empty_batches_strides_and_more_dimensions() -> None:
    leaves = leaves_of(0, 64, 128, 32, torch.float16)
    found = forward_and_backward(linear_gelu_linear, leaves, torch.zeros(0, 32, device="cuda").half())
    assert found[0].shape == (0, 32)
    assert all(not one.any() for one in found[2:])
    x, *parameters = leaves_of(6 * 50, 64, 128, 32, torch.float16)
    x = x.detach()
    batched = x.view(6, 50, 64)
    wide = torch.cat([x, x], dim=1)
    for strided in (batched, batched.transpose(0, 1), wide[:, :64], wide[:, 3:67], wide[:, ::2]):
        leaf = strided.detach().requires_grad_()
        y = linear_gelu_linear(leaf, *parameters)  # type: ignore[arg-type]
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        exact = leaf.detach().double().requires_grad_()
        wanted = reference(exact, *(p.double() for p in parameters))  # type: ignore[arg-type]
        (dx_wanted,) = torch.autograd.grad(wanted.sum(), exact)
        torch.testing.assert_close(y.double(), wanted, rtol=0, atol=5e-3)
        torch.testing.assert_close(dx.double(), dx_wanted, rtol=0, atol=2e-3 * float(dx_wanted.abs().max()))


def test_a_weight_used_twice_gets_both_gradients() -> None:
    leaves = leaves_of(512, 256, 1024, 256, torch.bfloat16)

    def twice(x: Tensor, *parameters: Tensor, of: Any = linear_gelu_linear) -> Tensor:
        return of(of(x, *parameters), *parameters)  # type: ignore[no-any-return]

    dy = torch.randn(512, 256, device="cuda").bfloat16()
    found = forward_and_backward(twice, leaves, dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for one, other in zip(found, forward_and_backward(twice, exact, dy.double(), of=reference), strict=True):
        assert float((one.double() - other).abs().max()) <= 2e-2 * float(other.abs().max())


@both_ways
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_a_cuda_graph_without_waiting(dtype: torch.dtype, ways: Ways) -> None:
    leaves = leaves_of(2048, 512, 2048, 512, dtype)
    dy = torch.randn(2048, 512, device="cuda").to(dtype)
    kept: list[list[Tensor]] = []
    forward_and_backward(linear_gelu_linear, leaves, dy, ways=ways)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward(linear_gelu_linear, leaves, dy, ways=ways)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replay = captured(lambda: kept.append(forward_and_backward(linear_gelu_linear, leaves, dy, ways=ways)))
    for _ in range(2):
        with torch.no_grad():
            leaves[0].normal_()
            dy.normal_()
        replay()
        assert_equals_reference(kept[-1], leaves, dy, "none", dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_under_autocast_and_under_torch_compile(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    block = FeedForward(256, 1024, approximate="tanh").cuda()
    x = torch.randn(4, 128, 256, device="cuda")
    wanted = nn.Sequential.forward(block, x)
    wanted_gradients = torch.autograd.grad(wanted.square().sum(), list(block.parameters()))
    for version in (block, torch.compile(block, fullgraph=True)):
        with torch.autocast("cuda", dtype):
            y = version(x)
        assert y.dtype == dtype
        gradients = torch.autograd.grad(y.float().square().sum(), list(block.parameters()))
        for found, exact in zip((y.float(), *gradients), (wanted, *wanted_gradients), strict=True):
            assert found.dtype == torch.float32
            assert float((found - exact).abs().max()) <= 3 * TOLERANCE[dtype] * float(exact.abs().max())


def test_a_second_derivative_is_refused() -> None:
    leaves = leaves_of(64, 64, 128, 64, torch.float16)
    with pytest.raises(OptimizationError, match="can be differentiated again"):
        torch.autograd.grad(linear_gelu_linear(*leaves).sum(), leaves, create_graph=True)  # type: ignore[arg-type]


def test_put_into_a_model_and_undone() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.0)) for _ in range(3)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(2, 100, 64, device="cuda")

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    before, names = run(), list(model.state_dict())
    surgery = PatchSurgery(model, FeedForwardPatches())
    assert len(surgery.apply()) == 3
    assert list(model.state_dict()) == names
    for found, wanted in zip(run(), before, strict=True):
        assert float((found - wanted).abs().max()) <= 3 * TOLERANCE[torch.bfloat16] * float(wanted.abs().max())
    surgery.undo()
    assert all(map(torch.equal, run(), before))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group": 0},
        {"group": 0, "parts": 4, "programs": 0},
        {"group": 0, "parts": 4, "programs": 1, "rows": 256, "warps": 8, "stages": 4},
        {"parts": 4, "flatten": True, "programs": 1, "rows": 256, "warps": 8},
        {"programs": 0},
        {"programs": 1, "columns": 256, "warps": 8},
        {"programs": 1, "rows": 64, "depth": 128, "stages": 2},
        {"parts": 1, "stages": 2},
        {"parts": 4, "flatten": True},
        {"programs": 1, "columns": 256, "warps": 8, "parts": 4, "flatten": True},
        {"parts": 4, "group": 3, "stagger_ns": 3000},
    ],
    ids=str,
)
def test_every_tiling_gives_the_same(dtype: torch.dtype, changes: dict[str, int]) -> None:
    from fasttrain.callbacks.gemm_gelu import in_triton
    from fasttrain.callbacks.gemm_gelu.tiling import Tiling

    x, weight, bias, weight_2, _ = (leaf.detach() for leaf in leaves_of(5000, 264, 1032, 136, dtype))
    dy = torch.randn(5000, 136, device="cuda").to(dtype)
    tiling = Tiling(**changes)  # type: ignore[arg-type]
    hidden, slope = in_triton.forward(x, weight, bias, "none", True, tiling)
    before = nn.functional.linear(x.double(), weight.double(), bias.double()).requires_grad_()
    activation = nn.functional.gelu(before)
    (wanted_slope,) = torch.autograd.grad(activation.sum(), before)
    assert slope is not None
    exact = (dy.double() @ weight_2.double()) * wanted_slope
    pairs = [(hidden, activation), (slope, wanted_slope)]
    for kept, form in ((slope, None), (before.detach().to(dtype), "none")):
        result, sums = in_triton.backward(dy, weight_2, kept, form, torch.float32, tiling)
        assert sums is not None
        pairs += [(result, exact), (sums, exact.sum(dim=0))]
    for found, wanted in pairs:
        assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * float(wanted.abs().max())
