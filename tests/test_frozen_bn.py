"""frozen_bn against its reference in float64, in both tiers; what autograd may ask of it; and where it is put."""

import copy
import io
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.detection.backbone_utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.frozen_bn import (
    Folded,
    FrozenBNConfig,
    FrozenBNOptimization,
    FrozenBNSurgery,
    ScaleBias,
    fold,
    scale_bias_add_relu,
    scale_bias_dual_relu,
    scale_bias_relu,
    twin,
)
from fasttrain.callbacks.frozen_bn.modules import FrozenBatchNormReLU, FusedBasicBlock, FusedBottleneck
from fasttrain.callbacks.frozen_bn.reference import TOLERANCE, normalized, reference
from fasttrain.callbacks.frozen_bn.sites import FrozenBNPatches
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, ExampleBatch
from fasttrain.recipes.retinanet.backbone import build_backbone

pytest.importorskip("triton")
from fasttrain.callbacks.frozen_bn import in_triton
from fasttrain.callbacks.frozen_bn.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last
FORMS = ("relu", "add", "dual")
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])
every_form = pytest.mark.parametrize("form", FORMS)


def feature_map(shape: Sequence[int], dtype: torch.dtype = torch.float32, layout: str = "last") -> Tensor:
    n, c, h, w = shape
    if layout == "strided":
        return torch.randn(n, c, h, 2 * w, device=DEVICE).to(dtype)[..., ::2]
    x = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=LAST) if layout == "last" else x


def constants(channels: int) -> ScaleBias:
    return ScaleBias(torch.randn(channels, device=DEVICE), torch.randn(channels, device=DEVICE))


def double(folded: ScaleBias) -> ScaleBias:
    return ScaleBias(folded.scale.double(), folded.bias.double())


def ours(form: str, x: Tensor, z: Tensor, one: ScaleBias, two: ScaleBias, tier: Any = "auto") -> Tensor:
    if form == "relu":
        return scale_bias_relu(x, one, tier)
    if form == "add":
        return scale_bias_add_relu(x, one, z, tier)
    return scale_bias_dual_relu(x, one, z, two, tier)


def in_double(form: str, x: Tensor, z: Tensor, one: ScaleBias, two: ScaleBias) -> Tensor:
    return reference(x, double(one), z if form != "relu" else None, double(two) if form == "dual" else None)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def assert_equals_reference(form: str, x: Tensor, z: Tensor, tier: Any) -> None:
    """Values and both gradients, away from where rounding decides whether an element passes."""
    one, two = constants(x.shape[1]), constants(x.shape[1])
    x, z = (t.detach().requires_grad_() for t in (x, z))
    xd, zd = (t.detach().double().requires_grad_() for t in (x, z))
    inputs = 1 if form == "relu" else 2
    found, wanted = ours(form, x, z, one, two, tier), in_double(form, xd, zd, one, two)
    assert found.dtype == x.dtype
    assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
    with torch.no_grad():
        shifted = normalized(xd, double(one))
        if form != "relu":
            shifted = shifted + (normalized(zd, double(two)) if form == "dual" else zd)
        certain = shifted.abs() > 1e-4
    dy = feature_map(x.shape, x.dtype) * certain
    gradients = torch.autograd.grad(found, [x, z][:inputs], dy)
    for gradient, exact in zip(gradients, torch.autograd.grad(wanted, [xd, zd][:inputs], dy.double()), strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient, exact, TOLERANCE[x.dtype])


@both_tiers
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(0, 3), channels=st.one_of(st.integers(1, 20), st.sampled_from([24, 64, 320])),
    height=st.integers(1, 7), width=st.integers(1, 7),
    layouts=st.tuples(*[st.sampled_from(["last", "first", "strided"])] * 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    tier: str, form: str, dtype: torch.dtype, batch: int, channels: int, height: int, width: int,
    layouts: tuple[str, str], seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    shape = (batch, channels, height, width)
    assert_equals_reference(form, feature_map(shape, dtype, layouts[0]), feature_map(shape, dtype, layouts[1]), tier)


@every_form
def test_float64_is_differentiated_rightly_and_twice(form: str) -> None:
    torch.manual_seed(0)
    x, z = (torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    one, two = (ScaleBias(*torch.randn(2, 3, dtype=torch.float64)) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, z: ours(form, x, z, one, two), (x, z))
    assert torch.autograd.gradgradcheck(lambda x, z: ours(form, x, z, one, two), (x, z))


@pytest.mark.parametrize("channels", [3, 48])
@pytest.mark.parametrize("layout", ["last", "first"])
def test_programs_of_several_tiles_share_their_channels(channels: int, layout: str) -> None:
    tiling = in_triton.Tiling(vectors=4, tiles=3)
    x, z = feature_map((2, channels, 5, 3), layout=layout), feature_map((2, channels, 5, 3), layout=layout)
    one, two = constants(channels), constants(channels)
    y, mask = in_triton.forward(x, one, z, two, True, tiling)
    wanted = in_double("dual", x.double(), z.double(), one, two)
    assert_close(y, wanted, TOLERANCE[torch.float32])
    assert mask.numel() == -(-x.numel() // 8)
    dx, dz = in_triton.backward(x, None, mask, one.scale, two.scale, torch.float32, torch.float32, tiling)
    assert dx is not None
    assert dz is not None
    passed = x.double() * (wanted > 0)
    assert_close(dx, passed * double(one).scale.view(-1, 1, 1), TOLERANCE[torch.float32])
    assert_close(dz, passed * double(two).scale.view(-1, 1, 1), TOLERANCE[torch.float32])


@both_tiers
def test_memory_formats_stay(tier: Any) -> None:
    for layout, memory_format in (("last", LAST), ("first", torch.contiguous_format), ("strided", LAST)):
        x = feature_map((2, 4, 3, 5), layout=layout).requires_grad_()
        y = scale_bias_relu(x, constants(4), tier)
        if layout != "strided" or tier == "triton":
            assert y.is_contiguous(memory_format=memory_format)
        y.sum().backward()  # an expanded gradient
        assert x.grad is not None


@both_tiers
def test_nan_and_infinity_are_seen(tier: Any) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], device=DEVICE).view(1, 1, 2, 2).requires_grad_()
    y = scale_bias_relu(x, ScaleBias(*torch.tensor([[2.0], [0.0]], device=DEVICE)), tier)
    assert torch.equal(y.isnan().flatten(), torch.tensor([True, False, False, False], device=DEVICE))
    assert y.flatten()[1:].tolist() == [torch.inf, 0.0, 2.0]
    y.backward(torch.full_like(y, torch.inf))
    assert x.grad is not None
    assert x.grad.flatten()[2] == 0, "an infinite gradient of what the ReLU stopped is 0, not NaN"


def test_the_mask_alone_is_kept() -> None:
    x = feature_map((2, 16, 4, 4)).requires_grad_()
    y = scale_bias_relu(x, constants(16), "triton")
    node: Any = y.grad_fn
    sizes = [t.numel() * t.element_size() for t in node.saved_tensors if t is not None]
    assert sorted(sizes) == [16 * 4, x.numel() // 8]
    with torch.no_grad():
        assert scale_bias_relu(x, constants(16), "triton").grad_fn is None


def test_only_wanted_gradients_are_computed() -> None:
    one = constants(4)
    for wants in ((True, False), (False, True)):
        x, z = (feature_map((1, 4, 3, 3)).requires_grad_(want) for want in wants)
        scale_bias_add_relu(x, one, z, "triton").sum().backward()
        assert [t.grad is not None for t in (x, z)] == list(wants)


def test_mixed_dtypes_add_up_as_in_pytorch() -> None:
    x, z = feature_map((1, 4, 3, 3), torch.float16).requires_grad_(), feature_map((1, 4, 3, 3)).requires_grad_()
    one = constants(4)
    for tier in ("torch", "triton"):
        y = scale_bias_add_relu(x, one, z, tier)  # type: ignore[arg-type]
        assert y.dtype == torch.float32
        dx, dz = torch.autograd.grad(y.sum(), (x, z))
        assert (dx.dtype, dz.dtype) == (torch.float16, torch.float32)


@every_form
def test_a_second_derivative_of_the_kernels_is_refused(form: str) -> None:
    x, z = feature_map((1, 4, 2, 2)).requires_grad_(), feature_map((1, 4, 2, 2)).requires_grad_()
    y = ours(form, x, z, constants(4), constants(4), "triton")
    with pytest.raises(
        OptimizationError, match=r"frozen_bn: a gradient that can be differentiated again .*reference\."
    ):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_second_backward_gives_the_same() -> None:
    x = feature_map((1, 4, 2, 2)).requires_grad_()
    y = scale_bias_relu(x, constants(4), "triton")
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("uses", ["both", "y", "twin", "y twice"])
def test_the_gradients_of_an_output_and_its_twin_add_up(uses: str) -> None:
    torch.manual_seed(0)
    x, z, one = feature_map((1, 4, 3, 3)).requires_grad_(), feature_map((1, 4, 3, 3)).requires_grad_(), constants(4)

    def loss(y: Tensor, other: Tensor) -> Tensor:
        parts = {"y": [y.square()], "twin": [other.sin()], "y twice": [y.square(), y.sin()]}
        return sum(parts.get(uses, [y.square(), other.sin()])).sum()  # type: ignore[return-value, union-attr]

    y = scale_bias_add_relu(x, one, z, "triton", twice=True)
    other = twin(y)
    assert other is not y
    assert other.data_ptr() == y.data_ptr()
    found = torch.autograd.grad(loss(y, other), (x, z))
    plain = reference(x, one, z)
    for one_gradient, wanted in zip(found, torch.autograd.grad(loss(plain, plain), (x, z)), strict=True):
        torch.testing.assert_close(one_gradient, wanted)


def test_a_twin_is_not_used_after_its_tensor_was_written_to() -> None:
    x = feature_map((1, 4, 3, 3)).requires_grad_()
    y = scale_bias_add_relu(x, constants(4), feature_map((1, 4, 3, 3)), "triton", twice=True)
    y.mul_(2)
    assert twin(y) is y
    plain = torch.zeros(2)
    assert twin(plain) is plain


def test_under_autocast() -> None:
    conv, norm = nn.Conv2d(3, 4, 3, device=DEVICE), frozen_norm(4).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        x = conv(torch.randn(2, 3, 6, 6, device=DEVICE))
        y = scale_bias_relu(x, fold(norm))
    assert y.dtype == torch.bfloat16
    assert_close(y.detach(), reference(x.detach().double(), double(fold(norm))), TOLERANCE[torch.bfloat16])
    y.float().sum().backward()
    assert conv.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 3)}, "of shape (N, C, H, W); this one is torch.float32 of (2, 3)."),
        ({"x": torch.zeros(1, 3, 2, 2).long()}, "this one is torch.int64"),
        ({"z": torch.zeros(1, 3, 2, 1)}, "(1, 3, 2, 2) on cpu; this is (1, 3, 2, 1) on cpu."),
        ({"one": ScaleBias(torch.zeros(3), torch.zeros(4))}, "each of the 3 channels, on cpu; these have shape (4,)"),
        ({"one": ScaleBias(torch.zeros(3), torch.zeros(3, requires_grad=True))}, "get no gradient, and one of these"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(1, 3, 2, 2), "z": torch.zeros(1, 3, 2, 2), "one": ScaleBias(*torch.zeros(2, 3))}
    arguments |= change
    with pytest.raises(OptimizationError) as caught:
        scale_bias_add_relu(arguments["x"], arguments["one"], arguments["z"])  # type: ignore[arg-type]
    assert str(caught.value).startswith("frozen_bn: ")
    assert words in str(caught.value)


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (FrozenBatchNorm2d, nn.BatchNorm2d)):
            for name, low, high in (("running_var", 0.5, 2.0), ("weight", 0.2, 0.7), ("bias", -0.2, 0.2)):
                getattr(module, name).data.uniform_(low, high, generator=generator)
            module.running_mean.data.normal_(0, 0.1, generator=generator)  # type: ignore[union-attr, operator]
    return model


def frozen_norm(channels: int) -> nn.Module:
    return randomized(FrozenBatchNorm2d(channels))


def eval_norm(channels: int) -> nn.Module:
    return randomized(nn.BatchNorm2d(channels)).eval().requires_grad_(False)


@pytest.mark.parametrize("make", [frozen_norm, eval_norm])
def test_folded_once_and_again_after_a_change(make: Any) -> None:
    norm, x = make(5), torch.randn(2, 5, 3, 3)
    folded = Folded(norm, "frozen_bn")
    torch.testing.assert_close(normalized(x, folded()), norm(x))
    first = folded()
    assert folded() is first, "kept"
    before = first.scale.clone()
    norm.load_state_dict({key: value + 1 for key, value in norm.state_dict().items()})
    assert folded() is first, "in the same memory, which a captured graph reads"
    assert not torch.equal(folded().scale, before)
    torch.testing.assert_close(normalized(x, folded()), norm(x))
    norm.double()
    assert folded().scale.dtype == torch.float64


def test_folded_in_inference_mode_it_serves_training() -> None:
    folded = Folded(frozen_norm(4), "frozen_bn")
    with torch.inference_mode():
        folded()
    x = feature_map((1, 4, 2, 2)).requires_grad_()
    scale_bias_relu(x, folded().__class__(*(t.to(DEVICE) for t in folded())), "triton").sum().backward()


def test_the_fold_is_in_float32_with_eps() -> None:
    norm = FrozenBatchNorm2d(2, eps=0.5).half()
    assert fold(norm).scale.dtype == torch.float32
    torch.testing.assert_close(fold(norm).scale, torch.full((2,), 1.5**-0.5))
    plain = nn.BatchNorm2d(2, affine=False).eval()
    torch.testing.assert_close(fold(plain).bias, torch.zeros(2))


def run(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    outputs = model(images)
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    flat = outputs if isinstance(outputs, Tensor) else torch.cat([part.flatten() for part in outputs])
    flat.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return flat.detach(), gradients


def tiny_resnet(block: Any = Bottleneck, norm: Any = FrozenBatchNorm2d) -> ResNet:
    torch.manual_seed(0)
    net = ResNet(block, [2, 1, 1, 1], num_classes=4, norm_layer=norm)
    return randomized(net)  # type: ignore[return-value]


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    eval_batch_norm = tiny_resnet(BasicBlock, nn.BatchNorm2d).eval()
    for module in eval_batch_norm.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return {
        "bottlenecks": tiny_resnet(),
        "basic blocks in eval mode": eval_batch_norm,
        "recipe": randomized(build_backbone("small", (3, 4, 5), 8, True, 3)),
        "torchvision detection": IntermediateLayerGetter(tiny_resnet(), {"layer2": "0", "layer4": "1"}),
        "sequence": nn.Sequential(nn.Conv2d(3, 4, 3), frozen_norm(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    }


@pytest.mark.parametrize("name", models())
def test_surgery_keeps_numbers_and_names_and_can_be_undone(name: str) -> None:
    model, images = models()[name], torch.randn(2, 3, 32, 32)
    names, types = list(model.state_dict()), {path: type(m) for path, m in model.named_modules()}
    parameters = list(model.parameters())
    before = run(model, images)
    surgery = FrozenBNSurgery(model)
    changes = surgery.apply()
    assert [change.path for change in changes] == [path for path in dict(model.named_modules()) if fused(model, path)]
    assert FrozenBNSurgery(model).apply() == [], "a second time there is nothing left"
    after = run(model, images)
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-6)
    assert after[1].keys() == before[1].keys()
    for key, gradient in after[1].items():
        assert_close(gradient, before[1][key].double(), 1e-5)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(run(copy.deepcopy(model), images)[0], after[0])
    surgery.undo()
    assert {path: type(m) for path, m in model.named_modules()} == types
    again = run(model, images)
    assert torch.equal(again[0], before[0])
    assert all(torch.equal(gradient, before[1][key]) for key, gradient in again[1].items())


def fused(model: nn.Module, path: str) -> bool:
    return type(model.get_submodule(path)).__module__.endswith("frozen_bn.modules")


def test_every_normalization_of_a_backbone_is_reached() -> None:
    model = models()["recipe"]
    changes = FrozenBNSurgery(model).apply()
    assert changes == [
        Change("body.bn1", "FrozenBatchNormReLU"),
        *(Change(f"body.layer{i}.0", "FusedBasicBlock") for i in range(1, 5)),
    ]
    assert isinstance(model.body.relu, nn.Identity)  # type: ignore[union-attr]

    def stop(*_: Any) -> None:
        raise AssertionError("a normalization was called by itself")

    for module in model.modules():
        if type(module) is FrozenBatchNorm2d:
            module.register_forward_hook(stop)
    model(torch.randn(1, 3, 32, 32))


def through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.callbacks.frozen_bn.fused._takes_triton", lambda *_: True)


@pytest.mark.parametrize("block", [Bottleneck, BasicBlock])
def test_blocks_through_the_kernels(monkeypatch: pytest.MonkeyPatch, block: Any) -> None:
    torch.manual_seed(0)
    width = 2 * block.expansion
    shortcut = nn.Sequential(nn.Conv2d(3, width, 1, stride=2), frozen_norm(width))
    net = nn.Sequential(
        block(3, 2, stride=2, downsample=shortcut, norm_layer=frozen_norm), block(width, 2, norm_layer=frozen_norm)
    ).to(DEVICE)
    images = torch.randn(2, 3, 5, 5, device=DEVICE)
    wanted = run(net, images)
    FrozenBNSurgery(net).apply()
    through_the_kernels(monkeypatch)
    found = run(net, images)
    assert_close(found[0], wanted[0].double(), 1e-5)
    for key, gradient in found[1].items():
        assert_close(gradient, wanted[1][key].double(), 1e-5)


def test_a_block_with_a_hook_gives_the_whole_gradient_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(BasicBlock(4, 4, norm_layer=frozen_norm) for _ in range(2))).to(DEVICE)
    kept: list[Tensor] = []
    x = torch.randn(1, 4, 3, 3, device=DEVICE)

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    FrozenBNSurgery(net).apply()
    net[0].register_forward_hook(keep)
    run(net, x)
    through_the_kernels(monkeypatch)
    run(net, x)
    plain, ours_ = (output.grad for output in kept)
    assert plain is not None
    assert ours_ is not None
    torch.testing.assert_close(ours_, plain)


def test_a_downsample_path_without_a_frozen_norm_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(BasicBlock(3, 4, downsample=nn.Conv2d(3, 4, 1), norm_layer=frozen_norm)).to(DEVICE)
    x = torch.randn(1, 3, 3, 3, device=DEVICE)
    wanted = run(net, x)
    FrozenBNSurgery(net).apply()
    through_the_kernels(monkeypatch)
    torch.testing.assert_close(run(net, x), wanted)


def test_a_block_used_twice_is_replaced_by_one_block() -> None:
    block = randomized(Bottleneck(8, 2, norm_layer=FrozenBatchNorm2d))
    model = nn.ModuleDict({"a": nn.Sequential(block, block), "b": block})
    x = torch.randn(1, 8, 3, 3)
    wanted = run(model["a"], x)
    surgery = FrozenBNSurgery(model)
    assert [change.path for change in surgery.apply()] == ["b", "a.0", "a.1"]
    assert model["b"] is model["a"][0] is model["a"][1]  # type: ignore[index]
    found = run(model["a"], x)
    torch.testing.assert_close(found, wanted)
    surgery.undo()
    assert model["b"] is model["a"][1] is block  # type: ignore[index]


def test_a_relu_that_others_use_stays_theirs() -> None:
    relu, norm = nn.ReLU(), frozen_norm(3)
    model = nn.Sequential(norm, relu, nn.Conv2d(3, 3, 1), relu, norm)
    x = torch.randn(2, 3, 4, 4)
    wanted = model(x)
    assert FrozenBNSurgery(model).apply() == [Change("0", "FrozenBatchNormReLU")]
    assert model[3] is relu
    assert model[4] is norm
    torch.testing.assert_close(model(x), wanted)


class Stem(nn.Module):
    """Children whose names say nothing about the order in which they run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act, self.norm, self.calls = kind, nn.ReLU(), frozen_norm(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x)
        if self.kind == "used twice":
            return self.act(y) + y  # type: ignore[no-any-return]
        if self.kind == "relu twice":
            return self.act(self.act(y) - 1)  # type: ignore[no-any-return]
        if self.kind == "depends on values":
            return self.act(y) if x.sum() > 0 else y
        return self.act(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "found"), [("plain", 1), ("used twice", 0), ("relu twice", 0), ("depends on values", 0)]
)
def test_a_traced_forward_says_whether_a_relu_follows(kind: str, found: int) -> None:
    model = nn.ModuleDict({"stem": Stem(kind)})
    assert len(FrozenBNPatches().sites(model)) == found
    assert model["stem"].calls == 0, "tracing leaves it as it was"
    x = torch.randn(2, 3, 4, 4)
    wanted = model["stem"](x)
    FrozenBNSurgery(model).apply()
    torch.testing.assert_close(model["stem"](x), wanted)


def with_hook(norm: nn.Module) -> nn.Module:
    norm.register_forward_hook(lambda *_: None)
    return norm


class OwnForward(FrozenBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (nn.Identity(), "Sequential has no BatchNorm2d or FrozenBatchNorm2d"),
        (OwnForward(3), "Sequential has no BatchNorm2d or FrozenBatchNorm2d"),
        (nn.BatchNorm2d(3), "its normalizations are: 1 in training mode"),
        (nn.BatchNorm2d(3).eval(), "are: 1 trainable in weight or bias"),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), "1 without running statistics"),
        (with_hook(frozen_norm(3)), "1 watched by hooks"),
        (nn.Sequential(frozen_norm(3), nn.Sigmoid()), "1 frozen, with no ReLU seen to follow"),
    ],
)
def test_what_can_not_be_fused_is_left_alone_with_a_reason(norm: nn.Module, words: str) -> None:

    model = nn.Sequential(norm, nn.ReLU())
    assert FrozenBNSurgery(model).apply() == []
    assert words in FrozenBNPatches().why_no_site(model)


def test_a_norm_that_begins_to_train_is_an_error() -> None:
    model = nn.Sequential(eval_norm(3), nn.ReLU())
    FrozenBNSurgery(model).apply()
    model(torch.randn(1, 3, 2, 2))
    for change, words in (
        (model.train, "is now in training mode"),
        (model.requires_grad_, "is now trainable in weight or bias"),
    ):
        model.eval().requires_grad_(False)
        change()
        with pytest.raises(
            OptimizationError, match=rf"^frozen_bn: a BatchNorm2d of 3 channels .*{words}; keep it in eval"
        ):
            model(torch.randn(1, 3, 2, 2))


def test_checkpoints_load_both_ways() -> None:
    plain, ours_ = tiny_resnet(), tiny_resnet()
    FrozenBNSurgery(ours_).apply()
    with torch.no_grad():
        for value in plain.state_dict().values():
            value.mul_(1.1)
    images = torch.randn(1, 3, 32, 32)
    ours_(images)
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    ours_.load_state_dict(torch.load(file))
    torch.testing.assert_close(ours_(images), plain(images), rtol=1e-4, atol=1e-5)
    tiny_resnet().load_state_dict(ours_.state_dict())


def test_torch_compile_takes_the_fused_modules_whole() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), frozen_norm(4), nn.ReLU(), Bottleneck(4, 1, norm_layer=frozen_norm),
                        eval_norm(4), nn.ReLU(),
                        BasicBlock(4, 4, norm_layer=frozen_norm))  # fmt: skip
    images = torch.randn(1, 3, 8, 8)
    FrozenBNSurgery(net).apply()
    wanted = run(net, images)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = run(compiled, images)
    torch.testing.assert_close(found[0], wanted[0])
    for one, other in zip(found[1].values(), wanted[1].values(), strict=True):
        torch.testing.assert_close(one, other)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), eval_norm(4), nn.ReLU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4, 3, 8, 8)), batch_size=2)


def test_a_real_measurement_of_norms_in_eval_mode_keeps_them_there() -> None:
    module = Classifier()
    context = Context(module, Data(), CPU, example=ExampleBatch(Data()))
    verdict = FrozenBNOptimization(FrozenBNConfig(least_gain=-1e9)).check(context)
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("1 sites; measured ")
    assert type(module.net[1]) is nn.BatchNorm2d
    assert not module.net[1].training


def test_the_fused_forms_are_still_what_they_were() -> None:
    model = tiny_resnet()
    FrozenBNSurgery(model).apply()
    assert isinstance(model.bn1, FrozenBatchNormReLU)
    assert isinstance(model.layer1[0], FusedBottleneck)
    assert isinstance(model.layer1[0], Bottleneck)
    assert not issubclass(FusedBasicBlock, Bottleneck)
