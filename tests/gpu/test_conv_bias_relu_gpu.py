"""conv_bias_relu on a GPU: every tier against the reference, in a captured graph, compiled, in RetinaNet's heads."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fasttrain.callbacks.conv_bias_relu import ConvBiasReLUPatches, conv_bias, conv_bias_relu
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.reference import TOLERANCE, reference
from fasttrain.callbacks.conv_bias_relu.tiers import tier_for
from fasttrain.callbacks.relu_bias_backward import column_sums, relu_bias_backward
from fasttrain.patches import PatchSurgery
from fasttrain.recipes.retinanet.head import Head

pytestmark = pytest.mark.gpu

LAST = torch.channels_last
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLAIN = Geometry((1, 1), (1, 1), (1, 1), 1)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_form = pytest.mark.parametrize("relu", [True, False], ids=["relu", "no relu"])


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    kernel = pytest.importorskip("fasttrain.callbacks.conv_bias_relu.kernel")
    if kernel.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def work(
    shape: tuple[int, int, int, int], outputs: int, geometry: Geometry, kernel: int, dtype: torch.dtype,
    last: bool = True,
) -> list[Tensor]:  # fmt: skip
    n, c, h, w = shape
    inputs = c // geometry.groups
    tensors = [
        torch.randn(n, c, h, w, device="cuda"),
        torch.randn(outputs, inputs, kernel, kernel, device="cuda") / (inputs * kernel**2) ** 0.5,
        torch.randn(outputs, device="cuda"),
    ]
    if last:
        tensors[:2] = [t.to(memory_format=LAST) for t in tensors[:2]]
    return [t.to(dtype).requires_grad_() for t in tensors]


def fused(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, relu: bool, tier: Any = "auto") -> Tensor:
    return (conv_bias_relu if relu else conv_bias)(x, weight, bias, *geometry, tier=tier)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm().clamp(min=1e-3))


def assert_equals_reference(tensors: list[Tensor], geometry: Geometry, relu: bool, tier: Any = "auto") -> None:
    exact = [t.detach().double().requires_grad_() for t in tensors]
    found = fused(*tensors, geometry, relu, tier)  # type: ignore[arg-type]
    before_relu = reference(*exact, geometry, False)  # type: ignore[arg-type]
    assert found.dtype == tensors[0].dtype
    tolerance = TOLERANCE[found.dtype]
    passed = found.detach() > 0 if relu else torch.ones_like(found, dtype=torch.bool)
    assert off(found, before_relu.relu() if relu else before_relu) <= tolerance
    # Rounding may let an element pass the ReLU on one side only, if it is next to zero. Gradients are those of ours.
    if relu and (other := passed != (before_relu > 0)).any():
        assert before_relu[other].abs().max() <= 4 * tolerance * before_relu.abs().max()
    g = torch.randn_like(found)
    gradients = torch.autograd.grad(found, tensors, g)
    wanted = torch.autograd.grad(before_relu, exact, g.double() * passed)
    for name, gradient, right in zip(("x", "weight", "bias"), gradients, wanted, strict=True):
        assert gradient.dtype == found.dtype
        assert off(gradient, right) <= tolerance, name


@each_dtype
@each_form
@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 4), channels=st.one_of(st.integers(1, 20), st.sampled_from([32, 64])),
    outputs=st.one_of(st.integers(1, 20), st.sampled_from([36, 64, 264])), height=st.integers(3, 30),
    width=st.integers(3, 30), kernel=st.sampled_from([1, 3]), stride=st.integers(1, 2), dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 1, 2]), last=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(
    dtype: torch.dtype, relu: bool, batch: int, channels: int, outputs: int, height: int, width: int, kernel: int,
    stride: int, dilation: int, groups: int, last: bool, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    geometry = Geometry((stride, stride), (kernel // 2, 1), (dilation, dilation), groups)
    if kernel == 3 and min(height + 2 * geometry.padding[0], width + 2) < 2 * dilation + 1:
        return
    shape = (batch, channels * groups, height, width)
    tensors = work(shape, outputs * groups, geometry, kernel, dtype, last)
    assert_equals_reference(tensors, geometry, relu)
    if last:
        assert_equals_reference(tensors, geometry, relu, "triton")


@each_dtype
@each_form
@pytest.mark.parametrize("tier", ["auto", "triton"])
def test_a_layer_of_the_heads(dtype: torch.dtype, relu: bool, tier: str) -> None:
    torch.manual_seed(0)
    assert_equals_reference(work((4, 256, 50, 50), 256, PLAIN, 3, dtype), PLAIN, relu, tier)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("outputs", [36, 2376])
def test_the_last_layer_of_the_heads(dtype: torch.dtype, outputs: int) -> None:
    torch.manual_seed(0)
    assert_equals_reference(work((2, 256, 25, 25), outputs, PLAIN, 3, dtype), PLAIN, relu=False)


def test_auto_takes_cudnn_for_relu() -> None:
    x, weight, _ = work((2, 64, 8, 8), 64, PLAIN, 3, torch.float16)
    assert tier_for("auto", x, weight, x.dtype, PLAIN, True) == "cudnn"
    assert tier_for("auto", x, weight, x.dtype, PLAIN, False) == ("cudnn_graph" if find_spec("cudnn") else "triton")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    """cuDNN's graphs, of which nothing is planned yet."""
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    from fasttrain.callbacks.conv_bias_relu import in_cudnn_graph

    monkeypatch.setattr(in_cudnn_graph, "_plans", {})
    monkeypatch.setattr(in_cudnn_graph, "TRIED", 2)
    return in_cudnn_graph


def planned(graph: Any) -> list[bool]:
    return [plan is not None for plan in graph._plans.values()]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("benchmark", [True, False])
@pytest.mark.parametrize(
    ("shape", "outputs", "kernel", "geometry"),
    [
        ((2, 256, 25, 25), 264, 3, PLAIN),
        ((2, 64, 13, 11), 36, 3, PLAIN._replace(stride=(2, 1))),
        ((3, 128, 7, 7), 64, 1, PLAIN._replace(padding=(0, 0))),
    ],
)
def test_cudnns_graphs(
    graph: Any, dtype: torch.dtype, benchmark: bool, shape: tuple[int, int, int, int], outputs: int, kernel: int,
    geometry: Geometry,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, allow_tf32=False):
        assert_equals_reference(work(shape, outputs, geometry, kernel, dtype), geometry, False, "cudnn_graph")
    assert len(planned(graph)) == 1
    if not benchmark:
        assert planned(graph) == [True], "these are kernels that it has"


def test_a_graph_of_cudnn_in_a_captured_graph(graph: Any) -> None:
    torch.manual_seed(0)
    x, weight, bias = (t.detach() for t in work((2, 64, 16, 16), 64, PLAIN, 3, torch.float16))
    other = x[:1].clone(memory_format=LAST)

    def call() -> list[Tensor]:
        return [conv_bias(x, weight, bias, padding=1, tier="cudnn_graph")]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.nn.functional.conv2d(other, weight, None, padding=1)
        conv_bias(other, weight, bias, padding=1, tier="triton")
    torch.cuda.current_stream().wait_stream(stream)
    assert planned(graph) == [True]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kept = [*call(), conv_bias(other, weight, bias, padding=1, tier="cudnn_graph")]
    assert planned(graph) == [True], "none is planned in a capture"
    for tensor in (x, other, bias):
        tensor.copy_(torch.randn_like(tensor))
    captured.replay()
    for value, y in zip((x, other), kept, strict=True):
        assert off(y, reference(value.double(), weight.double(), bias.double(), PLAIN, False)) < 2e-3


def test_not_a_number_goes_through_a_graph_of_cudnn_and_a_bias_may_begin_anywhere(graph: Any) -> None:
    x, weight, bias = (t.detach() for t in work((1, 64, 8, 8), 64, PLAIN, 3, torch.float16))
    x[0, 0, 0, 0] = torch.nan
    y = conv_bias(x, weight, bias, padding=1, tier="cudnn_graph")
    assert torch.equal(y.isnan(), reference(x, weight, bias, PLAIN, False).isnan())
    moved = torch.empty(65, device="cuda", dtype=torch.float16)[1:].copy_(bias)
    x.zero_()
    assert torch.equal(
        conv_bias(x, weight, moved, padding=1, tier="cudnn_graph"), conv_bias(x, weight, bias, padding=1, tier="triton")
    )


def test_apexs_operator_where_it_is() -> None:
    from fasttrain.callbacks.conv_bias_relu import in_apex

    if not in_apex.prove(in_apex.TRIAL).ok:
        pytest.skip(in_apex.prove(in_apex.TRIAL).reason)
    torch.manual_seed(0)
    tensors = work((2, 64, 25, 25), 64, PLAIN, 3, torch.float16)
    assert tier_for("apex", *tensors[:2], torch.float16, PLAIN, True) == "apex"
    assert_equals_reference(tensors, PLAIN, True, "apex")


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(40000, 256), (10000, 2376), (40000, 36), (1001, 3), (7, 1000)])
def test_the_pass_of_the_backward(dtype: torch.dtype, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    g, y = (
        torch.randn(rows, columns, device="cuda").to(dtype),
        torch.randn(rows, columns, device="cuda").relu().to(dtype),
    )
    masked, sums = relu_bias_backward(g, y)
    assert torch.equal(masked, torch.ops.aten.threshold_backward(g, y, 0))
    torch.testing.assert_close(sums.double(), masked.double().sum(0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(column_sums(g).double(), g.double().sum(0), rtol=1e-4, atol=1e-3)
    assert torch.equal(relu_bias_backward(g, y)[1], sums), "bit by bit"


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    g = torch.ones(2**25 + 3, 64, device="cuda", dtype=torch.bfloat16)
    g[-1] = 2
    masked, sums = relu_bias_backward(g, g)
    assert float(masked[-1].min()) == 2
    assert sums.tolist() == pytest.approx([len(g) + 1] * 64, rel=1e-6)


def heads() -> Head:
    torch.manual_seed(0)
    head = Head(64, 2, False, 9, 20).cuda().to(memory_format=LAST)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.05)
    return head


def pyramid() -> list[Tensor]:
    return [torch.randn(2, 64, side, side, device="cuda").to(memory_format=LAST) for side in (40, 20, 10, 5, 3)]


def run(head: Any, levels: list[Tensor], dtype: torch.dtype | None, cache: bool = True) -> dict[str, Tensor]:
    head.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None, cache_enabled=cache):
        outputs = [part for level in levels for part in head(level)]
    loss = torch.stack([part.float().square().mean() for part in outputs]).sum() * 64
    loss.backward()
    found = {name.removeprefix("_orig_mod."): p.grad for name, p in head.named_parameters()}
    return found | {"outputs": torch.cat([part.detach().flatten() for part in outputs])}


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [None, *DTYPES[1:]], ids=str)
def test_heads_shared_by_levels(dtype: torch.dtype | None, cache: bool) -> None:
    head, levels = heads(), pyramid()
    wanted, plain = run(head, levels, None), run(head, levels, dtype, cache)
    surgery = PatchSurgery(head, ConvBiasReLUPatches())
    assert len(surgery.apply()) == 6
    found = run(head, levels, dtype, cache)
    surgery.undo()
    for name, right in wanted.items():
        assert found[name].dtype == right.dtype or name == "outputs"
        assert off(found[name], right.double()) < 2 * off(plain[name], right.double()) + 1e-3, name
    again = run(head, levels, None)
    torch.testing.assert_close(again["outputs"], wanted["outputs"])


def test_a_weight_is_cast_once_for_all_levels() -> None:
    weight = torch.randn(8, 8, 3, 3, device="cuda", requires_grad=True)
    from fasttrain.callbacks.conv_bias_relu.conv import _cast_once

    with torch.autocast("cuda", torch.float16):
        one, other = (_cast_once(weight, torch.float16) for _ in range(2))
    assert one.dtype == torch.float16
    assert one.data_ptr() == other.data_ptr()
    (one.sum() + other.sum()).backward()
    assert weight.grad is not None
    assert float(weight.grad.min()) == 2


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_in_a_captured_graph(dtype: torch.dtype) -> None:
    head, levels = heads(), pyramid()
    PatchSurgery(head, ConvBiasReLUPatches()).apply()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(head, levels, dtype)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run(head, levels, dtype)
    with torch.no_grad():
        for tensor in (*levels, *head.parameters()):
            tensor.copy_(torch.randn_like(tensor) * 0.1)
    graph.replay()
    replayed = {name: value.clone() for name, value in kept.items()}
    for name, value in run(head, levels, dtype).items():
        assert off(replayed[name], value.double()) < 0.01, name


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    head, levels = heads(), pyramid()
    PatchSurgery(head, ConvBiasReLUPatches()).apply()
    wanted = run(head, levels, dtype)
    found = run(torch.compile(head, fullgraph=True), levels, dtype)
    for name, value in wanted.items():
        assert off(found[name], value.double()) < 0.05, name


def test_nothing_waits_for_the_gpu() -> None:
    x, weight, bias = work((2, 64, 8, 8), 64, PLAIN, 3, torch.float16)

    def step() -> None:
        conv_bias(conv_bias_relu(x, weight, bias, padding=1), weight, bias, padding=1).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
