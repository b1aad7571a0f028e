"""bn_relu against its reference in float64, in both tiers; what autograd may ask of it; and where it is put."""

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fasttrain.callbacks.bn_relu import (
    BNReLUPatches,
    BNReLUSurgery,
    batch_norm_add_relu,
    batch_norm_dual_relu,
    batch_norm_relu,
    twin,
)
from fasttrain.callbacks.bn_relu.reference import SUM_TOLERANCE, TOLERANCE, normalized, reference, updated
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change

pytest.importorskip("triton")
from fasttrain.callbacks.bn_relu import in_triton
from fasttrain.callbacks.bn_relu.tile import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last
FORMS = ("relu", "add", "dual")
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])
every_form = pytest.mark.parametrize("form", FORMS)


def feature_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: str = "last") -> Tensor:
    n, c, h, w = shape
    if layout == "strided":
        return torch.randn(n, c, h, 2 * w, device=DEVICE).to(dtype)[..., ::2]
    x = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=LAST) if layout == "last" else x


def norm_of(channels: int, **options: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=DEVICE, **options)
    for value in norm.parameters():
        nn.init.uniform_(value, 0.2, 1.5)
    return norm


def ours(form: str, x: Tensor, z: Tensor, one: nn.BatchNorm2d, two: nn.BatchNorm2d, tier: Any = "triton") -> Tensor:
    if form == "relu":
        return batch_norm_relu(x, one, tier)
    if form == "add":
        return batch_norm_add_relu(x, one, z, tier)
    return batch_norm_dual_relu(x, one, z, two, tier)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-6


def assert_equals_reference(form: str, x: Tensor, z: Tensor, tier: Any, momentum: float | None = 0.1) -> None:
    """Values, every gradient and running statistics, away from where rounding decides whether an element passes."""
    one, two = norm_of(x.shape[1], momentum=momentum), norm_of(x.shape[1])
    x, z = (t.detach().requires_grad_() for t in (x, z))
    xd, zd = (t.detach().double().requires_grad_() for t in (x, z))
    parameters = [one.weight, one.bias, two.weight, two.bias]
    in_double = [p.detach().double().requires_grad_() for p in parameters]
    leaves = {"relu": [x, *parameters[:2]], "add": [x, z, *parameters[:2]], "dual": [x, z, *parameters]}[form]
    exact_leaves = {"relu": [xd, *in_double[:2]], "add": [xd, zd, *in_double[:2]], "dual": [xd, zd, *in_double]}[form]
    found = ours(form, x, z, one, two, tier)
    wanted = reference(
        xd, *in_double[:2], one.eps, None if form == "relu" else zd, *(in_double[2:] if form == "dual" else ())
    )
    assert found.dtype == x.dtype
    assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
    with torch.no_grad():
        value = normalized(xd, *in_double[:2])
        if form != "relu":
            value = value + (normalized(zd, *in_double[2:]) if form == "dual" else zd)
        certain = value.abs() > 1e-2 if tier == "torch" and x.dtype != torch.float32 else value.abs() > 1e-4
    dy = feature_map(tuple(x.shape), x.dtype) * certain
    exact = torch.autograd.grad(wanted, exact_leaves, dy.double())
    for gradient, expected, leaf in zip(torch.autograd.grad(found, leaves, dy), exact, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        loose = tier == "torch" and x.dtype != torch.float32  # PyTorch rounds in between
        assert_close(gradient, expected, 5e-3 if loose else TOLERANCE[x.dtype] if leaf.dim() == 4 else SUM_TOLERANCE)
    zeros = torch.zeros(x.shape[1], dtype=torch.float64, device=DEVICE)
    mean, var = updated(xd.detach(), zeros, zeros + 1, 1, momentum)
    assert one.running_mean is not None
    assert one.running_var is not None
    assert_close(one.running_mean, mean, SUM_TOLERANCE)
    assert_close(one.running_var, var, SUM_TOLERANCE)
    assert int(one.num_batches_tracked or 0) == 1
    assert int(two.num_batches_tracked or 0) == (form == "dual")


@both_tiers
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 2), channels=st.one_of(st.integers(1, 20), st.sampled_from([24, 64])),
    height=st.integers(4, 5), width=st.integers(2, 4),
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
def test_small_tiles_of_several_blocks_of_channels(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    torch.manual_seed(0)
    tiling = in_triton.Tiling(vectors=16, channels=32)
    for name in ("STATISTICS", "NORMALIZE", "SUMS", "GRADIENT", "DUAL_SUMS", "DUAL_GRADIENT"):
        monkeypatch.setattr(in_triton, name, tiling)
    monkeypatch.setattr(in_triton, "INTERPRETED_PROGRAMS", 6)
    assert_equals_reference(form, feature_map((2, 64, 3, 3)), feature_map((2, 64, 3, 3)), "triton", momentum=None)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 8, 6, 6, device=DEVICE) + 1000).contiguous(memory_format=LAST)
    stats = in_triton.statistics(x, norm := norm_of(8))
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(stats[0].double(), mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(stats[1].double(), (var + norm.eps).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
def test_running_statistics_are_those_of_pytorch(momentum: float | None) -> None:
    torch.manual_seed(0)
    plain, fused = norm_of(5, momentum=momentum), norm_of(5, momentum=momentum)
    version = fused.running_mean._version  # type: ignore[union-attr]
    for _ in range(3):
        x = feature_map((2, 5, 4, 3)) + 2
        plain(x)
        batch_norm_relu(x, fused, "triton")
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name))
    assert fused.running_mean._version > version  # type: ignore[union-attr]


@both_tiers
@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_norms_without_parameters_or_statistics(tier: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    norm, x = norm_of(6, **options), feature_map((2, 6, 3, 3)).requires_grad_()
    for mode in (True, False):
        norm.train(mode)
        plain = copy.deepcopy(norm)(x).relu()
        found = batch_norm_relu(x, norm, tier)
        torch.testing.assert_close(found, plain)
        dy = torch.randn_like(plain)
        torch.testing.assert_close(
            torch.autograd.grad(found, x, dy), torch.autograd.grad(plain, x, dy), rtol=1e-4, atol=1e-5
        )


def test_evaluation_mode_is_pytorchs() -> None:
    norm, x = norm_of(4), feature_map((2, 4, 3, 3))
    batch_norm_relu(x, norm, "triton")
    norm.eval()
    before = copy.deepcopy(norm.state_dict())
    assert torch.equal(batch_norm_relu(x, norm, "triton"), norm(x).relu())
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


@both_tiers
def test_one_value_by_channel_and_an_empty_batch_are_as_in_pytorch(tier: Any) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batch_norm_relu(feature_map((1, 4, 1, 1)), norm_of(4), tier)
    x = feature_map((0, 4, 3, 3)).requires_grad_()
    y = batch_norm_relu(x, norm_of(4), tier)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None


@both_tiers
def test_nan_and_infinite_gradients_are_seen(tier: Any) -> None:
    norm = norm_of(1)
    x = torch.tensor([torch.nan, 1.0, 2.0, 3.0], device=DEVICE).view(1, 1, 2, 2)
    assert batch_norm_relu(x, norm, tier).isnan().all()
    x = torch.tensor([-1.0, 1.0, 2.0, -3.0], device=DEVICE).view(1, 1, 2, 2).requires_grad_()
    norm = nn.BatchNorm2d(1, device=DEVICE)
    y = batch_norm_relu(x, norm, tier)
    y.backward(torch.tensor([torch.inf, 1.0, 1.0, 1.0], device=DEVICE).view(1, 1, 2, 2))
    assert norm.bias.grad is not None
    assert float(norm.bias.grad) == 2, "what the ReLU stopped does not count, and infinity times 0 is not NaN"


def test_what_is_kept_for_the_backward() -> None:
    x, z, norm = feature_map((2, 16, 4, 4)).requires_grad_(), feature_map((2, 16, 4, 4)), norm_of(16)

    def kept(y: Tensor) -> list[int]:
        node: Any = y.grad_fn
        return sorted(t.numel() * t.element_size() for t in node.saved_tensors if t is not None)

    assert kept(batch_norm_relu(x, norm, "triton")) == [4 * 16 * 4, x.numel() * 4]
    assert kept(batch_norm_add_relu(x, norm, z, "triton")) == [x.numel() // 8, 4 * 16 * 4, x.numel() * 4]
    with torch.no_grad():
        assert batch_norm_relu(x, norm, "triton").grad_fn is None


@every_form
def test_only_wanted_gradients_are_computed(form: str) -> None:
    for wanted in range(4):
        x, z, one, two = feature_map((1, 4, 3, 3)), feature_map((1, 4, 3, 3)), norm_of(4), norm_of(4)
        leaves = [x, z, one.weight, two.bias]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i == wanted)
        if (wanted == 1 and form == "relu") or (wanted == 3 and form != "dual"):
            continue
        one.bias.requires_grad_(False)
        two.weight.requires_grad_(False)
        plain_one, plain_two = copy.deepcopy(one), copy.deepcopy(two)
        ours(form, x, z, one, two).square().sum().backward()
        found = [leaf.grad for leaf in leaves]
        assert [grad is not None for grad in found] == [i == wanted for i in range(4)]
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, z)]
        ours(form, copies[0], copies[1], plain_one, plain_two, "torch").square().sum().backward()
        expected = [copies[0].grad, copies[1].grad, plain_one.weight.grad, plain_two.bias.grad][wanted]
        torch.testing.assert_close(found[wanted], expected, rtol=1e-4, atol=1e-4)


def test_mixed_dtypes_add_up_as_in_pytorch() -> None:
    x, z = feature_map((1, 4, 3, 3), torch.float16).requires_grad_(), feature_map((1, 4, 3, 3)).requires_grad_()
    for first, second in ((x, z), (z, x)):
        y = batch_norm_add_relu(first, norm_of(4), second, "triton")
        assert y.dtype == torch.float32
        gradients = torch.autograd.grad(y.sum(), (first, second))
        assert [g.dtype for g in gradients] == [first.dtype, second.dtype]


@every_form
def test_a_second_derivative_of_the_kernels_is_refused(form: str) -> None:
    x, z = feature_map((1, 4, 2, 2)).requires_grad_(), feature_map((1, 4, 2, 2)).requires_grad_()
    y = ours(form, x, z, norm_of(4), norm_of(4))
    with pytest.raises(OptimizationError, match=r"bn_relu: a gradient that can be differentiated again .*reference\."):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_norm_used_twice_gets_both_gradients() -> None:
    torch.manual_seed(0)
    x, norm = feature_map((2, 4, 3, 3)).requires_grad_(), norm_of(4)
    plain = copy.deepcopy(norm)
    batch_norm_relu(batch_norm_relu(x, norm, "triton"), norm, "triton").square().sum().backward()
    plain(plain(x).relu()).relu().square().sum().backward()
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.running_var, plain.running_var)


@pytest.mark.parametrize("form", ["add", "dual"])
@pytest.mark.parametrize("uses", ["both", "y", "twin"])
def test_the_gradients_of_an_output_and_its_twin_add_up(form: str, uses: str) -> None:
    torch.manual_seed(0)
    x, z = feature_map((2, 4, 3, 3)).requires_grad_(), feature_map((2, 4, 3, 3)).requires_grad_()
    one, two = norm_of(4), norm_of(4)

    def loss(y: Tensor, other: Tensor) -> Tensor:
        parts = {"y": [y.square()], "twin": [other.sin()], "both": [y.square(), other.sin()]}[uses]
        return sum(parts).sum()  # type: ignore[return-value, union-attr]

    if form == "add":
        y = batch_norm_add_relu(x, one, z, "triton", twice=True)
    else:
        y = batch_norm_dual_relu(x, one, z, two, "triton", twice=True)
    assert twin(y) is not y
    assert twin(y).data_ptr() == y.data_ptr()
    found = torch.autograd.grad(loss(y, twin(y)), (x, z, one.weight))
    plain = ours(form, x, z, one, two, "torch")
    wanted = torch.autograd.grad(loss(plain, plain), (x, z, one.weight))
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    y.mul_(2)
    assert twin(y) is y, "not after it was written to"


def test_under_autocast() -> None:
    conv, norm = nn.Conv2d(3, 4, 3, device=DEVICE), norm_of(4)
    with torch.autocast(DEVICE, torch.bfloat16):
        x = conv(torch.randn(2, 3, 6, 6, device=DEVICE))
        y = batch_norm_relu(x, norm)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert conv.weight.grad is not None
    assert norm.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 3)}, "of shape (N, C, H, W); this one is torch.float32 of (2, 3)."),
        ({"x": torch.zeros(1, 3, 2, 2).long()}, "this one is torch.int64"),
        ({"z": torch.zeros(1, 3, 2, 1)}, "(1, 3, 2, 2) on cpu; this is (1, 3, 2, 1) on cpu."),
        ({"norm": nn.BatchNorm2d(4)}, "is for 4 channels, and the map of (1, 3, 2, 2) has 3."),
        ({"norm": nn.SyncBatchNorm(3)}, "those of one process; this is a SyncBatchNorm."),
        ({"norm": nn.GroupNorm(1, 3)}, "this is a GroupNorm."),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"x": torch.zeros(1, 3, 2, 2), "norm": nn.BatchNorm2d(3), "z": torch.zeros(1, 3, 2, 2)} | change
    with pytest.raises(OptimizationError) as caught:
        batch_norm_add_relu(**arguments)
    assert str(caught.value).startswith("bn_relu: ")
    assert words in str(caught.value)


def run(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(images)
    output.square().mean().backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tiny_resnet(block: Any = Bottleneck) -> ResNet:
    torch.manual_seed(0)
    return ResNet(block, [2, 1, 1, 1], num_classes=4)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "bottlenecks": tiny_resnet(),
        "basic blocks": tiny_resnet(BasicBlock),
        "sequence": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)),
    }


@pytest.mark.parametrize("name", models())
def test_surgery_keeps_numbers_and_names_and_can_be_undone(name: str) -> None:
    images = torch.randn(4, 3, 40, 40)
    model, plain = models()[name], models()[name]
    names, types = list(model.state_dict()), {path: type(m) for path, m in model.named_modules()}
    parameters = list(model.parameters())
    surgery = BNReLUSurgery(model)
    changes = surgery.apply()
    assert {change.path for change in changes} == {path for path in dict(model.named_modules()) if fused(model, path)}
    assert BNReLUSurgery(model).apply() == [], "a second time there is nothing left"
    before, after = run(plain, images), run(model, images)
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-6)
    assert after[1].keys() == before[1].keys()
    for key, gradient in after[1].items():
        assert_close(gradient, before[1][key].double(), 1e-3)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    surgery.undo()
    assert {path: type(m) for path, m in model.named_modules()} == types
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


def fused(model: nn.Module, path: str) -> bool:
    return type(model.get_submodule(path)).__module__.endswith("bn_relu.modules")


def test_every_normalization_of_a_resnet_is_reached() -> None:
    model = tiny_resnet(BasicBlock)
    assert BNReLUSurgery(model).apply() == [
        Change("bn1", "FusedBatchNormReLUPool"),
        *(Change(f"layer1.{i}", "TrainedBasicBlock") for i in range(2)),
        *(Change(f"layer{i}.0", "TrainedBasicBlock") for i in range(2, 5)),
    ]
    assert isinstance(model.relu, nn.Identity)

    def stop(*_: Any) -> None:
        raise AssertionError("a normalization was called by itself")

    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.register_forward_hook(stop)
    for block in (model.layer2[0], model.layer3[0], model.layer4[0]):
        block.downsample[1]._forward_hooks.clear()  # a hook there is respected
    model(torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("block", [Bottleneck, BasicBlock])
def test_blocks_through_the_kernels(monkeypatch: pytest.MonkeyPatch, block: Any) -> None:
    torch.manual_seed(0)
    width = 2 * block.expansion
    shortcut = nn.Sequential(nn.Conv2d(3, width, 1, stride=2), nn.BatchNorm2d(width))
    net = nn.Sequential(block(3, 2, stride=2, downsample=shortcut), block(width, 2)).to(DEVICE)
    images, plain = torch.randn(2, 3, 5, 5, device=DEVICE), copy.deepcopy(net)
    BNReLUSurgery(net).apply()
    monkeypatch.setattr("fasttrain.callbacks.bn_relu.fused._takes_triton", lambda *_: True)
    found, wanted = run(net, images), run(plain, images)
    assert_close(found[0], wanted[0].double(), 1e-5)
    for key, gradient in found[1].items():
        assert_close(gradient, wanted[1][key].double(), 1e-4)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value)


def test_a_shortcut_that_does_not_end_in_a_training_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval())
    for shortcut in (nn.Conv2d(3, 4, 1), frozen):
        net = nn.Sequential(BasicBlock(3, 4, downsample=shortcut)).to(DEVICE)
        shortcut.eval()
        x, plain = torch.randn(1, 3, 3, 3, device=DEVICE), copy.deepcopy(net)
        BNReLUSurgery(net).apply()
        monkeypatch.setattr("fasttrain.callbacks.bn_relu.fused._takes_triton", lambda *_: True)
        torch.testing.assert_close(run(net, x), run(plain, x), rtol=1e-4, atol=1e-4)


def test_frozen_and_training_norms_in_one_model() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3).eval(), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    assert BNReLUSurgery(model).apply() == [Change("3", "FusedBatchNormReLU")]
    block = BasicBlock(4, 4)
    block.bn2.eval()
    assert BNReLUPatches().sites(nn.Sequential(block)) == []


def with_hook(norm: nn.Module) -> nn.Module:
    norm.register_forward_hook(lambda *_: None)
    return norm


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (nn.Identity(), "Sequential has no BatchNorm2d"),
        (nn.BatchNorm2d(3).eval(), "its normalizations are: 1 in evaluation mode"),
        (nn.SyncBatchNorm(3), "are: 1 SyncBatchNorm, whose statistics are of all processes"),
        (with_hook(nn.BatchNorm2d(3)), "1 watched by hooks"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Sigmoid()), "1 in training, with no ReLU seen to follow"),
    ],
)
def test_what_can_not_be_fused_is_left_alone_with_a_reason(norm: nn.Module, words: str) -> None:
    model = nn.Sequential(norm, nn.ReLU())
    assert BNReLUSurgery(model).apply() == []
    assert words in BNReLUPatches().why_no_site(model)


def test_checkpoints_load_both_ways() -> None:
    plain, patched = tiny_resnet(), tiny_resnet()
    BNReLUSurgery(patched).apply()
    plain(torch.randn(2, 3, 32, 32))
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    patched.load_state_dict(torch.load(file))
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(patched.eval()(images), plain.eval()(images), rtol=1e-4, atol=1e-5)
    tiny_resnet().load_state_dict(patched.state_dict())


def test_torch_compile_takes_the_fused_modules_whole() -> None:
    torch.manual_seed(0)
    shortcut = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), BasicBlock(4, 8, downsample=shortcut))
    images, other = torch.randn(2, 3, 8, 8), copy.deepcopy(net)
    BNReLUSurgery(net).apply()
    found = run(torch.compile(net, backend="aot_eager", fullgraph=True), images)  # type: ignore[arg-type]
    wanted = run(other, images)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for one, two in zip(found[1].values(), wanted[1].values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
