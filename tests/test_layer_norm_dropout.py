"""layer_norm_dropout against its reference in float64, in both tiers; its masks; and where it is put."""

import copy
import io
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.layer_norm_dropout import (
    DropoutAddLayerNorm,
    LayerNormDropoutPatches,
    draw_seed,
    dropout_add_layer_norm,
    keep_mask,
    twin,
)
from fasttrain.callbacks.layer_norm_dropout.mask import _philox, threshold
from fasttrain.callbacks.layer_norm_dropout.modules import DenseDropoutAddNorm, FusedTransformerEncoderLayer
from fasttrain.callbacks.layer_norm_dropout.reference import TOLERANCE, reference
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change
from fasttrain.patches import PatchSurgery

pytest.importorskip("triton")
from fasttrain.callbacks.layer_norm_dropout import in_triton
from fasttrain.callbacks.layer_norm_dropout.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])


class Work:
    """Inputs of a call, and its comparison with the reference."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, parameters: torch.dtype = torch.float32,
        without: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        hidden = shape[-1:]
        made = {
            "x": torch.randn(shape, device=DEVICE).to(dtype),
            "weight": (1 + torch.randn(hidden, device=DEVICE)).to(parameters),
            "bias": torch.randn(hidden, device=DEVICE).to(parameters),
            "residual": torch.randn(shape, device=DEVICE).to(dtype),
            "x_bias": torch.randn(hidden, device=DEVICE).to(parameters),
        }
        self.inputs = {name: None if name in without else t.requires_grad_() for name, t in made.items()}

    def ours(self, **options: Any) -> Tensor:
        return dropout_add_layer_norm(**self.inputs, **options)  # type: ignore[arg-type]

    def in_double(self, keep: Tensor | None, p: float) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = {name: None if t is None else t.detach().double().requires_grad_() for name, t in self.inputs.items()}
        return reference(**inputs, keep=keep, p=p), {name: t for name, t in inputs.items() if t is not None}  # type: ignore[arg-type]

    def gradients(self, y: Tensor, dy: Tensor) -> dict[str, Tensor]:
        leaves = {name: t for name, t in self.inputs.items() if t is not None and t.requires_grad}
        return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))

    def assert_equals_reference(self, p: float, tier: Any) -> None:
        x = self.inputs["x"]
        assert x is not None
        seed = draw_seed(DEVICE)
        found = self.ours(p=p, tier=tier, seed=seed)
        wanted, leaves = self.in_double(keep_mask(seed, x.shape, p) if p else None, p)
        assert found.dtype == x.dtype
        assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
        dy = torch.randn(x.shape, device=DEVICE).to(x.dtype)
        exact = torch.autograd.grad(wanted, list(leaves.values()), dy.double())
        for (name, gradient), one in zip(self.gradients(found, dy).items(), exact, strict=True):
            mine = self.inputs[name]
            assert mine is not None
            assert gradient.dtype == mine.dtype
            assert_close(gradient, one, max(TOLERANCE[x.dtype], TOLERANCE[gradient.dtype]), name)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, name: str = "") -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-6, name


# ---- the numbers


@both_tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(0, 7), hidden=st.one_of(st.integers(16, 40), st.sampled_from([64, 200])),
    without=st.frozensets(st.sampled_from(["weight", "bias", "residual", "x_bias"])),
    p=st.sampled_from([0.0, 0.1, 0.5]), narrow=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    tier: str, dtype: torch.dtype, rows: int, hidden: int, without: frozenset[str], p: float, narrow: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    parameters = torch.float16 if narrow and dtype == torch.float16 else torch.float32
    Work((rows, hidden), dtype, parameters, without).assert_equals_reference(p, tier)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("keep_normalized", [True, False])
def test_each_way_of_tiling_and_of_keeping(monkeypatch: pytest.MonkeyPatch, rows: int, keep_normalized: bool) -> None:
    torch.manual_seed(0)
    tile = in_triton.Tile(rows=rows)
    tiling = in_triton.Tiling(forward=tile, backward=tile, keep_normalized=keep_normalized)
    for function in (in_triton.forward, in_triton.backward, in_triton.keeps_normalized):
        monkeypatch.setattr(function, "__defaults__", (tiling,))
    Work((9, 24)).assert_equals_reference(0.25, "triton")


@both_tiers
def test_leading_dimensions_and_strides(tier: Any) -> None:
    torch.manual_seed(0)
    work = Work((2, 3, 12))
    assert work.inputs["x"] is not None
    assert work.inputs["residual"] is not None
    work.inputs["x"] = work.inputs["x"].detach().transpose(0, 1).requires_grad_()
    work.inputs["residual"] = (
        work.inputs["residual"].detach().repeat(1, 1, 2)[..., ::2].transpose(0, 1).requires_grad_()
    )
    assert not work.inputs["x"].is_contiguous()
    work.assert_equals_reference(0.5, tier)


@both_tiers
@pytest.mark.parametrize("wanted", ["x", "residual", "weight", "bias", "x_bias"])
def test_a_single_gradient(tier: Any, wanted: str) -> None:
    torch.manual_seed(0)
    work = Work((3, 10))
    seed, dy = draw_seed(DEVICE), torch.randn(3, 10, device=DEVICE)
    all_of_them = work.gradients(work.ours(p=0.3, seed=seed, tier=tier), dy)
    for name, tensor in work.inputs.items():
        assert tensor is not None
        tensor.requires_grad_(name == wanted)
    (alone,) = work.gradients(work.ours(p=0.3, seed=seed, tier=tier), dy).values()
    torch.testing.assert_close(alone, all_of_them[wanted])


def test_without_dropout_one_gradient_serves_both() -> None:
    work = Work((3, 10), without=frozenset({"x_bias"}))
    gradients = work.gradients(work.ours(tier="triton"), torch.randn(3, 10, device=DEVICE))
    assert gradients["x"].data_ptr() == gradients["residual"].data_ptr()
    x = torch.randn(3, 10, device=DEVICE, requires_grad=True)
    dropout_add_layer_norm(x, residual=x, tier="triton").square().sum().backward()
    leaf = x.detach().double().requires_grad_()
    reference(leaf, None, None, leaf).square().sum().backward()
    assert x.grad is not None
    assert leaf.grad is not None
    assert_close(x.grad, leaf.grad, 1e-4)


@both_tiers
def test_mixed_dtypes_and_autocast(tier: Any) -> None:
    torch.manual_seed(0)
    work = Work((3, 16), torch.float16)
    work.inputs["residual"] = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    assert work.ours(tier=tier).dtype == torch.float32
    with torch.autocast(DEVICE, torch.float16):
        y = work.ours(tier=tier)
    assert y.dtype == torch.float16, "F.layer_norm gives float32"
    assert_close(y.detach(), work.in_double(None, 0)[0].detach(), TOLERANCE[torch.float16])
    gradients = work.gradients(y, torch.randn_like(y))
    assert {name: g.dtype for name, g in gradients.items()} == {
        n: t.dtype for n, t in work.inputs.items() if t is not None
    }
    with torch.autocast(DEVICE, torch.float16):
        assert Work((2, 4), torch.float64, torch.float64).ours().dtype == torch.float64


def test_float64_is_differentiated_rightly_and_twice() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs += [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor) -> Tensor:
        seed = torch.tensor([3])
        return dropout_add_layer_norm(x, weight, bias, residual, p=0.25, x_bias=x_bias, seed=seed)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_a_second_derivative_is_refused() -> None:
    work = Work((2, 4))
    (y, x) = work.ours(tier="triton"), work.inputs["x"]
    with pytest.raises(OptimizationError, match=r"differentiated again .* tier='torch'\.$"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_shared_weight_used_twice() -> None:
    torch.manual_seed(0)
    work = Work((3, 8))
    weight, bias, dy = work.inputs["weight"], work.inputs["bias"], torch.randn(3, 8, device=DEVICE)

    def twice(tier: Any) -> tuple[Tensor, ...]:
        y = dropout_add_layer_norm(work.ours(tier=tier), weight, bias, tier=tier)
        return torch.autograd.grad(y, [weight, bias, work.inputs["x"]], dy)  # type: ignore[list-item]

    for found, wanted in zip(twice("triton"), twice("torch"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@both_tiers
def test_rows_of_one_element_are_the_bias(tier: Any) -> None:
    work = Work((3, 1))
    y = work.ours(tier=tier)
    assert torch.equal(y, work.inputs["bias"].expand(3, 1))  # type: ignore[union-attr]
    assert not work.gradients(y, torch.ones_like(y))["x"].any()


def test_large_values_do_not_spoil_the_variance() -> None:
    x = torch.randn(4, 64, device=DEVICE) + 1000
    y = dropout_add_layer_norm(x, tier="triton")
    assert_close(y, reference(x.double(), None, None), 1e-4)


# ---- the mask


def test_philox_gives_the_known_answers() -> None:
    """Of its authors' Random123: zeros for counter and key, by number of rounds."""
    answers = {
        7: [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        10: [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    }
    for rounds, words in answers.items():
        assert [int(word) for word in _philox(torch.zeros(1, dtype=torch.int64), 1, 1, rounds)] == words


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_p_and_elements_are_independent(p: float) -> None:
    torch.manual_seed(0)
    shape = (512, 1000)
    seed = draw_seed("cpu")
    # One seed and the next one, another call, and a neighbour in each direction.
    masks = [keep_mask(s, shape, p) for s in (seed, seed + 1, draw_seed("cpu"))]
    masks += [masks[0].roll(1, 0), masks[0].roll(1, 1), masks[0].roll(2, 1), masks[0].roll(8, 1)]
    count = masks[0].numel()
    for mask in masks[:3]:
        assert abs(float((~mask).sum()) - p * count) < 5 * (p * (1 - p) * count) ** 0.5
    both = p**4 + 2 * (p * (1 - p)) ** 2 + (1 - p) ** 4  # the share that agrees has this one's variance at most
    assert both < 1
    for other in masks[1:]:
        agreeing = float((masks[0] == other).sum()) / count
        assert abs(agreeing - (p**2 + (1 - p) ** 2)) < 5 * (0.25 / count) ** 0.5
    by_row, by_column = ((~masks[0]).double().mean(dim) for dim in (1, 0))
    for rates, size in ((by_row, shape[1]), (by_column, shape[0])):
        assert float(rates.std()) == pytest.approx((p * (1 - p) / size) ** 0.5, rel=0.15)


def test_thresholds() -> None:
    assert [threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 32768, 65536]
    assert keep_mask(torch.tensor([5]), (3, 5), 0.0).all()
    assert not keep_mask(torch.tensor([5]), (3, 5), 1.0).any()
    assert keep_mask(torch.tensor([5]), (2, 3, 5), 0.5).shape == (2, 3, 5)


def test_the_gradient_is_scaled_where_kept_and_zero_where_not() -> None:
    work, seed = Work((5, 32)), draw_seed(DEVICE)
    gradients = work.gradients(work.ours(p=0.2, seed=seed, tier="triton"), torch.randn(5, 32, device=DEVICE))
    keep = keep_mask(seed, (5, 32), 0.2)
    torch.testing.assert_close(gradients["x"], gradients["residual"] * keep / 0.8)
    assert 0 < int(keep.sum()) < keep.numel()


@both_tiers
def test_everything_dropped_leaves_the_residual(tier: Any) -> None:
    work = Work((3, 8), without=frozenset({"weight", "bias"}))
    y, residual = work.ours(p=1.0, tier=tier), work.inputs["residual"]
    assert residual is not None
    torch.testing.assert_close(y, F.layer_norm(residual, (8,)), rtol=1e-5, atol=1e-5)
    assert not work.gradients(y, torch.randn_like(y))["x"].any()


@both_tiers
def test_another_mask_at_each_call_and_the_same_after_manual_seed(tier: Any) -> None:
    work = Work((4, 16))
    torch.manual_seed(3)
    first, second = work.ours(p=0.5, tier=tier), work.ours(p=0.5, tier=tier)
    torch.manual_seed(3)
    assert torch.equal(work.ours(p=0.5, tier=tier), first)
    assert not torch.equal(first, second)


@both_tiers
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_draws_the_same_mask(tier: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    work, dy = Work((4, 16)), torch.randn(4, 16, device=DEVICE)

    def call(x: Tensor) -> Tensor:
        return dropout_add_layer_norm(x, work.inputs["weight"], None, x, p=0.5, tier=tier, twice=True) * 2

    found = []
    for run in (call, lambda x: checkpoint(call, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        y: Any = run(work.inputs["x"])  # type: ignore[arg-type]
        assert work.inputs["weight"] is not None
        work.inputs["weight"].grad = None
        y.backward(dy)
        found.append((y.detach(), work.inputs["weight"].grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_seed_gives_both_tiers_the_same_mask() -> None:
    work, seed = Work((4, 24)), draw_seed(DEVICE)
    torch.testing.assert_close(work.ours(p=0.5, seed=seed, tier="triton"), work.ours(p=0.5, seed=seed, tier="torch"))


# ---- twins


@both_tiers
def test_a_twin_has_a_gradient_of_its_own(tier: Any) -> None:
    torch.manual_seed(0)
    work, seed = Work((3, 8)), draw_seed(DEVICE)
    one, other = torch.randn(2, 3, 8, device=DEVICE)
    y = work.ours(p=0.5, seed=seed, tier=tier, twice=True)
    assert torch.equal(twin(y), y)
    assert (twin(y) is y) == (tier == "torch")
    x = work.inputs["x"]
    assert x is not None
    torch.autograd.backward([y, twin(y).view_as(y)], [one, other])
    torch.testing.assert_close(x.grad, work.gradients(work.ours(p=0.5, seed=seed, tier=tier), one + other)["x"])
    y = work.ours(tier=tier, twice=True)
    y.mul_(2)
    assert twin(y) is y, "its history is another one now"
    alone = work.ours(p=0.5, seed=seed, tier=tier, twice=True)
    torch.autograd.grad(twin(alone), x, one)


# ---- refusals


def test_what_is_refused() -> None:
    x, h = torch.randn(2, 4), torch.randn(4)
    refused: list[tuple[Callable[[], Tensor], str]] = [
        (lambda: dropout_add_layer_norm(x.int()), r"floating point .* this is torch\.int32 of \(2, 4\)\."),
        (lambda: dropout_add_layer_norm(x[:, :0]), r"this is torch\.float32 of \(2, 0\)\."),
        (lambda: dropout_add_layer_norm(x, p=1.5), r"from 0 to 1; it is 1\.5\."),
        (lambda: dropout_add_layer_norm(x, residual=h), r"\(2, 4\) on cpu; this is \(4,\) on cpu\."),
        (lambda: dropout_add_layer_norm(x, h[:3]), r"weight has one value for each of the 4 .* shape \(3,\) on cpu\."),
        (lambda: dropout_add_layer_norm(x, bias=x), r"bias has one value"),
        (lambda: dropout_add_layer_norm(x, x_bias=x), r"x_bias has one value"),
        (lambda: dropout_add_layer_norm(torch.randn(1, 8193), tier="triton"), r"rows of 8193 .* up to 8192 in float16"),
        (lambda: dropout_add_layer_norm(x.double(), tier="triton"), r"4 elements with float64 on cpu"),
    ]
    for call, message in refused:
        with pytest.raises(OptimizationError, match=f"^layer_norm_dropout: .*{message}"):
            call()
    assert dropout_add_layer_norm(torch.randn(1, 8193)).shape == (1, 8193), "auto takes PyTorch's operators"


# ---- modules and sites


class BertSelfOutput(nn.Module):
    """As Hugging Face's."""

    def __init__(self, hidden: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.LayerNorm(hidden_states + input_tensor)  # type: ignore[no-any-return]


class OtherOrder(BertSelfOutput):
    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(torch.add(residual, self.dropout(x)))  # type: ignore[no-any-return]


class DropsAfterwards(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states) + input_tensor))  # type: ignore[no-any-return]


class DoesMore(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return super().forward(hidden_states, input_tensor) * 2


class Branches(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return super().forward(hidden_states, input_tensor) if hidden_states.sum() > 0 else input_tensor


class Subtracts(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(operator.sub(self.dropout(hidden_states), input_tensor))  # type: ignore[no-any-return]


class Scales(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(torch.add(self.dropout(hidden_states), input_tensor, alpha=2))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers' ends, the second fed by the first."""

    def __init__(self, kind: type[BertSelfOutput] = BertSelfOutput, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = kind(p=p), kind(p=p)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, x)
        return self.second(hidden_states=x.tanh(), input_tensor=x)  # type: ignore[no-any-return]


def paths(model: nn.Module) -> list[str]:
    return [site.path for site in LayerNormDropoutPatches().sites(model)]


def results(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    y = model(*inputs, **named)
    torch.manual_seed(9)
    y.backward(torch.randn_like(y))
    return {"": y.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(params=["torch", "triton"])
def tier_of_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Modules take the best tier for the device; here each of them in turn."""
    from fasttrain.callbacks.layer_norm_dropout import modules

    def call(*arguments: Any, **options: Any) -> Tensor:
        return dropout_add_layer_norm(*arguments, tier=request.param, **options)

    monkeypatch.setattr(modules, "dropout_add_layer_norm", call)
    return str(request.param)


def test_outputs_like_berts_are_replaced_and_put_back(tier_of_modules: str) -> None:
    torch.manual_seed(0)
    model, x = Model().to(DEVICE), torch.randn(2, 3, 16, device=DEVICE)
    wanted, names, first = results(model, x), list(model.state_dict()), model.first
    surgery = PatchSurgery(model, LayerNormDropoutPatches())
    assert surgery.apply() == [Change("first", "DenseDropoutAddNorm"), Change("second", "DenseDropoutAddNorm")]
    assert_same(results(model, x), wanted)
    assert list(model.state_dict()) == names
    assert model.first.dense is first.dense
    assert_same(results(copy.deepcopy(model), x), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_same(results(torch.load(buffer, weights_only=False), x), wanted)
    assert paths(model) == [], "fused already"
    surgery.undo()
    assert model.first is first
    assert_same(results(model, x), wanted)


def test_the_end_of_an_output_alone_is_what_follows_dense() -> None:
    model, (x, z) = Model(), torch.randn(2, 3, 16)
    wanted = model.first(x, z)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    end: Any = model.first.end
    torch.testing.assert_close(end(model.first.dense(x), z), wanted, rtol=1e-4, atol=1e-5)


def test_hooks_inside_are_still_called() -> None:
    model, x, seen = Model(), torch.randn(3, 16), list[str]()
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    wanted = results(model, x)
    model.first.dense.register_forward_hook(lambda *_: seen.append("dense"))
    model.first.register_forward_hook(lambda *_: seen.append("first"))
    assert_same(results(model, x), wanted)
    assert seen == ["dense", "first"]


def test_other_names_and_orders_are_seen_and_other_forwards_are_left() -> None:
    model = Model(OtherOrder)
    x, z = torch.randn(2, 3, 16)
    wanted = model.first(z, x)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert isinstance(model.first, DenseDropoutAddNorm)
    torch.testing.assert_close(model.first(z, x=x), wanted, rtol=1e-4, atol=1e-5)
    for kind in (DropsAfterwards, DoesMore, Branches, Subtracts, Scales):
        assert paths(Model(kind)) == [], kind
    model = Model()
    model.first.LayerNorm.register_forward_hook(lambda *_: None)
    model.second.LayerNorm = nn.LayerNorm((2, 16))
    assert paths(model) == []
    wide = Model(lambda p: BertSelfOutput(8193))  # type: ignore[arg-type]
    assert paths(wide) == []


def test_a_module_at_two_paths_stays_shared() -> None:
    model = Model()
    model.second = model.first
    assert paths(model) == ["first", "second"]
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert model.second is model.first


def encoder(p: float = 0.0, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=p, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor="norm_first" not in options).to(DEVICE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masks", ["none", "padding", "causal"])
def test_pytorchs_encoder(tier_of_modules: str, masks: str) -> None:
    model, x = encoder(activation="gelu"), torch.randn(2, 5, 16, device=DEVICE)
    named: dict[str, Any] = {}
    if masks == "padding":
        named["src_key_padding_mask"] = torch.arange(5, device=DEVICE) >= torch.tensor([[3], [5]], device=DEVICE)
    elif masks == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(5, device=DEVICE)
        named |= {"mask": mask, "is_causal": True}
    wanted = results(model, x, **named)
    plain = model.eval()(x, **named)
    with torch.no_grad():
        fast = model(x, **named)
    surgery = PatchSurgery(model.train(), LayerNormDropoutPatches())
    assert surgery.apply() == [Change(f"layers.{i}", "FusedTransformerEncoderLayer") for i in range(2)]
    assert_same(results(model, x, **named), wanted)
    assert torch.equal(model.eval()(x, **named), plain)
    with torch.no_grad():
        assert torch.equal(model(x, **named), fast), "the fast path is taken as before"
    surgery.undo()
    assert type(model.layers[0]) is nn.TransformerEncoderLayer


def test_pytorchs_encoder_without_biases_or_batch_first(tier_of_modules: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, bias=False)).to(DEVICE)
    x = torch.randn(5, 2, 8, device=DEVICE)
    wanted = results(model, x)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert_same(results(model, x), wanted)


def test_rates_and_modes_are_those_of_the_dropouts(tier_of_modules: str) -> None:
    model, x = Model(p=0.5).to(DEVICE), torch.randn(6, 16, device=DEVICE)
    plain = model.eval()(x)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    model.train()
    assert not torch.equal(model(x), model(x))
    model.first.dropout.p = model.second.dropout.p = 0.0
    assert torch.equal(model(x), model(x))


def test_reasons() -> None:
    def reason(model: nn.Module) -> str:
        assert paths(model) == []
        return LayerNormDropoutPatches().why_no_site(model)

    assert reason(nn.Linear(2, 2)) == "Linear has no nn.LayerNorm to fuse dropout and a residual addition with"
    assert reason(nn.LayerNorm(3)).startswith("LayerNorm has 1 nn.LayerNorm, but neither an nn.TransformerEncoderLayer")
    assert reason(encoder(norm_first=True)).endswith(
        "; 2 nn.TransformerEncoderLayer: norm_first=True, where no normalization follows the addition alone"
    )
    model = encoder()
    model.layers[0].norm2 = nn.Identity()
    model.layers[1].dropout1 = nn.AlphaDropout()
    assert "; 1 nn.TransformerEncoderLayer: Identity(), where an nn.LayerNorm of up to 8192 elements" in reason(model)
    assert "; 1 nn.TransformerEncoderLayer: AlphaDropout(p=0.5, inplace=False), where an nn.Dropout" in reason(model)
    assert reason(nn.TransformerEncoderLayer(4, 1)).endswith("the model itself, which can't be replaced")


def test_the_module_is_a_layer_norm_with_more_inputs(tier_of_modules: str) -> None:
    torch.manual_seed(0)
    plain, module = nn.LayerNorm(12).to(DEVICE), DropoutAddLayerNorm(12, p=0.25).to(DEVICE)
    nn.init.normal_(plain.weight)
    module.load_state_dict(plain.state_dict())
    x, z, b = torch.randn(3, 12, device=DEVICE), torch.randn(3, 12, device=DEVICE), torch.randn(12, device=DEVICE)
    assert repr(module) == "DropoutAddLayerNorm((12,), eps=1e-05, elementwise_affine=True, bias=True, p=0.25)" or (
        repr(module) == "DropoutAddLayerNorm((12,), eps=1e-05, elementwise_affine=True, p=0.25)"
    )
    assert not torch.equal(module(x), module(x))
    module.eval()
    torch.testing.assert_close(module(x), plain(x))
    torch.testing.assert_close(module(x, z, b), plain(x + z + b))
    without = DropoutAddLayerNorm(12, elementwise_affine=False).to(DEVICE).eval()
    torch.testing.assert_close(without(x, z), F.layer_norm(x + z, (12,)))


@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_it_is_pytorchs_operators(autocast: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = Model()
    if autocast:
        model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), DropoutAddLayerNorm(16, p=0.0))
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    x = torch.randn(2, 5, 16)

    def run(call: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = call(x)
        y.float().sum().backward()
        return y  # type: ignore[no-any-return]

    wanted = run(model)
    found = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 if autocast else 1e-5)


# ---- the doors


def test_the_fused_layer_is_still_pytorchs() -> None:
    assert issubclass(FusedTransformerEncoderLayer, nn.TransformerEncoderLayer), "nn.TransformerEncoder asks for it"
