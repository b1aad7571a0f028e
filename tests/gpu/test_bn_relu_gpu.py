"""bn_relu on a GPU: the kernels against their reference, in a captured graph, compiled, and in whole networks."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import resnet

from fasttrain.callbacks.bn_relu import (
    BNReLUSurgery,
    batch_norm_add_relu,
    batch_norm_dual_relu,
    batch_norm_relu,
    twin,
)
from fasttrain.callbacks.bn_relu.reference import SUM_TOLERANCE, TOLERANCE, normalized, reference, updated

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ("relu", "add", "dual")


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    tile = pytest.importorskip("fasttrain.callbacks.bn_relu.tile")
    if tile.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


@pytest.fixture
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def feature_map(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "last") -> Tensor:
    if layout == "strided":
        return torch.randn(*shape[:3], 2 * shape[3], device="cuda").to(dtype)[..., ::2]
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=LAST)


def norm_of(channels: int, **options: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, device="cuda", **options)
    for value in norm.parameters():
        nn.init.uniform_(value, 0.2, 1.5)
    return norm


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-6


def ours(form: str, x: Tensor, z: Tensor, one: nn.BatchNorm2d, two: nn.BatchNorm2d) -> Tensor:
    if form == "relu":
        return batch_norm_relu(x, one)
    return batch_norm_add_relu(x, one, z) if form == "add" else batch_norm_dual_relu(x, one, z, two)


def assert_equals_the_reference(form: str, x: Tensor, z: Tensor, momentum: float | None = 0.1) -> None:
    one, two = norm_of(x.shape[1], momentum=momentum), norm_of(x.shape[1])
    x, z = (t.detach().requires_grad_() for t in (x, z))
    xd, zd = (t.detach().double().requires_grad_() for t in (x, z))
    parameters = [one.weight, one.bias, two.weight, two.bias]
    in_double = [p.detach().double().requires_grad_() for p in parameters]
    leaves = {"relu": [x, *parameters[:2]], "add": [x, z, *parameters[:2]], "dual": [x, z, *parameters]}[form]
    exact_leaves = {"relu": [xd, *in_double[:2]], "add": [xd, zd, *in_double[:2]], "dual": [xd, zd, *in_double]}[form]
    found = ours(form, x, z, one, two)
    assert type(found.grad_fn).__name__ == "BatchNormReLUBackward", "the kernels were taken"
    wanted = reference(
        xd, *in_double[:2], one.eps, None if form == "relu" else zd, *(in_double[2:] if form == "dual" else ())
    )
    assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
    with torch.no_grad():
        value = normalized(xd, *in_double[:2])
        if form != "relu":
            value = value + (normalized(zd, *in_double[2:]) if form == "dual" else zd)
        dy = feature_map(tuple(x.shape), x.dtype) * (value.abs() > 1e-4)
    exact = torch.autograd.grad(wanted, exact_leaves, dy.double())
    for gradient, expected, leaf in zip(torch.autograd.grad(found, leaves, dy), exact, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert_close(gradient, expected, TOLERANCE[x.dtype] if leaf.dim() == 4 else SUM_TOLERANCE)
    zeros = torch.zeros(x.shape[1], dtype=torch.float64, device="cuda")
    mean, var = updated(xd.detach(), zeros, zeros + 1, 1, momentum)
    assert one.running_mean is not None
    assert one.running_var is not None
    assert_close(one.running_mean, mean, SUM_TOLERANCE)
    assert_close(one.running_var, var, SUM_TOLERANCE)
    assert int(one.num_batches_tracked or 0) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(2, 5), channels=st.one_of(st.integers(2, 70), st.sampled_from([64, 96, 136, 256, 2048])),
    height=st.integers(2, 40), width=st.integers(2, 40),
    layouts=st.tuples(*[st.sampled_from(["last", "strided"])] * 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(
    form: str, dtype: torch.dtype, batch: int, channels: int, height: int, width: int, layouts: tuple[str, str],
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    shape = (batch, channels, height, width)
    assert_equals_the_reference(form, feature_map(shape, dtype, layouts[0]), feature_map(shape, dtype, layouts[1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 112, 112), (32, 256, 56, 56), (64, 2048, 7, 7), (4, 48, 200, 200)], ids=str)
def test_real_shapes(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert_equals_the_reference(form, feature_map(shape, dtype), feature_map(shape, dtype), momentum=None)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    torch.manual_seed(0)
    x = (torch.randn(32, 64, 40, 40, device="cuda") + 1000).contiguous(memory_format=LAST)
    norm = norm_of(64, momentum=1.0)
    y = batch_norm_relu(x, norm)
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_var.double(), x.double().var((0, 2, 3)), rtol=1e-4, atol=0)
    assert_close(y.detach(), reference(x.double(), norm.weight.double(), norm.bias.double()).detach(), 1e-3)


def test_more_elements_than_32_bits_count() -> None:
    shape = (33, 64, 1024, 1024)
    assert math.prod(shape) > 2**31
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=LAST)
    x[:16], x[16:] = 1, -1
    norm = nn.BatchNorm2d(64, device="cuda")
    y = batch_norm_relu(x.requires_grad_(), norm)
    wanted = torch.full((64,), (17 / 16) ** 0.5, device="cuda")
    torch.testing.assert_close(y[0, :, 0, 0].float(), wanted, rtol=1e-2, atol=0)
    assert float(y[-1].max()) == 0
    dx, dbias = torch.autograd.grad(y, (x, norm.bias), torch.ones_like(y))
    torch.testing.assert_close(dbias, torch.full((64,), 16.0 * 2**20, device="cuda"))
    assert bool(dx[-1, :, -1, -1].isfinite().all())


def test_the_same_input_gives_the_same_bits() -> None:
    x, z = feature_map((32, 256, 28, 28), torch.float16), feature_map((32, 256, 28, 28), torch.float16)
    norm = norm_of(256)

    def run() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = batch_norm_add_relu(leaf, norm, z)
        return [y, *torch.autograd.grad(y, (leaf, norm.weight, norm.bias), x)]

    for one, two in zip(run(), run(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_nothing_waits_for_the_gpu(momentum: float | None) -> None:
    x = feature_map((2, 64, 8, 8), torch.bfloat16).requires_grad_()
    z, norm = feature_map((2, 64, 8, 8), torch.bfloat16).requires_grad_(), norm_of(64, momentum=momentum)
    batch_norm_add_relu(x, norm, z, twice=True).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = batch_norm_add_relu(x, norm, z, twice=True)
        (y + twin(y)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", ["add", "dual"])
def test_the_gradients_of_an_output_and_its_twin_add_up(form: str) -> None:
    torch.manual_seed(0)
    x, z = (feature_map((8, 64, 14, 14), torch.float32).requires_grad_() for _ in range(2))
    one, two = norm_of(64), norm_of(64)
    if form == "add":
        y = batch_norm_add_relu(x, one, z, twice=True)
    else:
        y = batch_norm_dual_relu(x, one, z, two, twice=True)
    found = torch.autograd.grad((y.square() + twin(y).sin()).sum(), (x, z, one.weight))
    plain = ours(form, x, z, one, two)
    wanted = torch.autograd.grad((plain.square() + plain.sin()).sum(), (x, z, one.weight))
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def network(name: str = "resnet18") -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = getattr(resnet, name)(weights=None)
    return net.cuda().to(memory_format=LAST)


def gradients_of(model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        y = model(images)
    (y.float().square().mean() * 1024).backward()  # a loss scale
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.usefixtures("_without_tf32")
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_networks(name: str, dtype: torch.dtype | None) -> None:
    """Relative norms, against those of the plain network: a rounding lets elements pass a ReLU on one side only.

    The exact one is in float64: of two networks in float32 neither is nearer to the truth than the other.
    """
    model, images = network(name), torch.randn(16, 3, 96, 96, device="cuda").to(memory_format=LAST)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    wanted = gradients_of(exact, images.double(), None)
    rounded = gradients_of(plain, images, dtype)
    assert BNReLUSurgery(model).apply()
    found = gradients_of(model, images, dtype)
    assert off(found[0], wanted[0]) < 3 * off(rounded[0], wanted[0]) + 1e-3
    for key, gradient in found[1].items():
        assert off(gradient, wanted[1][key]) < 3 * off(rounded[1][key], wanted[1][key]) + 5e-3, key
    for key, value in exact.state_dict().items():
        if "running" in key:
            assert off(model.state_dict()[key], value) < 3 * off(plain.state_dict()[key], value) + 1e-3, key
        elif "tracked" in key:
            assert int(model.state_dict()[key]) == 1


def test_in_a_captured_graph() -> None:
    model, images = network(), torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=LAST)
    BNReLUSurgery(model).apply()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients_of(model, images, torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradients = gradients_of(model, images, torch.bfloat16)
    assert int(model.state_dict()["bn1.num_batches_tracked"]) == 3
    images.copy_(torch.randn_like(images))
    before = copy.deepcopy(model.state_dict())
    graph.replay()
    replayed = output.clone(), {key: gradient.clone() for key, gradient in gradients.items()}
    after = copy.deepcopy(model.state_dict())
    assert int(after["bn1.num_batches_tracked"]) == 4
    assert not torch.equal(after["bn1.running_mean"], before["bn1.running_mean"])
    model.load_state_dict(before)
    eager = gradients_of(model, images, torch.bfloat16)
    torch.testing.assert_close(replayed[0], eager[0], rtol=0.02, atol=1e-2)
    for key, gradient in replayed[1].items():
        assert off(gradient, eager[1][key]) < 0.02, key
    for key, value in model.state_dict().items():
        if "running" in key:
            torch.testing.assert_close(after[key], value, rtol=1e-3, atol=1e-4)


def test_compiled() -> None:
    model, images = network(), torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=LAST)
    BNReLUSurgery(model).apply()
    other = copy.deepcopy(model)
    wanted = gradients_of(model, images, None)
    found = gradients_of(torch.compile(other, fullgraph=True), images, None)  # type: ignore[arg-type]
    assert off(found[0], wanted[0]) < 0.02
    for one, two in zip(found[1].values(), wanted[1].values(), strict=True):
        assert off(one, two) < 0.1


def test_a_step_keeps_hardly_more_memory_than_the_plain_one() -> None:
    model, images = network("resnet50"), torch.randn(8, 3, 224, 224, device="cuda").to(memory_format=LAST)

    def peak() -> int:
        gradients_of(model, images, torch.bfloat16)
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients_of(model, images, torch.bfloat16)
        return torch.cuda.max_memory_allocated()

    plain = peak()
    BNReLUSurgery(model).apply()
    assert peak() <= 1.05 * plain  # a bit for each element of a block's output
