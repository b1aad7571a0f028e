"""focal_loss against its reference in float64, in both tiers, and what autograd may ask of it."""

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.ops import sigmoid_focal_loss as of_torchvision

from fasttrain.callbacks.focal_loss import FocalLoss, sigmoid_focal_loss
from fasttrain.callbacks.focal_loss.loss import _rows
from fasttrain.callbacks.focal_loss.reference import LOSS_TOLERANCE, TOLERANCE, reference
from fasttrain.callbacks.focal_loss.tiers import tier_for
from fasttrain.errors import OptimizationError
from fasttrain.recipes.retinanet.loss import focal_loss as of_recipe

pytest.importorskip("triton")
from fasttrain.callbacks.focal_loss import in_torch, in_triton
from fasttrain.callbacks.focal_loss.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])


def some_logits(
    batch: int, anchors: Sequence[int], classes: int, dtype: torch.dtype, spread: float = 4
) -> list[Tensor]:
    return [(torch.randn(batch, n, classes, device=DEVICE) * spread - 2).to(dtype) for n in anchors]


def some_targets(batch: int, anchors: int, classes: int, foreground: float = 0.2) -> Tensor:
    """About that share of foreground, and a tenth ignored."""
    share = torch.rand(batch, anchors, device=DEVICE)
    targets = torch.randint(classes, (batch, anchors), device=DEVICE)
    return targets.masked_fill(share > foreground, -1).masked_fill(share > 0.9, -2)


def loss_and_gradients(loss: Any, levels: Sequence[Tensor], factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    leaves = [level.detach().clone().requires_grad_() for level in levels]
    value = loss(leaves)
    (value * factor).backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return value.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_equals_reference(
    found: tuple[Tensor, list[Tensor]], levels: Sequence[Tensor], targets: Tensor, alpha: float, gamma: float,
    factor: float = 1.0,
) -> None:  # fmt: skip
    dtype = levels[0].dtype
    wanted = loss_and_gradients(lambda x: reference(x, targets, alpha, gamma), [x.double() for x in levels], factor)
    as_background = reference([x.detach().double() for x in levels], targets.clamp(max=-1), alpha, gamma)
    assert abs(float(found[0]) - float(wanted[0])) <= LOSS_TOLERANCE[dtype] * float(wanted[0] + as_background)
    largest = max(float(gradient.abs().max()) for gradient in wanted[1])
    for one, other in zip(found[1], wanted[1], strict=True):
        smallest = 6e-8 if dtype == torch.float16 else 0
        assert float((one.double() - other).abs().max()) <= TOLERANCE[dtype] * largest + smallest


@both_tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 3), anchors=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    classes=st.one_of(st.integers(1, 20), st.sampled_from([80, 91, 264])), alpha=st.sampled_from([0.25, 0.5, 0.9]),
    gamma=st.sampled_from([2.0, 2.0, 0.0, 1.0, 1.5, 5.0]), factor=st.sampled_from([1.0, 1024.0, -0.3]),
    small=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_loss_and_gradients_equal_the_reference(
    tier: Any, dtype: torch.dtype, batch: int, anchors: list[int], classes: int, alpha: float, gamma: float,
    factor: float, small: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    levels = some_logits(batch, anchors, classes, dtype)
    targets = some_targets(batch, sum(anchors), classes)
    targets = targets.int() if small else targets
    found = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, alpha, gamma, tier=tier), levels, factor)
    assert_equals_reference(found, levels, targets, alpha, gamma, factor)


@settings(max_examples=8, deadline=None)
@given(
    tile_bytes=st.sampled_from([16, 64, 256]), batch=st.integers(1, 3),
    anchors=st.lists(st.integers(1, 9), min_size=1, max_size=4), classes=st.sampled_from([1, 3, 8]),
)  # fmt: skip
def test_tiles_are_dealt_out_to_few_programs_each_once(
    tile_bytes: int, batch: int, anchors: list[int], classes: int
) -> None:
    levels = some_logits(batch, anchors, classes, torch.float32)
    targets = some_targets(batch, sum(anchors), classes)
    gradients = [torch.full_like(level, torch.nan) for level in levels]
    loss, used = in_triton.forward(
        levels, targets, (targets >= 0).sum(dim=1), torch.tensor(3.0, device=DEVICE), 0.25, 2.0, gradients,
        in_triton.Tiling(tile_bytes=tile_bytes, terms=0),
    )  # fmt: skip
    assert float(used) == 3
    assert_equals_reference((loss, gradients), levels, targets, 0.25, 2.0, 3.0)


def test_float64_is_differentiated_rightly() -> None:
    torch.manual_seed(0)
    levels = [torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 2)]
    targets = some_targets(2, 7, 3, 0.4).cpu()
    for gamma in (2.0, 0.7):
        assert torch.autograd.gradcheck(
            lambda *x, gamma=gamma: sigmoid_focal_loss(x, targets, gamma=gamma), levels, nondet_tol=0
        )
        found = loss_and_gradients(lambda x, gamma=gamma: sigmoid_focal_loss(x, targets, gamma=gamma), levels)
        assert found[0].dtype == torch.float64
        assert_equals_reference(found, levels, targets, 0.25, gamma)


@both_tiers
def test_without_foreground_the_sum_is_over_one(tier: Any) -> None:
    levels = some_logits(2, [9], 4, torch.float32)
    targets = torch.full((2, 9), -1, device=DEVICE)
    found = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, tier=tier), levels)
    assert float(found[0]) > 0
    assert_equals_reference(found, levels, targets, 0.25, 2.0)


@both_tiers
def test_ignored_anchors_count_nothing_whatever_they_hold(tier: Any) -> None:
    levels = some_logits(2, [9], 8, torch.float32)
    targets = some_targets(2, 9, 8, 0.5)
    targets[:, 3:6] = -2
    clean = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, tier=tier), levels)
    levels[0][:, 3] = torch.nan
    levels[0][:, 4] = torch.inf
    loss, (gradient,) = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, tier=tier), levels)
    assert torch.equal(loss, clean[0])
    assert torch.equal(gradient, clean[1][0])
    assert not gradient[:, 3:6].any()
    nothing = torch.full_like(targets, -2)
    loss, (gradient,) = loss_and_gradients(lambda x: sigmoid_focal_loss(x, nothing, tier=tier), levels)
    assert float(loss) == 0
    assert not gradient.any()


@both_tiers
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e14), (torch.float16, 65504.0)], ids=str)
@pytest.mark.parametrize("gamma", [2.0, 0.0, 1.5])
def test_large_logits_stay_finite(tier: Any, dtype: torch.dtype, largest: float, gamma: float) -> None:
    values = torch.tensor([-largest, -1e4, -100, -88, -44, -43, -20, 20, 43, 44, 88, 100, 1e4], device=DEVICE)
    levels = [values.repeat(2, 3, 1).to(dtype)]
    targets = torch.tensor([[-1, 0, 5], [12, 11, -1]], device=DEVICE)
    loss, (gradient,) = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, gamma=gamma, tier=tier), levels)
    assert gradient.isfinite().all()
    wanted = loss_and_gradients(lambda x: reference(x, targets, gamma=gamma), [levels[0].double()])
    assert float(loss) == pytest.approx(float(wanted[0]), rel=1e-5)
    torch.testing.assert_close(gradient.double(), wanted[1][0].nan_to_num(), rtol=2e-3, atol=1e-6)


@both_tiers
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("target", [-1, 0])
def test_a_loss_scaler_sees_what_is_not_finite(tier: Any, bad: float, target: int) -> None:
    levels = some_logits(1, [4], 8, torch.float16)
    levels[0][0, 2, 3] = bad
    targets = torch.full((1, 4), target, device=DEVICE)
    loss, (gradient,) = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, tier=tier), levels)
    assert not loss.isfinite()
    assert not gradient[0, 2, 3].isfinite()
    gradient[0, 2, 3] = 0
    assert gradient.isfinite().all()


@both_tiers
def test_a_target_that_is_no_class_makes_the_loss_nan(tier: Any) -> None:
    targets = torch.tensor([[-1, 8]], device=DEVICE)
    assert sigmoid_focal_loss(some_logits(1, [2], 8, torch.float32), targets, tier=tier).isnan()


@both_tiers
def test_a_heads_output_is_taken_as_it_is(tier: Any) -> None:
    torch.manual_seed(0)
    head = nn.Conv2d(3, 2 * 5, 3).to(DEVICE, memory_format=torch.channels_last)
    images = [torch.randn(2, 3, *size, device=DEVICE) for size in ((7, 9), (4, 3))]
    targets = some_targets(2, (5 * 7 + 2 * 1) * 2, 5)
    rows = _rows(head(images[0].contiguous(memory_format=torch.channels_last)), 5)
    assert rows.shape == (2, 70, 5)
    assert rows._base is not None, "no copy of what lies in NHWC"

    def gradient(loss: Any, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        head.zero_grad()
        value = loss([head(x.contiguous(memory_format=layout)) for x in images])
        value.backward()
        assert head.weight.grad is not None
        return value.detach(), head.weight.grad.clone()

    def wanted(levels: list[Tensor]) -> Tensor:
        return reference([x.permute(0, 2, 3, 1).reshape(2, -1, 5) for x in levels], targets)

    def ours(levels: list[Tensor]) -> Tensor:
        return sigmoid_focal_loss(levels, targets, num_classes=5, tier=tier)

    expected = gradient(wanted, torch.contiguous_format)
    for layout in (torch.channels_last, torch.contiguous_format):
        for one, other in zip(gradient(ours, layout), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@both_tiers
@pytest.mark.parametrize("first", [0, 1, 3])
def test_views_of_larger_tensors(tier: Any, first: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(3, 20, 8, device=DEVICE)
    parts = [whole[:, first : first + 6], whole[1:, 7:12].repeat_interleave(2, 0)[:3], whole.transpose(1, 2)[:, :2, :8]]
    targets = some_targets(3, 26, 8)[::1, ::2]
    levels = [part.detach() for part in parts]
    leaf = whole.clone().requires_grad_()
    views = [leaf[:, first : first + 6], leaf[1:, 7:12].repeat_interleave(2, 0)[:3], leaf.transpose(1, 2)[:, :2, :8]]
    sigmoid_focal_loss(views, targets, tier=tier).backward()
    other = whole.clone().requires_grad_()
    views = [other[:, first : first + 6], other[1:, 7:12].repeat_interleave(2, 0)[:3], other.transpose(1, 2)[:, :2, :8]]
    reference(views, targets).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=1e-7)
    assert_equals_reference(
        loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets, tier=tier), levels), levels, targets, 0.25, 2.0
    )


@both_tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_gradient_is_the_same_bit_by_bit_whatever_was_expected(tier: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    levels, targets = some_logits(2, [30, 7], 8, dtype), some_targets(2, 37, 8)
    loss = FocalLoss(tier=tier).to(torch.float16)  # which must not make a float16 of the factor
    found = [loss_and_gradients(lambda x: loss(x, targets), levels, factor) for factor in (65536.0, 65536.0, 1.0, 1.0)]
    for first, second in (found[:2], found[2:]):
        assert torch.equal(first[0], second[0])
        assert all(map(torch.equal, first[1], second[1]))
    assert_equals_reference(found[0], levels, targets, 0.25, 2.0, 65536.0)
    assert float(loss._expected) == 1


@both_tiers
def test_an_expected_factor_leaves_nothing_to_do(tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, targets = some_logits(1, [9], 8, torch.float32), some_targets(1, 9, 8, 0.9)
    expected = torch.tensor(3.0, device=DEVICE)
    leaf = levels[0].clone().requires_grad_()
    loss = sigmoid_focal_loss([leaf], targets, expected=expected, tier=tier)
    (kept,) = loss.grad_fn.gradients  # type: ignore[union-attr]
    kept.fill_(5)
    (loss * 3).backward()
    assert leaf.grad is not None
    assert (leaf.grad == 5).all(), "the backward took what lay there"
    leaf.grad = None
    loss = sigmoid_focal_loss([leaf], targets, expected=expected, tier=tier)
    loss.grad_fn.gradients[0].fill_(5)  # type: ignore[union-attr]
    (loss * 4).backward()
    assert not (leaf.grad == 5).any()
    assert float(expected) == 4


@both_tiers
def test_a_second_backward_computes_again(tier: Any) -> None:
    leaf = some_logits(1, [9], 8, torch.float32)[0].requires_grad_()
    targets = some_targets(1, 9, 8, 0.5)
    loss = sigmoid_focal_loss([leaf], targets, tier=tier)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert torch.equal(second, kept)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    leaf = some_logits(1, [9], 8, torch.float32)[0].requires_grad_()
    loss = sigmoid_focal_loss([leaf], some_targets(1, 9, 8))
    with pytest.raises(OptimizationError) as caught:
        torch.autograd.grad(loss, leaf, create_graph=True)
    assert str(caught.value) == (
        "focal_loss: a gradient that can be differentiated again was asked for (create_graph=True), and this loss has "
        "no second derivative; compute it by fasttrain.callbacks.focal_loss.reference."
    )


@both_tiers
def test_in_place_the_gradients_take_the_logits_memory(tier: Any) -> None:
    torch.manual_seed(0)
    levels, targets = some_logits(2, [30, 7], 8, torch.float32), some_targets(2, 37, 8, 0.5)
    module = FocalLoss(in_place=True, tier=tier)
    for factor in (1.0, 8.0, 8.0):
        leaves = [level.clone().requires_grad_() for level in levels]
        inner = [leaf * 1 for leaf in leaves]
        memory: dict[int, int] = {}
        for i, tensor in enumerate(inner):
            tensor.register_hook(lambda gradient, i=i, memory=memory: memory.update({i: gradient.data_ptr()}))
        loss = module(inner, targets)
        (loss * factor).backward()
        assert memory == {i: tensor.data_ptr() for i, tensor in enumerate(inner)}
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert_equals_reference((loss.detach(), gradients), levels, targets, 0.25, 2.0, factor)


def test_in_place_is_known_to_autograd_and_backward_runs_once() -> None:
    leaf = some_logits(1, [9], 8, torch.float32)[0].requires_grad_()
    targets = some_targets(1, 9, 8)
    inner = leaf * 1
    other = inner.square().sum()
    loss = sigmoid_focal_loss([inner], targets, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    torch.autograd.grad(loss, inner, retain_graph=True)
    with pytest.raises(OptimizationError) as caught:
        torch.autograd.grad(loss, inner)
    assert str(caught.value) == (
        "focal_loss: a second backward through the same loss (retain_graph=True) needs the logits, and with "
        "in_place=True the gradients have taken their place; use in_place=False."
    )


@both_tiers
def test_without_gradients_the_loss_alone_is_computed(tier: Any) -> None:
    levels, targets = some_logits(2, [9], 8, torch.float16), some_targets(2, 9, 8)
    leaf = levels[0].clone().requires_grad_()
    with torch.no_grad():
        loss = sigmoid_focal_loss([leaf], targets, in_place=True, tier=tier)
    assert torch.equal(leaf, levels[0])
    assert not loss.requires_grad
    assert not sigmoid_focal_loss(levels, targets, tier=tier).requires_grad
    assert torch.equal(loss, sigmoid_focal_loss([leaf], targets, tier=tier).detach())


def test_a_drop_in_for_the_recipes_and_torchvisions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 40, 6) * 3
    labels = torch.randint(6, (3, 5))
    matched = torch.randint(-2, 5, (3, 40))
    targets = torch.where(matched >= 0, labels.gather(1, matched.clamp(min=0)), matched)

    def by_torchvision(levels: list[Tensor]) -> Tensor:
        one_hot = torch.zeros_like(levels[0])
        one_hot[targets >= 0] = nn.functional.one_hot(targets[targets >= 0], 6).float()
        sums = of_torchvision(levels[0], one_hot).sum(dim=2).masked_fill(targets == -2, 0).sum(dim=1)
        return (sums / (targets >= 0).sum(dim=1).clamp(min=1)).mean()

    ours = loss_and_gradients(lambda x: sigmoid_focal_loss(x, targets), [logits])
    for theirs in (lambda x: of_recipe(x[0], labels, matched), by_torchvision):
        wanted = loss_and_gradients(theirs, [logits])
        torch.testing.assert_close(ours[0], wanted[0])
        torch.testing.assert_close(ours[1], wanted[1], rtol=1e-4, atol=1e-7)


def test_in_a_compiled_function() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    head, loss = nn.Conv2d(3, 2 * 5, 3), FocalLoss(gamma=1.5)
    images, targets = torch.randn(2, 3, 6, 6), some_targets(2, 32, 5).cpu()

    def step() -> Tensor:
        return loss([head(images)], targets, 5) * 4

    def gradient(function: Any) -> tuple[Tensor, Tensor]:
        head.zero_grad()
        value = function()
        value.backward()
        assert head.weight.grad is not None
        return value.detach(), head.weight.grad.clone()

    wanted = gradient(step)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for factor in (4, 1):
        loss._expected.fill_(factor)
        for one, other in zip(gradient(compiled), wanted, strict=True):
            torch.testing.assert_close(one, other)
        assert float(loss._expected) == 4
    with torch.no_grad():
        torch.testing.assert_close(compiled(), wanted[0])


def test_under_autocast() -> None:
    head, images = nn.Conv2d(3, 2 * 5, 3), torch.randn(2, 3, 6, 6)
    targets = some_targets(2, 32, 5).cpu()
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(images)
        loss = sigmoid_focal_loss([logits], targets, num_classes=5)
        wanted = reference([logits.detach().permute(0, 2, 3, 1).reshape(2, -1, 5).double()], targets)
        loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(wanted), rel=LOSS_TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    ("levels", "targets", "options", "words"),
    [
        ([torch.zeros(2, 3, 4)], torch.zeros(2, 3), {}, "targets are integers of shape (images, anchors)"),
        ([torch.zeros(2, 3, 4)], torch.zeros(6).long(), {}, "these are torch.int64 of shape (6,)."),
        ([], torch.zeros(2, 3).long(), {}, "these are none."),
        ([torch.zeros(1, 3, 4)], torch.zeros(2, 3).long(), {}, "the targets (2, 3); these are (1, 3, 4)."),
        ([torch.zeros(0, 3, 4)], torch.zeros(0, 3).long(), {}, "at least one, for the images of"),
        ([torch.zeros(1, 3, 4), torch.zeros(1, 3, 5)], torch.zeros(1, 6).long(), {}, "have 4 of torch.float32, 5 "),
        ([torch.zeros(1, 3, 4), torch.zeros(1, 3, 4).half()], torch.zeros(1, 6).long(), {}, "and dtype; these have "),
        ([torch.zeros(1, 3, 4).long()], torch.zeros(1, 3).long(), {}, "floating point; these are torch.int64."),
        ([torch.zeros(1, 3, 4)], torch.zeros(1, 4).long(), {}, "for 4 anchors and logits for 3 ((1, 3, 4))."),
        ([torch.zeros(1, 8, 3, 3)], torch.zeros(1, 9).long(), {}, "was given as num_classes=None."),
        ([torch.zeros(1, 8, 3, 3)], torch.zeros(1, 9).long(), {"num_classes": 3}, "have 8 channels, a multiple of"),
        ([torch.zeros(1, 3, 4)], torch.zeros(1, 3, device="meta").long(), {}, "targets are on meta and logits on cpu."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(levels: list[Tensor], targets: Tensor, options: Any, words: str) -> None:
    with pytest.raises(OptimizationError) as caught:
        sigmoid_focal_loss(levels, targets, **options)
    assert str(caught.value).startswith("focal_loss: ")
    assert words in str(caught.value)


def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tier_for("auto", torch.zeros(1, 1, 1)) is in_torch, "on a CPU"
    on_gpu = torch.empty(1, 1, 1, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", property(lambda self: torch.device("cuda")))
    assert tier_for("auto", on_gpu) is in_triton
    assert tier_for("auto", torch.empty(1, 1, 2**15, device="meta")) is in_torch, "a row is larger than a tile"
    assert tier_for("auto", on_gpu.double()) is in_torch
    monkeypatch.setattr("fasttrain.callbacks.focal_loss.tiers.triton_runs", lambda: False)
    assert tier_for("auto", on_gpu) is in_torch


def test_a_tier_that_cannot_compute_is_refused() -> None:
    targets = torch.zeros(1, 3).long()
    with pytest.raises(OptimizationError) as caught:
        sigmoid_focal_loss([torch.zeros(1, 3, 4).double()], targets, tier="triton")
    assert str(caught.value) == (
        "focal_loss: tier='triton' has no kernel for 4 classes in torch.float64 on cpu: it takes float16, bfloat16 and "
        "float32, up to 64 KiB an anchor, on an NVIDIA GPU; tier='auto' takes PyTorch instead."
    )
    with pytest.raises(OptimizationError) as caught:
        sigmoid_focal_loss([torch.zeros(1, 3, 4)], targets, tier="tritn")  # type: ignore[arg-type]
    assert str(caught.value) == "focal_loss: there is no tier 'tritn'; did you mean 'triton'?"


def test_vectors_are_as_wide_as_rows_and_addresses_allow() -> None:
    width = in_triton._vector_width
    half, single = torch.float16, torch.float32
    assert width([torch.empty(2, 5, 264, dtype=half)]) == 8
    assert width([torch.empty(2, 5, 264, dtype=single)]) == 4
    assert width([torch.empty(2, 5, 20, dtype=half)]) == 4
    assert width([torch.empty(2, 5, 91, dtype=half)]) == 1
    assert width([torch.empty(2 * 5 * 8 + 2, dtype=half)[2:].view(2, 5, 8)]) == 2
    assert width([torch.empty(2, 44, dtype=half)[:, :40].view(2, 5, 8)]) == 4
    assert width([torch.empty(1, 44, dtype=half)[:, :40].view(1, 5, 8)]) == 8, "one image has no stride"
    assert width([torch.empty(2, 5, 8, dtype=half), torch.empty(81, dtype=half)[1:].view(2, 5, 8)]) == 1


def test_the_module_has_no_state() -> None:
    loss = FocalLoss(0.5, 1.5, in_place=True)
    assert not loss.state_dict()
    other = pickle.loads(pickle.dumps(copy.deepcopy(loss)))
    assert str(other) == "FocalLoss(alpha=0.5, gamma=1.5, in_place=True, tier='auto')"
