"""gemm_relu against its reference in float64, by every way; what autograd may ask of it; and where it is put."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasttrain.callbacks.gemm_relu import (
    FusedMLP,
    MLPPatches,
    fused_mlp,
    linear_relu_chain,
)
from fasttrain.callbacks.gemm_relu.modules import Chain, parts
from fasttrain.callbacks.gemm_relu.reference import TOLERANCE, reference
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change
from fasttrain.patches import PatchSurgery

pytest.importorskip("triton")
from fasttrain.callbacks.gemm_relu import in_triton
from fasttrain.callbacks.gemm_relu.kernel import INTERPRETED
from fasttrain.callbacks.gemm_relu.layers import Kind, Ways, kinds

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
WAYS = {
    "default": Ways(),
    "products only": Ways(narrow=False, cast="foreach", float32_gradients=False, side_stream=False),
    "epilogue": Ways(mask="epilogue", data_gradient_first=True),
}


def whole_numbers(widths: Sequence[int], rows: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return a chain whose activations and their gradients 16 bits hold exactly, so that no rounding decides a ReLU."""
    x = torch.randint(-2, 3, (rows, widths[0]), device=DEVICE).float()
    weights, biases = [], []
    for inputs, outputs in pairwise(widths):
        weight = torch.zeros(outputs, inputs, device=DEVICE)
        for factor, shift in ((1, 0), (7, 3)):
            i = torch.arange(outputs, device=DEVICE)
            weight[i, (factor * i + shift) % inputs] = torch.randint(0, 2, (outputs,), device=DEVICE) * 2.0 - 1
        weights.append(weight)
        biases.append(torch.randint(-1, 2, (outputs,), device=DEVICE).float())
    return x, weights, biases


def leaf(tensor: Tensor, wanted: bool = True) -> Tensor:
    return tensor.detach().clone().requires_grad_(wanted)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def assert_equals_reference(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], relu_last: bool, autocast: torch.dtype | None,
    wants_dx: bool, ways: Ways | None = None, tier: Any = "fused",
) -> None:  # fmt: skip
    """Values and all gradients, in the dtypes that they must have."""
    x = leaf(x, wants_dx)
    weights, biases = [leaf(w) for w in weights], [leaf(b) for b in biases]
    with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
        y = linear_relu_chain(x, weights, biases, relu_last, tier, ways)
    assert y.dtype == (autocast or x.dtype)
    xd = leaf(x.double(), wants_dx)
    wd, bd = [leaf(w.double()) for w in weights], [leaf(b.double()) for b in biases]
    yd = reference(xd, wd, bd, relu_last)
    tolerance = TOLERANCE[y.dtype]
    assert_close(y.detach(), yd.detach(), tolerance)
    dy = torch.randint(-2, 3, y.shape, device=DEVICE)
    leaves, exact = [*weights, *biases, *([x] if wants_dx else [])], [*wd, *bd, *([xd] if wants_dx else [])]
    found = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    for one, other, wanted in zip(found, leaves, torch.autograd.grad(yd, exact, dy.double()), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, wanted, tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [None, torch.float16], ids=str)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 40), inputs=st.one_of(st.integers(1, 40), st.sampled_from([13, 31, 32])),
    hidden=st.lists(st.one_of(st.integers(1, 20), st.sampled_from([8, 16, 40])), max_size=3),
    outputs=st.one_of(st.just(1), st.integers(1, 24)),
    relu_last=st.booleans(), wants_dx=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    way: str, autocast: torch.dtype | None, rows: int, inputs: int, hidden: list[int], outputs: int, relu_last: bool,
    wants_dx: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    chain = whole_numbers([inputs, *hidden, outputs], rows)
    assert_equals_reference(*chain, relu_last, autocast, wants_dx, WAYS[way])


def test_which_layers_have_kernels_of_their_own() -> None:
    def of(*widths: int, relu_last: bool = False, dx: bool = False, dtype: torch.dtype = torch.float32) -> str:
        weights = [torch.empty(o, i, dtype=dtype) for i, o in pairwise(widths)]
        x = torch.empty(2, widths[0], dtype=dtype)
        found = kinds(x, weights, relu_last, dtype, Ways(), x_needs_gradient=dx)
        return ", ".join(kind.value for kind in found)

    assert of(13, 8, 4, relu_last=True) == "narrow in, product"
    assert of(480, 8, 4, 1) == "product, product, narrow out"
    assert of(13, 8, 1) == "narrow in, narrow out"
    assert of(13, 8, 1, relu_last=True) == "narrow in, product"
    assert of(13, 8, 4, dx=True) == "product, product", "there is no kernel for the gradient of its input"
    assert of(32, 8, relu_last=True) == "product"
    assert of(13, 8) == "product", "without a ReLU"
    assert of(13, 1) == "product"
    assert of(13, 8, 1, dtype=torch.float64) == "product, product"
    assert kinds(torch.empty(1, 2), [torch.empty(3, 2)], True, torch.float32, Ways(narrow=False), False) == [
        Kind.PRODUCT
    ]


def test_off_a_gpu_it_is_pytorch_and_float64_is_differentiated_twice() -> None:
    torch.manual_seed(0)
    x, w, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (5, 3), (1, 5)))
    b, c = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (5, 1))

    def chain(x: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return linear_relu_chain(x, [w, v], [b, c], relu_last=False)

    assert torch.autograd.gradcheck(chain, (x, w, v, b, c))
    assert torch.autograd.gradgradcheck(chain, (x, w, v, b, c))
    with torch.autocast("cpu", torch.bfloat16):
        assert chain(x, w, v, b, c).dtype == torch.float64, "autocast leaves it alone"


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, weights, biases = whole_numbers((4, 8, 3), 5)
    x = leaf(x)
    y = linear_relu_chain(x, weights, biases, tier="fused")
    with pytest.raises(OptimizationError, match=r"^gemm_relu: a gradient that can be differentiated again .*create_gr"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (0, 6), (2, 0, 6)])
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    _, weights, biases = whole_numbers((6, 8, 3), 1)
    assert_equals_reference(torch.randint(-2, 3, shape, device=DEVICE).float(), weights, biases, True, None, True)


def test_not_contiguous_and_expanded() -> None:
    x, weights, biases = whole_numbers((6, 8, 3), 10)
    assert_equals_reference(x.repeat(2, 2)[::2, ::2], weights, biases, True, torch.float16, True)
    assert_equals_reference(x.repeat(2, 2)[::2, ::2], weights, biases, True, None, False)
    transposed = [leaf(w.t().contiguous()).t() for w in weights]
    assert_equals_reference(x, transposed, biases, True, torch.float16, True)
    inputs = [leaf(t) for t in (x, *weights, *biases)]
    y = linear_relu_chain(inputs[0], inputs[1:3], inputs[3:], tier="fused")
    found = torch.autograd.grad(y.sum(), inputs)  # the gradient of a sum has strides of 0
    wanted = torch.autograd.grad(reference(inputs[0], inputs[1:3], inputs[3:]).sum(), inputs)
    torch.testing.assert_close(found, wanted)


def test_a_weight_used_twice() -> None:
    torch.manual_seed(0)
    x, (weight,), (bias,) = whole_numbers((8, 8), 10)
    w, b, wd, bd = leaf(weight), leaf(bias), leaf(weight.double()), leaf(bias.double())
    y = linear_relu_chain(linear_relu_chain(x, [w, w], [b, b], tier="fused"), [w], [b], tier="fused")
    yd = reference(reference(x.double(), [wd, wd], [bd, bd]), [wd], [bd])
    for found, wanted in zip(
        torch.autograd.grad(y.sum(), [w, b]), torch.autograd.grad(yd.sum(), [wd, bd]), strict=True
    ):
        assert_close(found, wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("trains", [{0}, {1}, {2}, {3}, {4}, {5}, {0, 3}, {2, 5}, {1, 4}])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_do_not_train(way: str, trains: set[int]) -> None:
    x, weights, biases = whole_numbers((16, 8, 8, 1), 10)
    parameters = [p for pair in zip(weights, biases, strict=True) for p in pair]
    leaves = [leaf(p, i in trains) for i, p in enumerate(parameters)]
    with torch.autocast(DEVICE, torch.float16):
        y = linear_relu_chain(x, leaves[0::2], leaves[1::2], False, "fused", WAYS[way])
    y.float().sum().backward()
    exact = [leaf(p.double(), i in trains) for i, p in enumerate(parameters)]
    reference(x.double(), exact[0::2], exact[1::2], False).sum().backward()
    for one, other in zip(leaves, exact, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_close(one.grad, other.grad, TOLERANCE[torch.float16])


def test_parameters_of_16_bits() -> None:
    x, weights, biases = whole_numbers((13, 8, 16, 1), 10)
    half = [[t.half() for t in tensors] for tensors in ([x], weights, biases)]
    assert_equals_reference(half[0][0], half[1], half[2], False, None, False)
    assert_equals_reference(half[0][0], half[1], half[2], False, None, True)


def test_without_gradients_it_is_the_same() -> None:
    x, weights, biases = whole_numbers((13, 8, 16, 1), 10)
    with torch.no_grad(), torch.autocast(DEVICE, torch.float16):
        y = linear_relu_chain(x, [leaf(w) for w in weights], biases, False, "fused")
    assert y.grad_fn is None
    assert torch.equal(y.float(), reference(x, weights, biases, False))


def test_an_output_that_is_changed_in_place_is_noticed() -> None:
    x, weights, biases = whole_numbers((4, 8, 3), 5)
    y = linear_relu_chain(leaf(x), weights, biases, tier="fused")
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_stays_none(way: str) -> None:
    """A loss scaler has to see it."""
    x, weights, biases = whole_numbers((16, 8, 8, 1), 10)
    weights[0] = leaf(weights[0])
    with torch.autocast(DEVICE, torch.float16):
        y = linear_relu_chain(x, weights, biases, False, "fused", WAYS[way])
    (dw,) = torch.autograd.grad(y, weights[0], torch.full_like(y, float("nan")))
    assert dw.isnan().any()
    x[0, 0] = float("nan")
    assert linear_relu_chain(x, weights, biases, False, "fused", WAYS[way])[0].isnan().all()


def test_kernels_of_several_tiles() -> None:
    torch.manual_seed(0)
    tiling = in_triton.Tiling(
        cast_block=128, in_rows=16, in_columns=16, in_backward_rows=16, in_backward_columns=16, in_backward_shares=3,
        in_fold_columns=32, out_elements=64, out_programs=3, product_rows=16, product_columns=16, product_depth=16,
        product_group=2,
    )  # fmt: skip
    x, (w,), (b,) = whole_numbers((13, 21), 70)
    for found, wanted in zip(in_triton.cast([x, w, b], torch.float16, tiling), (x, w, b), strict=True):
        assert found.dtype == torch.float16
        assert torch.equal(found.float(), wanted)
    y = in_triton.narrow_in(x, w, b, torch.float16, tiling)
    assert torch.equal(y.float(), reference(x, [w], [b]))
    g = torch.randint(-2, 3, y.shape, device=DEVICE).half()
    dw, db = torch.empty_like(w), torch.empty_like(b)
    for mask in (y, None):
        in_triton.narrow_in_backward(g, mask, x, dw, db, tiling)
        masked = g.float() if mask is None else g.float() * (y > 0)
        assert torch.equal(dw, masked.t() @ x)
        assert torch.equal(db, masked.sum(0))
    v = torch.randint(-1, 2, (1, 21), device=DEVICE).float()
    c = torch.ones(1, device=DEVICE)
    assert torch.equal(in_triton.narrow_out(y, v, c, tiling).float(), y.float() @ v.t() + c)
    g = g[:, :1].contiguous()
    masked, shares = in_triton.narrow_out_backward(g, y, v, tiling)
    wanted = g.float() @ v * (y > 0)
    assert torch.equal(masked.float(), wanted)
    sums = shares.sum(0).split((21, 21, 1))
    for found, exact in zip(sums, (g.float().t() @ y.float(), wanted.sum(0), g.float().sum(0)), strict=True):
        assert torch.equal(found, exact.flatten())


def test_a_product_with_a_mask_in_its_epilogue() -> None:
    tiling = in_triton.Tiling(product_rows=16, product_columns=16, product_depth=16, product_group=2)
    g, w, y = (torch.randint(-2, 3, shape, device=DEVICE).half() for shape in ((75, 40), (40, 24), (75, 24)))
    assert in_triton.can_multiply(g, w, y)
    masked, shares = in_triton.masked_product(g, w, y, tiling)
    wanted = g.float() @ w.float() * (y > 0)
    assert torch.equal(masked.float(), wanted)
    assert torch.equal(shares.sum(0), wanted.sum(0))
    assert not in_triton.can_multiply(g, w[:, :20].contiguous(), y[:, :20].contiguous())
    assert not in_triton.can_multiply(g.float(), w.float(), y.float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": []}, r"one or more layers, each with a weight and a bias; these are 0 weights and 2 biases"),
        ({"x": torch.zeros(2, 5)}, r"layer 0 has 5 inputs, so its weight is \(N, 5\) .* these are \(8, 4\) and \(8,\)"),
        ({"biases": [torch.zeros(8), torch.zeros(8)]}, r"layer 1 has 8 inputs, .* these are \(3, 8\) and \(8,\)"),
        ({"x": torch.zeros(2, 4).half()}, r"outside of autocast .* these are torch.float16 and torch.float32. Cast th"),
        ({"x": torch.zeros(2, 4).long()}, r"floating point; these are torch.float32 and torch.int64"),
        ({"x": torch.zeros(2, 4, device="meta")}, r"x is on meta, and layer 0 on cpu; move one to the other"),
        ({"tier": "fuse"}, r"there is no tier 'fuse'; did you mean 'fused'\?"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(2, 4), "weights": [torch.zeros(8, 4), torch.zeros(3, 8)],
                 "biases": [torch.zeros(8), torch.zeros(3)], **change}  # fmt: skip
    with pytest.raises(OptimizationError, match=rf"^gemm_relu: .*{words}"):
        linear_relu_chain(**arguments)


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


class OwnLinear(nn.Linear):
    pass


def test_a_sequential_is_cut_into_chains() -> None:
    def of(*children: nn.Module) -> str:
        texts = []
        for part in parts(children):
            if isinstance(part, Chain):
                texts.append(f"{len(part.layers)}{'+' if part.relu_last else '-'}")
            else:
                texts.append(type(part).__name__)
        return " ".join(texts)

    linear, relu = nn.Linear(3, 3), nn.ReLU()
    assert of(linear, relu, linear, relu) == "2+"
    assert of(linear, relu, linear, nn.Sigmoid()) == "2- Sigmoid"
    assert of(linear, linear, relu) == "Linear 1+"
    assert of(linear, relu, linear, linear, relu, linear) == "2- 2-"
    assert of(linear, relu, nn.Dropout(), linear, relu, nn.Dropout(), linear) == "1+ Dropout 1+ Dropout Linear"
    assert of(relu, linear) == "ReLU Linear"
    assert of(linear, with_hook(nn.ReLU()), linear, relu) == "Linear ReLU 1+"
    assert of(nn.Linear(3, 3, bias=False), relu, OwnLinear(3, 3), relu) == "Linear ReLU OwnLinear ReLU"
    assert of() == ""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(inplace=True))
        self.top = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 1), nn.Sigmoid())
        self.head = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.top(self.bottom(x)))  # type: ignore[no-any-return]


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_surgery_keeps_numbers_and_names_and_can_be_undone() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 5)
    names, types, parameters = list(model.state_dict()), [type(m) for m in model.modules()], list(model.parameters())
    before = gradients(model, x)
    surgery = PatchSurgery(model, MLPPatches())
    assert surgery.apply() == [Change("bottom", "FusedMLP"), Change("top", "FusedMLP")]
    assert PatchSurgery(model, MLPPatches()).apply() == [], "a second time there is nothing left"
    torch.testing.assert_close(gradients(model, x), before)
    torch.testing.assert_close(gradients(copy.deepcopy(model), x), before)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    model.load_state_dict(Model().state_dict())
    Model().load_state_dict(model.state_dict())
    surgery.undo()
    assert [type(m) for m in model.modules()] == types


def through_the_fused_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.callbacks.gemm_relu.fused._takes_fused", lambda *_: True)


def test_a_model_through_the_fused_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Model().to(DEVICE), torch.randn(6, 5, device=DEVICE)
    before = gradients(model, x)
    PatchSurgery(model, MLPPatches()).apply()
    through_the_fused_chain(monkeypatch)
    torch.testing.assert_close(gradients(model, x), before, rtol=1e-4, atol=1e-6)


def test_a_hook_that_comes_later_is_called() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU())
    fused, x, seen = fused_mlp(plain), torch.randn(2, 3), []
    fused[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(fused(x), plain(x))
    assert len(seen) == 2
    assert type(fused[:2]) is FusedMLP


def test_a_sequential_used_twice_stays_one() -> None:
    mlp = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model = nn.ModuleDict({"a": mlp, "b": nn.Sequential(mlp, mlp)})
    surgery = PatchSurgery(model, MLPPatches())
    surgery.apply()
    assert type(model["a"]) is FusedMLP
    surgery.undo()
    assert model["a"] is mlp


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Conv2d(1, 1, 1), "Conv2d has no nn.Linear"),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.GELU())), "are: 1 with no ReLU behind it in a plain nn.Seq"),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())), "are: 1 without bias"),
        (nn.Sequential(nn.Sequential(OwnLinear(2, 2), nn.ReLU())), "are: 1 of class OwnLinear"),
        (nn.Sequential(nn.Sequential(with_hook(nn.Linear(2, 2)), nn.ReLU())), "are: 1 watched by hooks"),
        (nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), "are: 1 with no ReLU behind it"),
    ],
)
def test_what_can_not_be_fused_is_left_alone_with_a_reason(model: nn.Module, words: str) -> None:
    assert MLPPatches().sites(model) == []
    assert words in MLPPatches().why_no_site(model)


def test_torch_compile_takes_the_module_whole() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 5)
    PatchSurgery(model, MLPPatches()).apply()
    wanted = gradients(model, x)
    torch.testing.assert_close(gradients(torch.compile(model, backend="aot_eager", fullgraph=True), x), wanted)
