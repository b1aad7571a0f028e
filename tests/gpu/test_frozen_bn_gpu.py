"""frozen_bn on a GPU: the kernels against their reference, in a captured graph, compiled, and in whole backbones."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.frozen_bn import (
    FrozenBNSurgery,
    ScaleBias,
    scale_bias_add_relu,
    scale_bias_dual_relu,
    scale_bias_relu,
    twin,
)
from fasttrain.callbacks.frozen_bn.reference import TOLERANCE, normalized, reference

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    kernel = pytest.importorskip("fasttrain.callbacks.frozen_bn.kernel")
    if kernel.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


def feature_map(shape: tuple[int, ...], dtype: torch.dtype, last: bool = True) -> Tensor:
    x = torch.randn(shape, device="cuda").to(dtype)
    return x.contiguous(memory_format=LAST) if last else x


def constants(channels: int) -> ScaleBias:
    return ScaleBias(*torch.randn(2, channels, device="cuda"))


def double(folded: ScaleBias) -> ScaleBias:
    return ScaleBias(folded.scale.double(), folded.bias.double())


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7


def assert_all_forms_equal_the_reference(x: Tensor, z: Tensor) -> None:
    one, two = constants(x.shape[1]), constants(x.shape[1])
    x, z = x.requires_grad_(), z.requires_grad_()
    xd, zd = (t.detach().double().requires_grad_() for t in (x, z))
    forms: list[tuple[Tensor, tuple[Any, ...]]] = [
        (scale_bias_relu(x, one), (xd, double(one))),
        (scale_bias_add_relu(x, one, z), (xd, double(one), zd)),
        (scale_bias_dual_relu(x, one, z, two), (xd, double(one), zd, double(two))),
    ]
    for found, arguments in forms:
        inputs = 1 if len(arguments) == 2 else 2
        wanted = reference(*arguments)
        assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
        with torch.no_grad():
            value = normalized(xd, double(one))
            if len(arguments) == 3:
                value = value + zd
            elif len(arguments) == 4:
                value = value + normalized(zd, double(two))
            dy = torch.randn_like(x) * (value.abs() > 1e-4)
        gradients = torch.autograd.grad(found, [x, z][:inputs], dy)
        for one_gradient, exact in zip(
            gradients, torch.autograd.grad(wanted, [xd, zd][:inputs], dy.double()), strict=True
        ):
            assert_close(one_gradient, exact, TOLERANCE[x.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 5), channels=st.one_of(st.integers(1, 70), st.sampled_from([64, 256, 2048])),
    height=st.integers(1, 40), width=st.integers(1, 40), last=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(
    dtype: torch.dtype, batch: int, channels: int, height: int, width: int, last: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = (batch, channels, height, width)
    assert_all_forms_equal_the_reference(feature_map(shape, dtype, last), feature_map(shape, dtype, not last))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tiles(dtype: torch.dtype) -> None:
    shape = (4, 256, 100, 100)
    assert_all_forms_equal_the_reference(feature_map(shape, dtype), feature_map(shape, dtype))


def test_more_elements_than_32_bits_count() -> None:
    shape = (33, 64, 1024, 1024)
    assert math.prod(shape) > 2**31
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=LAST).requires_grad_()
    one = ScaleBias(torch.arange(64.0, device="cuda") - 32, torch.zeros(64, device="cuda"))
    y = scale_bias_relu(x, one)
    assert torch.equal(y[-1, :, -1, -1].float(), one.scale.clamp(min=0))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx[-1, :, -1, -1].float(), one.scale.clamp(min=0))


def test_nothing_waits_for_the_gpu() -> None:
    x = feature_map((2, 64, 8, 8), torch.bfloat16).requires_grad_()
    z, one = feature_map((2, 64, 8, 8), torch.bfloat16).requires_grad_(), constants(64)
    scale_bias_add_relu(x, one, z, twice=True).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = scale_bias_add_relu(x, one, z, twice=True)
        (y + twin(y)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def frozen_backbone(name: str = "resnet18") -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = getattr(resnet, name)(weights=None, norm_layer=FrozenBatchNorm2d)
    for module in net.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.weight.uniform_(0.2, 0.7)
            module.bias.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return net.cuda().to(memory_format=LAST)


def gradients_of(model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        y = model(images)
    (y.float().square().mean() * 1024).backward()  # a loss scale
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_backbones(name: str, dtype: torch.dtype | None) -> None:
    """Relative norms: a rounding lets some elements pass a ReLU on one side only.

    A plain FrozenBatchNorm2d gives float32, so that fewer do; it is compared with its output rounded, as ours is.
    """
    model, images = frozen_backbone(name), torch.randn(4, 3, 160, 160, device="cuda").to(memory_format=LAST)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        wanted = gradients_of(model, images, None)
        norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]
        rounding = [norm.register_forward_hook(lambda m, x, y: y.to(dtype or y.dtype)) for norm in norms]
        plain = gradients_of(model, images, dtype)
        for hook in rounding:
            hook.remove()
        surgery = FrozenBNSurgery(model)
        assert surgery.apply()
        found = gradients_of(model, images, dtype)
        surgery.undo()
        again = gradients_of(model, images, None)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert off(found[0], wanted[0]) < 3 * off(plain[0], wanted[0]) + 1e-3
    for key, gradient in found[1].items():
        assert off(gradient, wanted[1][key]) < 3 * off(plain[1][key], wanted[1][key]) + 1e-3, key
    torch.testing.assert_close(again[0], wanted[0], rtol=1e-4, atol=1e-5)


def test_in_a_captured_graph() -> None:
    model, images = frozen_backbone(), torch.randn(4, 3, 64, 64, device="cuda").to(memory_format=LAST)
    FrozenBNSurgery(model).apply()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients_of(model, images, torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradients = gradients_of(model, images, torch.bfloat16)
    images.copy_(torch.randn_like(images))
    graph.replay()
    replayed = output.clone(), {key: gradient.clone() for key, gradient in gradients.items()}
    eager = gradients_of(model, images, torch.bfloat16)
    torch.testing.assert_close(replayed[0], eager[0], rtol=0.02, atol=1e-3)
    for key, gradient in replayed[1].items():
        assert off(gradient, eager[1][key]) < 0.02, key


def test_a_graph_reads_statistics_that_were_loaded_later_and_folded_eagerly() -> None:
    model = nn.Sequential(FrozenBatchNorm2d(8), nn.ReLU()).cuda()
    x = feature_map((2, 8, 4, 4), torch.float32)
    FrozenBNSurgery(model).apply()
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
        wanted = model(x).clone()
        graph.replay()
    torch.testing.assert_close(y, wanted)


def test_captured_before_anything_was_folded() -> None:
    model = nn.Sequential(FrozenBatchNorm2d(8), nn.ReLU()).cuda()
    x = feature_map((2, 8, 4, 4), torch.float32)
    with torch.no_grad():
        scale_bias_relu(x, constants(8))  # the kernel is compiled
    FrozenBNSurgery(model).apply()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    with torch.no_grad():
        eager = model(x)
    graph.replay()
    torch.testing.assert_close(y, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    model, images = frozen_backbone(), torch.randn(4, 3, 64, 64, device="cuda").to(memory_format=LAST)
    FrozenBNSurgery(model).apply()
    wanted = gradients_of(model, images, dtype)
    compiled = torch.compile(model, fullgraph=True)
    found = gradients_of(compiled, images, dtype)
    assert off(found[0], wanted[0]) < 0.05
    for one, other in zip(found[1].values(), wanted[1].values(), strict=True):
        assert off(one, other) < 0.2


def test_a_step_keeps_less_memory_than_torchvisions() -> None:
    model, images = frozen_backbone("resnet50"), torch.randn(8, 3, 224, 224, device="cuda").to(memory_format=LAST)

    def peak() -> int:
        gradients_of(model, images, torch.bfloat16)
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients_of(model, images, torch.bfloat16)
        return torch.cuda.max_memory_allocated()

    plain = peak()
    FrozenBNSurgery(model).apply()
    assert peak() < plain
