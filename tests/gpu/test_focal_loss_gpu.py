"""focal_loss's kernel on a GPU: against its reference, and in all that a training step does with it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.callbacks.focal_loss import FocalLoss, sigmoid_focal_loss
from fasttrain.callbacks.focal_loss.reference import LOSS_TOLERANCE, TOLERANCE, reference

pytestmark = pytest.mark.gpu

LEVELS = tuple(9 * side**2 for side in (20, 10, 5, 3, 1))
HALVES = [torch.float16, torch.bfloat16]


def work(dtype: torch.dtype, classes: int = 264, batch: int = 3) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    levels = [(torch.randn(batch, n, classes, device="cuda") * 4 - 3).to(dtype) for n in LEVELS]
    targets = torch.full((batch, sum(LEVELS)), -1, device="cuda")
    for start, value in ((5, -2), (40, 0), (1000, classes - 1), (3000, 17 % classes), (sum(LEVELS) - 9, 1 % classes)):
        targets[:, start : start + 9] = value
    targets[-1].clamp_(max=-1)  # an image without foreground
    return levels, targets


def loss_and_gradients(loss: Any, levels: Sequence[Tensor], factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    leaves = [level.detach().clone().requires_grad_() for level in levels]
    value = loss(leaves)
    (value * factor).backward()
    return value.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_equals_reference(
    found: tuple[Tensor, list[Tensor]], levels: Sequence[Tensor], targets: Tensor, gamma: float, factor: float
) -> None:
    dtype = levels[0].dtype
    exact = [level.double() for level in levels]
    loss, gradients = loss_and_gradients(lambda x: reference(x, targets, 0.25, gamma), exact, factor)
    as_background = reference(exact, targets.clamp(max=-1), 0.25, gamma)
    assert abs(float(found[0]) - float(loss)) <= LOSS_TOLERANCE[dtype] * float(loss + as_background)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for one, other in zip(found[1], gradients, strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).abs().max()) <= TOLERANCE[dtype] * largest


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(("classes", "gamma"), [(264, 2.0), (264, 1.5), (91, 2.0), (20, 0.0), (1, 2.0), (1203, 2.0)])
def test_loss_and_gradients_equal_the_reference(dtype: torch.dtype, classes: int, gamma: float) -> None:
    levels, targets = work(dtype, classes)
    for chosen in (targets, targets.int()):
        module = FocalLoss(gamma=gamma, tier="triton")
        for factor in (1.0, 2048.0, 2048.0, -3.0):
            found = loss_and_gradients(lambda x, m=module, t=chosen: m(x, t), levels, factor)
            assert_equals_reference(found, levels, targets, gamma, factor)


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float16, 6e-8), (torch.bfloat16, 1e-12)], ids=str)
def test_elements_are_right_by_themselves(dtype: torch.dtype, smallest: float) -> None:
    """Relative to each gradient, for logits at which background is usual."""
    x = torch.linspace(-9, 9, 264 * 8, device="cuda").to(dtype).view(1, 8, 264)
    targets = torch.full((1, 8), -1, device="cuda")
    _, (found,) = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets), [x], 2.0**15)
    _, (wanted,) = loss_and_gradients(lambda x: reference(x, targets), [x.double()], 2.0**15)
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(found.double(), wanted, rtol=1.1 * rounding + 1e-4, atol=smallest)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_gradient_is_the_same_whatever_was_expected(dtype: torch.dtype) -> None:
    levels, targets = work(dtype)
    module = FocalLoss()
    found = [loss_and_gradients(lambda x: module(x, targets), levels, f) for f in (65536.0, 65536.0, 1.0, 1.0)]
    for first, second in (found[:2], found[2:]):
        assert torch.equal(first[0], second[0])
        assert all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_place(dtype: torch.dtype) -> None:
    levels, targets = work(dtype)
    module = FocalLoss(in_place=True)
    for factor in (1.0, 1.0, 256.0, 256.0):
        leaves = [level.clone().requires_grad_() for level in levels]
        inner = [leaf * 1 for leaf in leaves]
        memory: list[bool] = []
        for tensor in inner:
            address = tensor.data_ptr()
            tensor.register_hook(lambda g, address=address, memory=memory: memory.append(g.data_ptr() == address))
        loss = module(inner, targets)
        (loss * factor).backward()
        assert memory == [True] * len(inner)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if dtype == torch.bfloat16 or factor == 1:  # float16 underflows before the first of another factor
            assert_equals_reference((loss.detach(), gradients), levels, targets, 2.0, factor)


def test_nothing_waits_for_the_gpu() -> None:
    levels, targets = work(torch.float16)
    module = FocalLoss()
    loss_and_gradients(lambda x: module(x, targets), levels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in (1.0, 4.0):
            loss_and_gradients(lambda x: module(x, targets), levels, factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph_it_follows_the_factor() -> None:
    levels, targets = work(torch.float16)
    leaves = [level.clone().requires_grad_() for level in levels]
    factor = torch.ones((), device="cuda")
    module = FocalLoss()

    def step() -> tuple[Tensor, list[Tensor]]:
        loss = module(leaves, targets)
        return loss, list(torch.autograd.grad(loss * factor, leaves))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradients = step()
    for value in (1.0, 1024.0, 1024.0, 2.0):
        factor.fill_(value)
        targets.copy_(targets.roll(1, dims=1))
        graph.replay()
        assert_equals_reference((loss, gradients), levels, targets, 2.0, value)
        assert float(module._expected) == value


def test_a_heads_output_under_autocast_and_compile() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    head = nn.Conv2d(16, 9 * 264, 3, padding=1).cuda().to(memory_format=torch.channels_last)
    features = [torch.randn(2, 16, n, n, device="cuda") for n in (12, 6)]
    features = [feature.contiguous(memory_format=torch.channels_last) for feature in features]
    targets = torch.randint(-2, 264, (2, 9 * (144 + 36)), device="cuda")
    ours = FocalLoss()

    def plain(levels: Sequence[Tensor], targets: Tensor, classes: int) -> Tensor:
        return reference([x.permute(0, 2, 3, 1).reshape(2, -1, classes).float() for x in levels], targets)

    def step(loss: Any) -> tuple[Tensor, Tensor]:
        head.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            value = loss([head(feature) for feature in features], targets, 264)
        (value * 8).backward()
        assert head.weight.grad is not None
        return value.detach(), head.weight.grad.clone()

    wanted = step(plain)
    for loss in (ours, torch.compile(ours, fullgraph=True)):
        for _ in range(2):
            found = step(loss)
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=0)
            torch.testing.assert_close(found[1], wanted[1], rtol=2e-2, atol=2e-2 * float(wanted[1].abs().max()))


def test_more_logits_than_an_int32_counts() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("takes 10 GB")
    torch.manual_seed(0)
    batch, anchors = 3, 2**31 // 264 // 3 + 100_000
    levels = torch.empty(batch, anchors, 264, device="cuda", dtype=torch.float16)
    for image in levels:
        image.normal_().sub_(3)
    assert levels.numel() > 2**31
    targets = torch.full((batch, anchors), -1, device="cuda")
    targets[:, -500:] = 263
    levels.requires_grad_()
    loss = sigmoid_focal_loss([levels], targets)
    (gradient,) = torch.autograd.grad(loss * 2.0**20, levels)
    tail = levels.detach()[:, -1000:].double().requires_grad_()
    wanted = reference([tail], targets[:, -1000:])
    (tail_gradient,) = torch.autograd.grad(wanted * 2.0**20, tail)
    assert float((gradient[:, -1000:] - tail_gradient).abs().max() / tail_gradient.abs().max()) < 1e-3
    assert loss.isfinite()
