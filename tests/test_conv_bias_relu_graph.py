"""conv_bias by cuDNN's graphs, with a package in the place of cuDNN's that computes with PyTorch and has accidents."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu import conv_bias
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.reference import TOLERANCE, reference

pytest.importorskip("triton")
from fasttrain.callbacks.conv_bias_relu import in_cudnn, in_cudnn_graph, in_triton, refusals

LAST = torch.channels_last
PLAIN = Geometry((1, 1), (1, 1), (1, 1), 1)
STREAM = 7


@dataclass
class FakeTensor:
    """A tensor of a graph, which is described bit by bit."""

    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: Any = None
    computed: Callable[[dict[int, Tensor]], Tensor] | None = None

    def set_output(self, value: bool) -> "FakeTensor":
        return self

    def set_data_type(self, value: Any) -> "FakeTensor":
        self.data_type = value
        return self

    def set_dim(self, value: list[int]) -> "FakeTensor":
        self.dim = value
        return self

    def set_stride(self, value: list[int]) -> "FakeTensor":
        self.stride = value
        return self

    __hash__ = object.__hash__


class FakeCuDNN:
    """The package, with its plans: what is in `unbuildable` or `failing` by index does not work."""

    data_type = SimpleNamespace(HALF="half", BFLOAT16="bfloat16", FLOAT="float")
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")
    plans = 8

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.handles: list[str] = []
        self.executed: list[int] = []
        self.stream: Any = None
        self.unbuildable: set[int] = set()
        self.failing: set[int] = set()
        self.refusal: Exception | None = None

    def create_handle(self) -> str:
        self.handles.append("a handle")
        return "a handle"

    def set_stream(self, handle: str, stream: int) -> None:
        assert handle == "a handle"
        self.stream = stream

    def pygraph(self, **options: Any) -> "FakeGraph":
        assert options["intermediate_data_type"] == options["compute_data_type"] == "float"
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]


class FakeGraph:
    def __init__(self, package: FakeCuDNN) -> None:
        self.package, self.built = package, set[int]()

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: Any) -> FakeTensor:
        return FakeTensor(dim, stride, data_type)

    def conv_fprop(
        self, image: FakeTensor, weight: FakeTensor, pre_padding: list[int], post_padding: list[int],
        stride: list[int], dilation: list[int],
    ) -> FakeTensor:  # fmt: skip
        assert pre_padding == post_padding
        return FakeTensor(computed=lambda given: F.conv2d(
            given[id(image)].float(), given[id(weight)].float(), None, stride, pre_padding, dilation))  # fmt: skip

    def bias(self, input: FakeTensor, bias: FakeTensor) -> FakeTensor:
        assert input.computed is not None
        product = input.computed
        return FakeTensor(computed=lambda given: product(given) + given[id(bias)].float().view(1, -1, 1, 1))

    def validate(self) -> None:
        if self.package.refusal is not None:
            raise self.package.refusal

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "fallback"]

    def check_support(self) -> None: ...

    def get_execution_plan_count(self) -> int:
        return self.package.plans

    def build_plan_at_index(self, index: int) -> None:
        if index in self.package.unbuildable:
            raise RuntimeError("no kernel for this GPU")
        self.built.add(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return index

    def execute_plan_at_index(self, given: Any, workspace: Tensor, index: int, handle: str) -> None:
        assert self.package.stream == STREAM
        assert index in self.built
        assert workspace.numel() >= index
        if index in self.package.failing:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        assert not any(value.requires_grad for value in given.values()), "which DLPack refuses"
        for described, value in given.items():
            if value.dim() == 4:
                assert described.dim == list(value.shape)
                assert described.stride[1] == 1
        self.package.executed.append(index)
        by_id = {id(described): value for described, value in given.items()}
        (output,) = [described for described in given if described.computed is not None]
        by_id[id(output)].copy_(output.computed(by_id))


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeCuDNN:
    package = FakeCuDNN()
    monkeypatch.setitem(sys.modules, "cudnn", package)  # type: ignore[arg-type]
    monkeypatch.setattr(in_cudnn_graph, "_plans", {})
    monkeypatch.setattr(in_cudnn_graph, "_handles", {})
    monkeypatch.setattr(in_cudnn_graph, "_stream", lambda x: STREAM)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return package


def work(
    shape: tuple[int, int, int, int] = (2, 8, 5, 4), outputs: int = 16, kernel: int = 3,
    dtype: torch.dtype = torch.float16,
) -> list[Tensor]:  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(shape).to(memory_format=LAST)
    weight = (torch.randn(outputs, shape[1], kernel, kernel) / (shape[1] * kernel**2) ** 0.5).to(memory_format=LAST)
    return [t.to(dtype) for t in (x, weight, torch.randn(outputs))]


def forward(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry = PLAIN) -> Tensor:
    return in_cudnn_graph.forward(x, weight, bias, bias, geometry, False)


def assert_right(y: Tensor, *tensors: Tensor, geometry: Geometry = PLAIN) -> None:
    wanted = reference(*(t.detach().double() for t in tensors), geometry, False)  # type: ignore[misc]
    assert y.is_contiguous(memory_format=LAST)
    assert float((y.detach().double() - wanted).norm() / wanted.norm()) < TOLERANCE[y.dtype]


def in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "is_capturing", lambda x: True)
    monkeypatch.setattr(in_cudnn_graph, "is_capturing", lambda x: True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", [PLAIN, Geometry((2, 1), (0, 1), (1, 2), 1)])
def test_equals_the_reference_and_is_differentiated(
    monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN, dtype: torch.dtype, geometry: Geometry
) -> None:
    monkeypatch.setattr("fasttrain.callbacks.conv_bias_relu.conv.tier_for", lambda *_: "cudnn_graph")
    # Which Triton's interpreter would get wrong in bfloat16.
    monkeypatch.setattr(
        "fasttrain.callbacks.conv_bias_relu.eager.column_sums", lambda g, tier: g.sum(0, dtype=torch.float32)
    )
    tensors = [t.requires_grad_() for t in work(dtype=dtype)]
    y = conv_bias(*tensors, *geometry)  # type: ignore[misc]
    assert cudnn.executed
    assert_right(y, *tensors, geometry=geometry)
    wanted = reference(*tensors, geometry, False)  # type: ignore[arg-type]
    dy = torch.randn_like(y)
    for one, other in zip(*(torch.autograd.grad(t, tensors, dy) for t in (y, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.1)


def test_a_pointwise_weight_is_described_as_channels_last(cudnn: FakeCuDNN) -> None:
    x, weight, bias = work(kernel=1)
    geometry = PLAIN._replace(padding=(0, 0))
    assert_right(forward(x, weight, bias, geometry), x, weight, bias, geometry=geometry)
    (plan,) = in_cudnn_graph._plans.values()
    assert plan is not None
    assert [described.stride for described in plan._inputs] == [[160, 1, 32, 8], [8, 1, 8, 8], [16, 1, 16, 16]]


def test_a_shape_is_planned_once(cudnn: FakeCuDNN) -> None:
    x, weight, bias = work()
    for _ in range(3):
        assert_right(forward(x, weight, bias), x, weight, bias)
    assert len(cudnn.graphs) == len(cudnn.handles) == 1
    assert cudnn.executed == [0] * 4, "once to see whether it runs"
    forward(x[:1], weight, bias)
    forward(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert len(cudnn.graphs) == 3
    assert len(cudnn.handles) == 1


def test_cudnns_first_plan_that_runs_is_taken(cudnn: FakeCuDNN) -> None:
    cudnn.unbuildable, cudnn.failing = {0}, {1}
    x, weight, bias = work()
    assert_right(forward(x, weight, bias), x, weight, bias)
    assert cudnn.executed == [2, 2]
    assert cudnn.graphs[0].built == {1, 2}, "the others are not compiled"


def timed(monkeypatch: pytest.MonkeyPatch, two_kernels_ms: float, plans_ms: dict[int, float]) -> list[Any]:
    seen: list[Any] = []

    def best_ms(call: Any) -> float:
        call()
        seen.append(call)
        return two_kernels_ms if call.func is in_triton.forward else plans_ms[call.args[-1]]

    monkeypatch.setattr(in_cudnn_graph, "_best_ms", best_ms)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    return seen


def test_in_benchmark_mode_the_fastest_of_the_first_plans_is_taken(
    monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN
) -> None:
    cudnn.unbuildable = {1}
    seen = timed(monkeypatch, 3.0, {0: 2.0, 2: 2.5, 3: 1.0, 4: 2.0, 5: 2.0})
    x, weight, bias = work()
    assert_right(forward(x, weight, bias), x, weight, bias)
    assert cudnn.executed[-1] == 3
    assert len(seen) == in_cudnn_graph.TRIED + 1
    forward(x, weight, bias)
    assert len(seen) == in_cudnn_graph.TRIED + 1, "once"


def test_in_benchmark_mode_it_has_to_be_faster_than_two_kernels(
    monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN
) -> None:
    timed(monkeypatch, 0.9, dict.fromkeys(range(8), 1.0))
    x, weight, bias = work()
    forward(x, weight, bias)
    tried = len(cudnn.executed)
    assert_right(forward(x, weight, bias), x, weight, bias)
    assert len(cudnn.executed) == tried


@pytest.mark.parametrize("how", ["refusal", "unbuildable", "failing", "missing"])
def test_what_it_refuses_is_done_in_two_kernels_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN, how: str
) -> None:
    if how == "missing":
        monkeypatch.setitem(sys.modules, "cudnn", None)
    elif how == "refusal":
        cudnn.refusal = NotImplementedError("CUDNN_STATUS_NOT_SUPPORTED")
    else:
        setattr(cudnn, how, set(range(cudnn.plans)))
    x, weight, bias = work()
    for _ in range(2):
        assert_right(forward(x, weight, bias), x, weight, bias)
    assert list(in_cudnn_graph._plans.values()) == [None]
    assert len(cudnn.graphs) == (how != "missing")
    assert not cudnn.executed


BROKEN = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("an illegal memory access was encountered"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
]


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_what_is_no_refusal_is_raised(cudnn: FakeCuDNN, error: Exception) -> None:
    cudnn.refusal = error
    with pytest.raises(type(error), match=str(error)):
        forward(*work())  # type: ignore[arg-type]
    assert not in_cudnn_graph._plans


def test_in_a_capture_only_plans_of_the_warm_up_are_taken(monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN) -> None:
    x, weight, bias = work()
    forward(x, weight, bias)
    in_a_capture(monkeypatch)
    assert_right(forward(x, weight, bias), x, weight, bias)
    assert cudnn.executed == [0, 0, 0]
    assert_right(forward(x[:1], weight, bias), x[:1], weight, bias)
    assert len(cudnn.executed) == 3
    assert len(in_cudnn_graph._plans) == 1, "and another time it is asked"


def test_what_is_not_asked_at_all(monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN) -> None:
    x, weight, bias = work(dtype=torch.float32)
    assert_right(forward(x, weight, bias), x, weight, bias)
    x, weight, bias = work()
    two = PLAIN._replace(groups=2)
    half = weight[:, :4].contiguous(memory_format=LAST)
    assert_right(forward(x, half, bias, two), x, half, bias, geometry=two)
    monkeypatch.setattr(in_cudnn_graph, "MOST_SHAPES", 0)
    assert_right(forward(x, weight, bias), x, weight, bias)
    assert not cudnn.graphs


def test_a_parameter_that_begins_anywhere(cudnn: FakeCuDNN) -> None:
    x, weight, bias = work()
    buffer = torch.empty(17, dtype=torch.float16)
    moved = buffer[1:].copy_(bias)
    assert_right(forward(x, weight, moved), x, weight, bias)
    assert not cudnn.graphs, "nor tried: a kernel that reads where it must not ends everything"
    assert_right(forward(x, weight, bias), x, weight, bias)
    assert len(cudnn.executed) == 2


def test_with_a_relu_pytorchs_operator_is_asked(monkeypatch: pytest.MonkeyPatch, cudnn: FakeCuDNN) -> None:
    x, weight, bias = work()
    monkeypatch.setattr(
        torch, "cudnn_convolution_relu", lambda x, w, b, s, p, d, g: F.conv2d(x, w, b, s, p, d, g).relu()
    )
    monkeypatch.setattr(in_cudnn, "_refused", set())
    y = in_cudnn_graph.forward(x, weight, bias, bias, PLAIN, True)
    assert float(y.min()) == 0
    assert not cudnn.graphs


@pytest.mark.parametrize("error", BROKEN[1:], ids=lambda error: type(error).__name__)
def test_pytorchs_operator_refusing_is_told_from_a_broken_gpu(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    x, weight, bias = work()

    def fail(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(torch, "cudnn_convolution_relu", fail)
    monkeypatch.setattr(in_cudnn, "_refused", set())
    with pytest.raises(type(error)):
        in_cudnn.forward(x, weight, bias, bias, PLAIN, True)
    assert not in_cudnn._refused


def test_pytorchs_operator_failing_in_a_capture_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = work()

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", fail)
    monkeypatch.setattr(in_cudnn, "_refused", set())
    in_a_capture(monkeypatch)
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureInvalidated"):
        in_cudnn.forward(x, weight, bias, bias, PLAIN, True)
    assert not in_cudnn._refused
