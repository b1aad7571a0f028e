"""layer_norm_dropout on a GPU: the kernels against their reference, in a captured graph, compiled, in an encoder."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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
from fasttrain.callbacks.layer_norm_dropout.reference import TOLERANCE, reference
from fasttrain.measure import captured
from fasttrain.patches import PatchSurgery

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("x", "weight", "bias", "residual", "x_bias")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    kernel = pytest.importorskip("fasttrain.callbacks.layer_norm_dropout.kernel")
    if kernel.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, name: str = "") -> None:
    assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-6, name


def inputs_of(
    rows: int, hidden: int, dtype: torch.dtype, parameters: torch.dtype | None = None, without: Any = ()
) -> dict[str, Tensor | None]:
    made: dict[str, Tensor | None] = {}
    for name in NAMES:
        size = (rows, hidden) if name in ("x", "residual") else (hidden,)
        value = torch.randn(size, device="cuda") + (name == "weight")
        kind = dtype if len(size) == 2 else (parameters or dtype)
        made[name] = None if name in without else value.to(kind).requires_grad_()
    return made


def in_double(
    inputs: dict[str, Tensor | None], keep: Tensor | None, p: float, eps: float
) -> tuple[Tensor, list[Tensor]]:
    doubled = {name: None if t is None else t.detach().double().requires_grad_() for name, t in inputs.items()}
    y = reference(**doubled, keep=keep, p=p, eps=eps)  # type: ignore[arg-type]
    return y, [t for t in doubled.values() if t is not None]


def assert_equals_reference(inputs: dict[str, Tensor | None], p: float, twice: bool = False) -> None:
    x, seed = inputs["x"], draw_seed("cuda")
    assert x is not None
    found = dropout_add_layer_norm(**inputs, p=p, seed=seed, twice=twice, eps=1e-12)  # type: ignore[arg-type]
    keep = keep_mask(seed, x.shape, p) if p else None
    wanted, doubled = in_double(inputs, keep, p, 1e-12)
    assert found.dtype == x.dtype
    assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
    leaves = {name: t for name, t in inputs.items() if t is not None}
    dy, dy_twin = torch.randn(2, *x.shape, device="cuda").to(x.dtype)
    if twice:
        gradients = torch.autograd.grad([found, twin(found)], list(leaves.values()), [dy, dy_twin])
    else:
        gradients = torch.autograd.grad(found, list(leaves.values()), dy)
    exact = torch.autograd.grad(wanted, doubled, dy.double() + (dy_twin.double() if twice else 0))
    for (name, leaf), gradient, one in zip(leaves.items(), gradients, exact, strict=True):
        assert gradient.dtype == leaf.dtype
        assert_close(gradient, one, max(TOLERANCE[x.dtype], TOLERANCE[leaf.dtype]), name)


@every_dtype
@pytest.mark.parametrize("twice", [False, True])
def test_bert_large(dtype: torch.dtype, twice: bool) -> None:
    torch.manual_seed(0)
    assert_equals_reference(inputs_of(16384, 1024, dtype), 0.1, twice)
    assert_equals_reference(inputs_of(16384, 1024, dtype, torch.float32), 0.1, twice)


@every_dtype
@settings(max_examples=40, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 40), st.integers(1000, 3000)),
    hidden=st.one_of(st.integers(32, 400), st.sampled_from([512, 768, 1000, 1021, 1600])),
    without=st.frozensets(st.sampled_from(NAMES[1:])), p=st.sampled_from([0.0, 0.1, 0.5]), wide=st.booleans(),
    twice=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(
    dtype: torch.dtype, rows: int, hidden: int, without: frozenset[str], p: float, wide: bool, twice: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = inputs_of(rows, hidden, dtype, torch.float32 if wide else dtype, without)
    if rows:
        assert_equals_reference(inputs, p, twice)
    else:
        y = dropout_add_layer_norm(**inputs, p=p)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(y, [t for t in inputs.values() if t is not None], y)
        assert not any(gradient.any() for gradient in gradients)


@every_dtype
@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 2048, 3000, 4096, 5120, 8191, 8192])
def test_every_size_of_row(dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(0)
    if hidden < 8:  # a difference of nearly the same numbers: only the mask and the parameters are looked at
        y = dropout_add_layer_norm(**inputs_of(65, hidden, dtype), p=0.5)  # type: ignore[arg-type]
        assert y.isfinite().all()
        return
    assert_equals_reference(inputs_of(301, hidden, dtype), 0.1)
    assert dropout_add_layer_norm(torch.randn(2, 8193, device="cuda", dtype=dtype)).isfinite().all()


def test_more_elements_than_32_bits_count() -> None:
    rows, hidden = 2**21 + 7, 1024
    assert math.prod((rows, hidden)) > 2**31
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = torch.ones(rows, hidden, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.arange(hidden, device="cuda") % 2
    x.requires_grad_()
    y = dropout_add_layer_norm(x, residual=x.detach(), p=0.5)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    last, keep = x[-1].detach().double(), dx[-1] != 0
    assert 0.3 < float(keep.float().mean()) < 0.7
    assert_close(y[-1].detach(), reference(last, None, None, last, keep=keep, p=0.5), 0.1)


def test_the_same_seed_gives_the_same_bits() -> None:
    inputs, seed = inputs_of(5000, 1024, torch.bfloat16), draw_seed("cuda")
    runs = []
    for _ in range(3):
        y = dropout_add_layer_norm(**inputs, p=0.1, seed=seed)  # type: ignore[arg-type]
        runs.append([y, *torch.autograd.grad(y, list(inputs.values()), y)])  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))


def test_the_kernels_mask_has_the_rate() -> None:
    x = torch.ones(4096, 1024, device="cuda", requires_grad=True)
    z = torch.randn(4096, 1024, device="cuda")
    (dx,) = torch.autograd.grad(dropout_add_layer_norm(x, residual=z, p=0.1), x, torch.randn_like(x))
    dropped, count = float((dx == 0).sum()), x.numel()
    assert abs(dropped - 0.1 * count) < 6 * (0.09 * count) ** 0.5


class Step:
    """Forward and backward of one call, whose mask can be read off: a dropped element has no gradient."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = inputs_of(256, 1024, torch.float32)
        self.dy = torch.randn(256, 1024, device="cuda")

    def __call__(self) -> None:
        self.y = dropout_add_layer_norm(**self.inputs, p=0.25)  # type: ignore[arg-type]
        self.gradients = torch.autograd.grad(self.y, list(self.inputs.values()), self.dy)  # type: ignore[arg-type]

    def mask(self) -> Tensor:
        return self.gradients[0] != 0

    def assert_right(self) -> None:
        wanted, doubled = in_double(self.inputs, self.mask(), 0.25, 1e-5)
        assert_close(self.y.detach(), wanted.detach(), 1e-5)
        for found, exact in zip(self.gradients, torch.autograd.grad(wanted, doubled, self.dy.double()), strict=True):
            assert_close(found, exact, 1e-5)


def test_each_replay_of_a_captured_graph_has_another_mask() -> None:
    step = Step()
    replay = captured(step)
    masks = []
    for _ in range(3):
        replay()
        step.assert_right()
        masks.append(step.mask())
        assert 0.74 < float(masks[-1].float().mean()) < 0.76
    assert all(0.6 < float((masks[i] == masks[j]).float().mean()) < 0.65 for i, j in ((0, 1), (1, 2), (0, 2)))
    torch.manual_seed(5)
    replay()
    after_seed = step.y.detach().clone()
    replay()
    assert not torch.equal(step.y, after_seed)
    torch.manual_seed(5)
    replay()
    assert torch.equal(step.y, after_seed)


def test_nothing_waits_for_the_gpu() -> None:
    step = Step()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.assert_right()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_draws_the_same_mask(reentrant: bool) -> None:
    torch.manual_seed(0)
    module = DropoutAddLayerNorm(1024, p=0.5).cuda()
    x, dy = torch.randn(2, 64, 1024, device="cuda")
    x.requires_grad_()
    found = []
    for call in (module, lambda *a: checkpoint(module, *a, use_reentrant=reentrant)):
        module.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        y = call(x, x)
        y.backward(dy)
        found.append((y.detach(), module.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_strides_and_a_shared_weight_used_twice() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3, 256, device="cuda", dtype=torch.float16).transpose(0, 1).requires_grad_()
    z = torch.randn(3, 64, 512, device="cuda", dtype=torch.float16)[..., ::2].requires_grad_()
    weight, bias = (torch.randn(256, device="cuda").requires_grad_() for _ in range(2))
    inner = dropout_add_layer_norm(x, weight, bias, z)
    y = dropout_add_layer_norm(inner, weight, bias)
    xd, zd, wd, bd = (t.detach().double().requires_grad_() for t in (x, z, weight, bias))
    wanted = reference(reference(xd, wd, bd, zd), wd, bd)
    assert_close(y.detach(), wanted.detach(), 4e-3)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, z, weight, bias], dy)
    for one, exact in zip(found, torch.autograd.grad(wanted, [xd, zd, wd, bd], dy.double()), strict=True):
        assert_close(one, exact, 1e-2)


def encoder(p: float) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=p, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2).cuda()


def run(model: Any, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, list[Tensor]]:
    parameters = list(model.parameters())
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        y = model(x)
    torch.manual_seed(7)
    dy = torch.randn(y.shape, device="cuda").bfloat16()  # the same for every dtype of y
    return y.detach(), list(torch.autograd.grad(y, parameters, dy.to(y.dtype)))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-3))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_an_encoder(dtype: torch.dtype | None) -> None:
    model, x = encoder(0.0), torch.randn(4, 64, 256, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        wanted, plain = run(model, x, None), run(model, x, dtype)
        surgery = PatchSurgery(model, LayerNormDropoutPatches())
        assert len(surgery.apply()) == 2
        found = run(model, x, dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert found[0].dtype == (dtype or torch.float32), "autocast's dtype, where nn.LayerNorm gives float32"
    assert off(found[0], wanted[0]) < 3 * off(plain[0], wanted[0]) + 1e-4
    for one, plain_one, exact in zip(found[1], plain[1], wanted[1], strict=True):
        assert off(one, exact) < 3 * off(plain_one, exact) + max(1e-3, torch.finfo(found[0].dtype).eps)


def test_compiled() -> None:
    model, x = encoder(0.0), torch.randn(4, 64, 256, device="cuda")
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    layer: Any = model.layers[0]
    wanted = run(layer, x, torch.bfloat16)
    found = run(torch.compile(layer, fullgraph=True), x, torch.bfloat16)
    assert off(found[0], wanted[0]) < 0.02
    assert all(off(one, other) < 0.1 for one, other in zip(found[1], wanted[1], strict=True))


def test_a_step_keeps_less_memory() -> None:
    x = torch.randn(16, 512, 256, device="cuda")

    def peak(model: nn.Module) -> int:
        run(model, x, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(model, x, torch.bfloat16)
        return torch.cuda.max_memory_allocated()

    model = encoder(0.1)
    plain = peak(model)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert peak(model) < plain
