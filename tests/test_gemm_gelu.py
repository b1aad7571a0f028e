"""gemm_gelu against its reference in float64, in both tiers; what autograd may ask of it; and where it is put."""

import copy
import dataclasses
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.vision_transformer import MLPBlock

from fasttrain.callbacks.gemm_gelu import (
    FeedForward,
    FeedForwardPatches,
    FusedGemmGELU,
    FusedSequential,
    GemmGELUConfig,
    GemmGELUOptimization,
    linear_gelu_linear,
)
from fasttrain.callbacks.gemm_gelu.feed_forward import WAYS
from fasttrain.callbacks.gemm_gelu.form import ERF_OF_DEGREE_2, ERF_OF_DEGREE_4, TANH, Form
from fasttrain.callbacks.gemm_gelu.reference import TOLERANCE, reference
from fasttrain.callbacks.gemm_gelu.ways import Ways
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, Refuses
from fasttrain.patches import PatchSurgery

pytest.importorskip("triton")
from fasttrain.callbacks.gemm_gelu import in_triton, tiling
from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])
BOTH_WAYS = (Ways(gelu="pass"), Ways(gelu="epilogue"))
both_ways = pytest.mark.parametrize("ways", BOTH_WAYS, ids=str)
both_forms = pytest.mark.parametrize("form", ["none", "tanh"])
DTYPES = [torch.float32, torch.float16] if INTERPRETED.value else [torch.float16, torch.bfloat16]
SMALL = tiling.Tiling(rows=32, columns=32, depth=16, group=2)

# The interpreter says of numpy that exp2 has overflowed, which is what makes a sigmoid 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "FORWARD", SMALL)
    monkeypatch.setattr(in_triton, "BACKWARD", dataclasses.replace(SMALL, group=0))
    monkeypatch.setattr(in_triton, "PASS", tiling.PassTiling(elements=256))
    monkeypatch.setattr(tiling, "BY_POINTERS", SMALL)


def tensors(
    tokens: int, width: int, hidden: int, out: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> list[Tensor]:
    """Return x, weight, bias, weight_2, bias_2; both biases if any."""
    torch.manual_seed(0)
    shapes = ((tokens, width), (hidden, width), (hidden,), (out, hidden), (out,))
    made = [torch.randn(shape, device=DEVICE).to(dtype) * (shape[-1] ** -0.5 if at else 1)
            for at, shape in enumerate(shapes)]  # fmt: skip
    return [tensor.detach().requires_grad_() for tensor in made] if bias else [
        *(made[at].detach().requires_grad_() for at in (0, 1, 3))]  # fmt: skip


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def assert_equals_reference(leaves: list[Tensor], form: Any, tier: Any, ways: Ways = WAYS) -> None:
    """Values and all gradients; leaves are five, or three without biases."""
    x, weight, *rest = leaves
    arguments = (x, weight, *rest) if len(rest) == 3 else (x, weight, None, rest[0], None)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    double = {id(leaf): one for leaf, one in zip(leaves, exact, strict=True)}
    found = linear_gelu_linear(*arguments, form, tier, ways=ways)  # type: ignore[arg-type]
    wanted = reference(*(None if a is None else double[id(a)] for a in arguments), form)  # type: ignore[arg-type]
    tolerance = TOLERANCE[x.dtype]
    assert found.dtype == x.dtype
    assert_close(found.detach(), wanted.detach(), tolerance)
    dy = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, dy)
    for gradient, one in zip(gradients, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient, one, tolerance)


@pytest.mark.parametrize(("tier", "ways"), [("torch", WAYS), *(("triton", ways) for ways in BOTH_WAYS)], ids=str)
@both_forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=4, deadline=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    tokens=st.integers(0, 70), width=st.integers(1, 40), hidden=st.integers(1, 70), out=st.integers(1, 20),
    bias=st.booleans(), multiple=st.sampled_from([1, 8]),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    small_tiles: None, tier: str, ways: Ways, form: str, dtype: torch.dtype, tokens: int, width: int, hidden: int,
    out: int, bias: bool, multiple: int,
) -> None:  # fmt: skip
    widths = (-(-size // multiple) * multiple for size in (width, hidden, out))  # multiples go by descriptors
    assert_equals_reference(tensors(tokens, *widths, dtype, bias), form, tier, ways)


@pytest.mark.parametrize(
    ("parts", "programs", "group", "rows"), [(1, 1, 3, 16), (2, 0, 3, 16), (4, 1, 3, 16), (1, 0, 0, 16), (2, 1, 0, 128),
                                             (4, 1, 0, 32)],
)  # fmt: skip
@pytest.mark.parametrize("width", [24, 25])
def test_every_tiling_gives_the_same(parts: int, programs: int, group: int, rows: int, width: int) -> None:
    one = tiling.Tiling(rows, 32, 16, parts=parts, programs=programs, group=group, flatten=True, stagger_ns=100)
    x, weight, bias, weight_2, _ = (t.detach().half() for t in tensors(rows + 12, width, 48, width))
    hidden, slope = in_triton.forward(x, weight, bias, "tanh", True, one)
    before = F.linear(x.double(), weight.double(), bias.double()).requires_grad_()
    wanted = F.gelu(before, approximate="tanh")
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), before)
    assert slope is not None
    assert_close(hidden, wanted.detach(), TOLERANCE[torch.float16])
    assert_close(slope, wanted_slope, TOLERANCE[torch.float16])
    dy = torch.randn(rows + 12, width, device=DEVICE).half()
    exact = (dy.double() @ weight_2.double()) * wanted_slope
    for kept, form in ((slope, None), (before.detach().half(), "tanh")):
        result, sums = in_triton.backward(dy, weight_2, kept, form, torch.float32, one)
        assert_close(result, exact, TOLERANCE[torch.float16])
        assert sums is not None
        assert_close(sums, exact.sum(dim=0), TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "most", "wanted"),
    [(128, 32, 264, 8), (64, 32, 132, 4), (128, 24, 264, 11), (1, 5, 264, 1), (8, 300, 264, 4), (100, 264, 264, 1)],
)
def test_columns_are_shared_so_that_all_are_done_the_soonest(
    tiles_m: int, tiles_n: int, most: int, wanted: int
) -> None:
    assert tiling.programs_of_a_column(tiles_m, tiles_n, most) == wanted


@pytest.mark.parametrize(
    ("form", "approximate", "of_gelu", "of_slope"),
    [(TANH, "tanh", 2e-9, 2e-9), (ERF_OF_DEGREE_4, "none", 4e-6, 1.2e-5), (ERF_OF_DEGREE_2, "none", 3.1e-5, 9.5e-5)],
)
def test_the_polynomials_are_as_near_as_they_say(form: Form, approximate: str, of_gelu: float, of_slope: float) -> None:
    x = torch.linspace(-40, 40, 160_001, dtype=torch.float64, requires_grad=True)
    wanted = F.gelu(x, approximate=approximate)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), x)
    square = x.detach().square().clamp(max=form.largest or torch.inf)
    q = sum(c * square**power for power, c in enumerate(form.coefficients))
    sigmoid = torch.sigmoid(x.detach() * q)
    slope = sum(c * (2 * power + 1) * square**power for power, c in enumerate(form.coefficients))
    found_slope = sigmoid + x.detach() * sigmoid * (1 - sigmoid) * slope
    assert float((x.detach() * sigmoid - wanted.detach()).abs().max()) < of_gelu
    assert float((found_slope - wanted_slope).abs().max()) < of_slope


@both_forms
def test_extreme_values(small_tiles: None, form: Any) -> None:
    x = torch.tensor([[60000.0], [-60000.0], [300.0], [-300.0], [0.0], [float("nan")]], device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    hidden, slope = in_triton.forward(x, one, None, form, True)
    assert hidden.flatten()[:5].tolist() == [60000, 0, 300, 0, 0]
    assert slope is not None
    assert slope.flatten()[:5].tolist() == [1, 0, 1, 0, 0.5]
    assert torch.isnan(hidden[5]).all()
    assert torch.isnan(slope[5]).all()
    by_pass = in_triton.gelu(x, form)
    assert by_pass.flatten()[:5].tolist() == hidden.flatten()[:5].tolist()
    assert torch.isnan(by_pass[5]).all()
    dx, _ = in_triton.backward(torch.ones_like(x), one, x, form, None)
    assert dx.flatten()[:5].tolist() == [1, 0, 1, 0, 0.5]
    assert torch.isnan(dx[5]).all()


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


def test_the_module_is_a_sequential_of_three() -> None:
    block = FeedForward(8, 32, 4, bias=False, approximate="tanh")
    assert list(block.state_dict()) == ["0.weight", "2.weight"]
    plain = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU("tanh"), nn.Linear(32, 4, bias=False))
    plain.load_state_dict(block.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(block(x), plain(x))
    assert FeedForward(8, 32)(x).shape == (3, 8)


class Activation(nn.Module):
    """GELU as a library may write it."""

    def __init__(self, compute: Any = F.gelu) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)  # type: ignore[no-any-return]


def tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Intermediate(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 32)
        self.intermediate_act_fn = Activation(compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))  # type: ignore[no-any-return]


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 8)
        self.LayerNorm = nn.LayerNorm(8, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        hidden = self.dropout(self.dense(hidden))
        return self.LayerNorm(hidden + residual)  # type: ignore[no-any-return]


class OutputBeforeNorm(Output):
    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.dropout(self.dense(hidden)) + residual  # type: ignore[no-any-return]


class BertLike(nn.Module):
    """A layer in the structure of the transformers library's, without its attention."""

    def __init__(self, compute: Any = F.gelu, output: type[Output] = Output) -> None:
        super().__init__()
        self.intermediate = Intermediate(compute)
        self.output = output()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        return (self.feed_forward_chunk(x),)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        return self.output(self.intermediate(attention_output), attention_output)  # type: ignore[no-any-return]


def sequential(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), *between, nn.Linear(32, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = sequential(nn.Dropout(0.0))
        self.mlps = nn.ModuleList([shared, sequential(nn.Dropout(0.5)), shared, sequential(nn.Identity())])
        self.vit = MLPBlock(8, 32, 0.0)
        self.bert = BertLike(tanh_by_hand)
        self.longer = nn.Sequential(nn.LayerNorm(8), *sequential(), *sequential(), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for module in self.mlps:
            x = x + module(x)
        return self.longer(self.bert(self.vit(x))[0])  # type: ignore[no-any-return]


def test_it_is_put_to_every_site_and_undone() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 8)
    names, untouched = list(model.state_dict()), copy.deepcopy(model)
    paths = ["vit", "bert", "longer", "mlps.0", "mlps.2", "mlps.3"]
    patches = FeedForwardPatches()
    assert [site.path for site in patches.sites(model)] == paths
    surgery = PatchSurgery(model, patches)
    fused = ["FusedSequential", "FusedBertLike", *["FusedSequential"] * 4]
    changes = surgery.apply()
    assert changes == [Change(path, what) for path, what in zip(paths, fused, strict=True)]
    assert patches.sites(model) == []
    assert model.mlps[0] is model.mlps[2]
    assert list(model.state_dict()) == names
    parameters = [id(parameter) for parameter in model.parameters()]
    for version in (model, copy.deepcopy(model), untouched):
        torch.manual_seed(1)
        result = version(x)
        result.square().sum().backward()
        torch.manual_seed(1)
        torch.testing.assert_close(result, untouched(x))
    for ours, plain in zip(model.parameters(), untouched.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)
    untouched.load_state_dict(model.state_dict())
    surgery.undo()
    assert str(model) == str(untouched)
    assert [id(parameter) for parameter in model.parameters()] == parameters


def test_the_fused_modules_run_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[str] = []

    def counted(x: Tensor, w: Any, b: Any, w2: Any, b2: Any, form: Any, tier: Any = "auto") -> Tensor:
        forms.append(form)
        return reference(x, w, b, w2, b2, form)

    for module in ("modules", "bert"):
        monkeypatch.setattr(f"fasttrain.callbacks.gemm_gelu.{module}.linear_gelu_linear", counted)
    model = Model()
    PatchSurgery(model, FeedForwardPatches()).apply(only=["vit", "bert", "longer"])
    model(torch.randn(2, 8))
    assert forms == ["none", "tanh", "none", "none"]


def test_a_fused_bert_layer_can_be_pickled() -> None:
    layer = nn.ModuleList([BertLike()])
    PatchSurgery(layer, FeedForwardPatches()).apply()
    again = pickle.loads(pickle.dumps(layer))
    assert type(again[0]) is type(layer[0])
    assert isinstance(again[0], BertLike)
    torch.testing.assert_close(again.eval()[0](x := torch.randn(2, 8)), layer.eval()[0](x))


def test_hooks_on_the_whole_stay_and_hooks_inside_are_respected() -> None:
    model = nn.ModuleList([sequential()])
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("whole"))
    PatchSurgery(model, FeedForwardPatches()).apply()
    fused: Any = model[0]
    assert type(fused) is FusedSequential
    fused[1].register_forward_hook(lambda *_: seen.append("gelu"))
    fused(torch.randn(2, 8))
    assert seen == ["gelu", "whole"]


def hooked() -> nn.Module:
    model = sequential()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(2, 2), "Wrapped has no nn.GELU in an nn.Sequential"),
        (sequential(nn.Dropout(0.1)), "1 followed by dropout of 0.1, which the fused block doesn't have"),
        (hooked(), "1 beside or in a module watched by hooks"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.GELU()), "1 behind Conv2d"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Tanh()), "1 before Tanh"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), "1 before nothing"),
        (nn.TransformerEncoderLayer(8, 2, activation=nn.GELU()), "1 a child of TransformerEncoderLayer, whose forward"),
        (BertLike(torch.tanh), "Wrapped has no nn.GELU in an nn.Sequential"),
        (BertLike(F.gelu, OutputBeforeNorm), "Wrapped has no nn.GELU"),
    ],
)
def test_why_there_is_no_site(module: nn.Module, words: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

    patches = FeedForwardPatches()
    assert patches.sites(Wrapped()) == []
    assert words in patches.why_no_site(Wrapped())


def test_the_model_itself_is_not_replaced() -> None:
    patches = FeedForwardPatches()
    assert patches.sites(sequential()) == []
    assert "1 in the model itself, which can't be replaced" in patches.why_no_site(sequential())
    assert "1 fused already" in patches.why_no_site(FeedForward(8, 32))


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(4, 8)), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_the_callback_acts_and_undoes() -> None:
    module, callback = Module(Model()), FusedGemmGELU()
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module)
    assert [change.path for change in callback.changes][:2] == ["net.vit", "net.bert"]
    callback.undo()
    assert not any(isinstance(part, FusedSequential) for part in module.modules())
    with pytest.raises(OptimizationError, match=r"^gemm_gelu: Module has no nn\.GELU in an nn\.Sequential; leave it"):
        FusedGemmGELU().setup(trainer, Module(nn.Linear(8, 8)), "fit")


def test_the_plans_door() -> None:
    data = pl.LightningDataModule()
    trusting = GemmGELUOptimization(GemmGELUConfig(measure=False))
    verdict = trusting.check(Context(Module(Model()), data, CPU))
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("6 sites; not measured")
    assert isinstance(GemmGELUOptimization(GemmGELUConfig()).check(Context(Module(nn.GELU()), data, CPU)), Refuses)
