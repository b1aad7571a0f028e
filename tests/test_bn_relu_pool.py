"""bn_relu's stem: normalization, ReLU and max-pooling in one pass, against the three operators in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from fasttrain.callbacks.bn_relu import BNReLUPatches, BNReLUSurgery, batch_norm_relu_pool, twin
from fasttrain.callbacks.bn_relu.modules import FusedBatchNormReLUPool
from fasttrain.callbacks.bn_relu.reference import SUM_TOLERANCE, TOLERANCE, reference
from fasttrain.errors import OptimizationError

pytest.importorskip("triton")
from fasttrain.callbacks.bn_relu.tile import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
LAST = torch.channels_last
STEM_POOL = {"kernel_size": 3, "stride": 2, "padding": 1}


def norm_of(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device=DEVICE)
    for value in norm.parameters():
        nn.init.uniform_(value, -0.5, 1.5)
    return norm


def map_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).contiguous(memory_format=LAST)


def differs(one: Tensor, other: Tensor) -> float:
    other = other.detach()
    return float((one.detach().double() - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("shape", [(2, 8, 8, 8), (1, 16, 5, 35), (2, 8, 1, 5)])
@pytest.mark.parametrize("twice", [False, True])
def test_outputs_and_all_gradients_are_the_references(shape: tuple[int, ...], twice: bool) -> None:
    torch.manual_seed(0)
    norm, x = norm_of(shape[1]), map_of(*shape).requires_grad_()
    y = batch_norm_relu_pool(x, norm, "triton", twice)
    dy, other = map_of(*y.shape), map_of(*y.shape)
    used, given = ([y, twin(y)], [dy, other]) if twice else ([y], [dy])
    ours = torch.autograd.grad(used, [x, norm.weight, norm.bias], given)
    leaves = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias)]
    theirs = F.max_pool2d(reference(leaves[0], leaves[1], leaves[2]), 3, 2, 1)
    expected = torch.autograd.grad(theirs, leaves, (dy + other if twice else dy).double())
    assert y.shape == theirs.shape
    assert y.is_contiguous(memory_format=LAST)
    assert differs(y, theirs) <= TOLERANCE[torch.float32]
    assert differs(ours[0], expected[0]) <= TOLERANCE[torch.float32]
    for mine, true in zip(ours[1:], expected[1:], strict=True):
        assert differs(mine, true) <= SUM_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_of_values_that_are_equal_once_rounded_the_first_wins_as_in_pytorch(dtype: torch.dtype) -> None:
    x = torch.randint(-2, 3, (2, 8, 9, 9), device=DEVICE).to(dtype).contiguous(memory_format=LAST).requires_grad_()
    ours, plain = norm_of(8), nn.BatchNorm2d(8, device=DEVICE)
    plain.load_state_dict(ours.state_dict())
    y = batch_norm_relu_pool(x, ours, "triton")
    theirs = F.max_pool2d(plain(x.float()).relu(), 3, 2, 1)
    dy = map_of(*y.shape, dtype=dtype)
    assert differs(y, theirs.double()) <= TOLERANCE[dtype]
    assert torch.equal(ours.num_batches_tracked, plain.num_batches_tracked)
    torch.testing.assert_close(ours.running_var, plain.running_var)
    (mine,), (true,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(theirs, x, dy.float())
    assert differs(mine, true.double()) <= 2 * TOLERANCE[dtype]  # theirs is rounded too


def test_nan_goes_through_and_pytorch_takes_what_the_kernels_do_not() -> None:
    x = map_of(1, 8, 4, 4)
    x[0, 3, 1, 1] = float("nan")
    assert batch_norm_relu_pool(x, norm_of(8), "triton")[0, 3].isnan().all()
    norm, x = norm_of(12), map_of(2, 12, 6, 6)
    y = batch_norm_relu_pool(x, norm, "triton")
    torch.testing.assert_close(y, F.max_pool2d(reference(x, norm.weight, norm.bias), 3, 2, 1))
    assert torch.equal(batch_norm_relu_pool(x, norm.eval()), F.max_pool2d(norm(x).relu(), 3, 2, 1))


def test_a_second_derivative_is_refused() -> None:
    x = map_of(1, 8, 4, 4).requires_grad_()
    y = batch_norm_relu_pool(x, norm_of(8), "triton")
    with pytest.raises(OptimizationError, match="differentiated again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def stem(**pool: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(**pool))


def test_a_residual_networks_stem_is_one_site_and_comes_back() -> None:
    model = ResNet(BasicBlock, [1, 1, 1, 1])
    before = dict(model.named_modules())
    site = next(site for site in BNReLUPatches(pool=True).sites(model) if site.path == "bn1")
    assert site.passed_by == ("relu", "maxpool")
    surgery = BNReLUSurgery(model, pool=True)
    surgery.apply()
    assert type(model.bn1) is FusedBatchNormReLUPool
    assert type(model.maxpool) is nn.Identity
    surgery.undo()
    assert all(module is before[name] for name, module in model.named_modules())


@pytest.mark.parametrize(
    "pool", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2}, {**STEM_POOL, "ceil_mode": True}]
)
def test_other_poolings_stay(pool: dict[str, Any]) -> None:
    model = stem(**pool)
    (site,) = BNReLUPatches(pool=True).sites(model)
    assert site.passed_by == ("2",)
    (site,) = BNReLUPatches(pool=True).sites(stem(**STEM_POOL))
    assert site.passed_by == ("2", "3")
