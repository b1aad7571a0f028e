"""What autograd, autocast and torch.compile may ask of gemm_gelu, and what it refuses."""

from typing import Any

import pytest
import torch
from gelu_blocks import BOTH_WAYS, DEVICE, assert_close, set_small_tiles, tensors
from torch import Tensor, nn

from fasttrain.callbacks.gemm_gelu import FeedForward, linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED
from fasttrain.callbacks.gemm_gelu.reference import TOLERANCE, reference
from fasttrain.callbacks.gemm_gelu.ways import Ways
from fasttrain.errors import OptimizationError

# The interpreter says of numpy that exp2 has overflowed, which is what makes a sigmoid 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

small_tiles = pytest.fixture(set_small_tiles)
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])
both_ways = pytest.mark.parametrize("ways", BOTH_WAYS, ids=str)


def test_float64_is_differentiated_rightly_and_twice() -> None:
    leaves = [leaf.detach().double().requires_grad_() for leaf in tensors(3, 4, 5, 2)]
    assert torch.autograd.gradcheck(linear_gelu_linear, leaves)
    assert torch.autograd.gradgradcheck(linear_gelu_linear, leaves)


@both_tiers
def test_shapes_and_strides(small_tiles: None, tier: Any) -> None:
    x, weight, bias, weight_2, bias_2 = tensors(24, 16, 32, 8)
    arguments = (weight, bias, weight_2, bias_2)
    batched = x.view(2, 3, 4, 16)
    y = linear_gelu_linear(batched, *arguments, tier=tier)
    assert y.shape == (2, 3, 4, 8)
    y.sum().backward()  # an expanded gradient
    for strided in (batched.transpose(0, 2), torch.cat([x, x], dim=1)[:, ::2]):
        expected = reference(strided, *arguments)
        torch.testing.assert_close(linear_gelu_linear(strided, *arguments, tier=tier), expected, rtol=1e-4, atol=1e-5)
    transposed = weight.t().contiguous().t()
    torch.testing.assert_close(
        linear_gelu_linear(x, transposed, bias, weight_2, bias_2, tier=tier), reference(x, *arguments), rtol=1e-4,
        atol=1e-5,
    )  # fmt: skip
    assert linear_gelu_linear(x[0], *arguments, tier=tier).shape == (8,)


@both_ways
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "weight_2", "bias_2", ""])
def test_only_wanted_gradients_are_computed_and_only_what_they_need_is_kept(
    small_tiles: None, wanted: str, ways: Ways
) -> None:
    names = ("x", "weight", "bias", "weight_2", "bias_2")
    leaves = dict(zip(names, tensors(20, 8, 16, 8), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    y = linear_gelu_linear(*leaves.values(), tier="triton", ways=ways)  # type: ignore[arg-type]
    if not wanted:
        assert y.grad_fn is None
        return
    node: Any = y.grad_fn
    kept = sum(tensor is not None for tensor in node.saved_tensors)
    assert kept == {"x": 3, "weight": 3, "bias": 2, "weight_2": 1, "bias_2": 0}[wanted]
    y.square().sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]


@both_ways
def test_a_weight_used_twice_gets_both_gradients(small_tiles: None, ways: Ways) -> None:
    x, weight, bias, weight_2, bias_2 = tensors(20, 8, 16, 8)

    def twice(block: Any) -> list[Tensor]:
        y = block(block(x, weight, bias, weight_2, bias_2), weight, bias, weight_2, bias_2)
        return list(torch.autograd.grad(y.square().sum(), (x, weight, bias, weight_2, bias_2)))

    ours = twice(lambda *a: linear_gelu_linear(*a, tier="triton", ways=ways))
    for found, expected in zip(ours, twice(reference), strict=True):
        assert_close(found, expected.double(), 10 * TOLERANCE[torch.float32])
    square = torch.randn(8, 8, device=DEVICE, requires_grad=True)
    (found,) = torch.autograd.grad(linear_gelu_linear(x, square, None, square, None, tier="triton").sum(), square)
    (expected,) = torch.autograd.grad(reference(x, square, None, square, None).sum(), square)
    assert_close(found, expected.double(), TOLERANCE[torch.float32])


@pytest.mark.skipif(not INTERPRETED.value, reason="float32 is for the interpreter")
def test_autocast_casts_and_casts_gradients_back(small_tiles: None) -> None:
    leaves = tensors(20, 8, 16, 8)
    with torch.autocast("cpu", torch.float16):
        y = linear_gelu_linear(*leaves, tier="triton")  # type: ignore[arg-type]
    assert y.dtype == torch.float16
    gradients = torch.autograd.grad(y.float().square().sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(reference(*exact).square().sum(), exact)  # type: ignore[arg-type]
    for gradient, one in zip(gradients, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert_close(gradient, one, 5e-3)


def test_a_second_derivative_of_the_fused_block_is_refused(small_tiles: None) -> None:
    leaves = tensors(4, 8, 16, 8)
    y = linear_gelu_linear(*leaves, tier="triton")  # type: ignore[arg-type]
    words = r"gemm_gelu: a gradient that can be differentiated again .*; call it with tier='torch'\."
    with pytest.raises(OptimizationError, match=words):
        torch.autograd.grad(y.sum(), leaves, create_graph=True)


@both_ways
def test_a_second_backward_gives_the_same(small_tiles: None, ways: Ways) -> None:
    leaves = tensors(40, 8, 16, 8)
    loss = linear_gelu_linear(*leaves, tier="triton", ways=ways).square().sum()  # type: ignore[arg-type]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))


def test_under_torch_compile_it_is_pytorchs_operators() -> None:
    torch._dynamo.reset()
    block = FeedForward(8, 16, tier="triton")
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(x), nn.Sequential.forward(block, x))


def test_what_is_compiled_has_autocasts_dtype_in_its_graph() -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled, leaves = torch.compile(linear_gelu_linear, fullgraph=True, backend=backend), tensors(4, 8, 16, 8)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            y = compiled(*leaves)
        assert y.dtype == dtype
        assert f"to(torch.{str(dtype).removeprefix('torch.')})" in graphs[-1]
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(4, 7)}, "x (..., in), weight (hidden, in), bias (hidden,)"),
        ({"weight_2": torch.zeros(8, 15)}, "these are x (4, 8), weight (16, 8), bias (16,), weight_2 (8, 15), bias_2"),
        ({"bias": torch.zeros(15)}, "bias (15,)"),
        ({"x": torch.zeros(4, 8).long()}, "of torch.int64"),
        ({"weight": torch.zeros(16, 8, device="meta")}, "on one device; these are x on cpu, weight on meta"),
        ({"approximate": "tan"}, "GELU has no form 'tan'; did you mean 'tanh'?"),
        ({"tier": "tritn"}, "there is no tier 'tritn'; did you mean 'triton'?"),
        ({"tier": "triton", "x": torch.zeros(4, 8).half()}, "takes tensors of one dtype, torch.float16"),
        ({"tier": "triton", "x": torch.zeros(4, 8).double()}, "these are torch.float32, torch.float64. tier='auto'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(4, 8), "weight": torch.zeros(16, 8), "bias": torch.zeros(16), "weight_2": torch.zeros(8, 16),
        "bias_2": torch.zeros(8),
    }  # fmt: skip
    with pytest.raises(OptimizationError) as caught:
        linear_gelu_linear(**(arguments | change))
    assert str(caught.value).startswith("gemm_gelu: ")
    assert words in str(caught.value)
