"""frozen_stem against its reference in float64, in both tiers; where it is put, and what it leaves to PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.resnet import resnet50
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.folded_norm import ScaleBias
from fasttrain.callbacks.frozen_stem import FrozenStem, FrozenStemOptimization, FrozenStemSurgery, frozen_stem
from fasttrain.callbacks.frozen_stem.bench import make_stem
from fasttrain.callbacks.frozen_stem.reference import TOLERANCE, reference
from fasttrain.callbacks.frozen_stem.sites import FrozenStemPatches
from fasttrain.errors import OptimizationError
from fasttrain.recipes.retinanet.backbone import build_backbone

pytest.importorskip("triton")
from fasttrain.callbacks.frozen_stem import in_triton
from fasttrain.callbacks.frozen_stem.in_triton import Tiling, blocks_of_two, pooled, weight_of_blocks
from fasttrain.callbacks.frozen_stem.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"


def constants(channels: int) -> ScaleBias:
    return ScaleBias(torch.randn(channels, device=DEVICE), torch.randn(channels, device=DEVICE))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 16, 24), (1, 30, 46), (3, 2, 2)])
def test_it_is_the_reference(tier: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    batch, height, width = shape
    x = torch.randn(batch, 3, height, width, device=DEVICE)
    weight, folded = torch.randn(8, 3, 7, 7, device=DEVICE).to(dtype) / 12, constants(8)
    wanted = reference(x.to(dtype).double(), weight.double(), ScaleBias(*(part.double() for part in folded)))
    found = frozen_stem(x, weight, folded, tier)  # type: ignore[arg-type]
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    assert off(found, wanted) <= TOLERANCE[dtype]
    assert tier == "torch" or found.is_contiguous(memory_format=torch.channels_last)


@settings(max_examples=6, deadline=None)
@given(
    height=st.integers(1, 6), width=st.integers(1, 12), channels=st.sampled_from([1, 8]),
    pixels=st.sampled_from([2, 8]), seed=st.integers(0, 99),
)  # fmt: skip
def test_pooling_is_torchs_on_maps_of_any_size(height: int, width: int, channels: int, pixels: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, folded = torch.randn(2, channels, height, width, device=DEVICE), constants(channels)
    x[torch.rand_like(x) < 0.02] = float("nan")
    x[torch.rand_like(x) < 0.02] = float("inf")
    wanted = F.max_pool2d((x * folded.scale[:, None, None] + folded.bias[:, None, None]).relu(), 3, 2, 1)
    found = pooled(x, folded, Tiling(pixels=pixels))
    torch.testing.assert_close(found, wanted.contiguous(memory_format=torch.channels_last), equal_nan=True)


def test_blocks_hold_each_pixel_once_between_zeros() -> None:
    x = torch.arange(1.0, 1 + 3 * 4 * 6).reshape(1, 3, 4, 6)
    blocks = blocks_of_two(x, torch.float64)
    assert (blocks.shape, blocks.dtype) == ((1, 16, 5, 6), torch.float64)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    inner = blocks[:, :12, 2:-1, 2:-1]
    assert sorted(inner.flatten().tolist()) == sorted(x.flatten().tolist())
    assert blocks.sum() == x.sum(), "all else is zero"
    assert inner[0, :, 1, 2].tolist() == [
        x[0, c, 2 + down, 4 + right] for down in (0, 1) for right in (0, 1) for c in range(3)
    ]
    weight = torch.randn(4, 3, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(
        F.conv2d(blocks, weight_of_blocks(weight)), F.conv2d(x.double(), weight, stride=2, padding=3)
    )


def stem(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    made = make_stem().to(DEVICE, dtype)
    norm = made[1]
    for name in ("weight", "bias", "running_mean"):
        getattr(norm, name).normal_()
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
    return made


def test_in_a_model_names_stay_and_the_old_modules_come_back() -> None:
    torch.manual_seed(0)
    model, x = stem(), torch.randn(2, 3, 16, 16, device=DEVICE)
    before, names, types = model(x), list(model.state_dict()), [type(m) for m in model]
    surgery = FrozenStemSurgery(model)
    (change,) = surgery.apply()
    assert (change.path, change.what) == ("0", "FrozenStem")
    assert [type(m) for m in model] == [FrozenStem, nn.Identity, nn.Identity, nn.Identity]
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    # A checkpoint loaded later is what counts.
    other = stem()
    other[0].weight.data.normal_()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(model).double()(x.double()), other.double()(x.double()))
    assert surgery.apply() == []
    surgery.undo()
    assert [type(m) for m in model] == types
    torch.testing.assert_close(model(x).double(), other(x.double()), rtol=1e-5, atol=1e-5)


def test_under_autocast_it_gives_the_autocasts_dtype() -> None:
    model, x = stem(), torch.randn(2, 3, 16, 16, device=DEVICE)
    FrozenStemSurgery(model).apply()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32
    assert model.to("meta")(x.to("meta")).shape == (2, 64, 4, 4), "where work is counted"


def test_gradients_are_pytorchs_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "stem", lambda *_: pytest.fail("the kernels have no backward"))
    weight, folded = torch.randn(8, 3, 7, 7, device=DEVICE), constants(8)
    x = torch.randn(1, 3, 8, 8, device=DEVICE, requires_grad=True)
    found = torch.autograd.grad(frozen_stem(x, weight, folded, "triton").sum(), x)[0]
    torch.testing.assert_close(found, torch.autograd.grad(reference(x, weight, folded).sum(), x)[0])
    assert not in_triton.can_take(x[..., :7], weight, folded), "an odd width"
    assert not in_triton.can_take(x, weight[:6], folded), "channels that are no power of two"
    assert not in_triton.can_take(x, weight.double(), folded)


def test_where_it_is_put() -> None:
    patches = FrozenStemPatches()
    body = build_backbone("resnext50_32x4d", (3, 4, 5), 8, frozen_norm=True, trainable_layers=3).body
    (site,) = patches.sites(body)
    assert (site.path, site.passed_by) == ("conv1", ("bn1", "relu", "maxpool"))
    net = resnet50(norm_layer=FrozenBatchNorm2d)
    assert patches.sites(net) == []
    assert patches.why_no_site(net) == "ResNet has no frozen stem: the weight of 'conv1' trains"
    net.conv1.requires_grad_(False)
    assert [site.path for site in patches.sites(net)] == ["conv1"]
    net.maxpool.register_forward_hook(lambda *_: None)
    assert patches.sites(net) == []
    assert patches.why_no_site(net) == (
        "ResNet has no frozen stem: it is not seen that a FrozenBatchNorm2d, a ReLU and a max-pooling of 3 x 3 and "
        "stride 2 follow 'conv1'"
    )
    assert patches.why_no_site(nn.Sequential(nn.Conv2d(3, 8, 3))) == (
        "Sequential has no convolution of 7 x 7 and stride 2 over three channels, with which such a stem begins"
    )
    assert FrozenStemOptimization.before == {"frozen_bn"}
    for other in (nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, 2, 1)):
        assert patches.sites(nn.Sequential(*make_stem()[:3], other)) == []


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(OptimizationError, match=r"images are floating point \(B, 3, H, W\) .* these are torch.uint8"):
        frozen_stem(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(8, 3, 7, 7), constants(8))
    with pytest.raises(OptimizationError, match=r"these are torch.float32 of \(1, 4, 8, 8\) and \(8, 3, 7, 7\)"):
        frozen_stem(torch.zeros(1, 4, 8, 8), torch.zeros(8, 3, 7, 7), constants(8))
