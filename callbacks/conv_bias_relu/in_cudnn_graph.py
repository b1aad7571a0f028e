"""cuDNN's convolution with bias in one kernel where no ReLU follows: PyTorch has no operator for it, cuDNN's graphs do.

Needs the package nvidia-cudnn-frontend, https://github.com/NVIDIA/cudnn-frontend, whose import name is cudnn. A shape
is planned once, outside of a capture: its kernels are compiled then.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.conv_bias_relu import in_cudnn, in_triton
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.refusals import is_capturing, is_refusal

TRIED = 5
"""Plans that are timed for a shape, with torch.backends.cudnn.benchmark; without, cuDNN's first choice is taken."""
MOST_SHAPES = 64
"""That get a plan; where images are of ever other sizes, compiling for each would take longer than it saves."""

_plans: dict[object, "Plan | None"] = {}
_handles: dict[torch.device, Any] = {}


class Plan:
    """A graph for one shape, and which of cuDNN's ways to execute it is taken."""

    def __init__(self, x: Tensor, weight: Tensor, y_shape: Sequence[int], geometry: Geometry) -> None:
        import cudnn  # type: ignore[import-not-found]

        self._cudnn, self._handle = cudnn, _handle(cudnn, x)
        kind = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[x.dtype]
        exact = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=self._handle, io_data_type=kind, intermediate_data_type=exact, compute_data_type=exact
        )
        shapes = {"x": x.shape, "weight": weight.shape, "bias": (1, len(weight), 1, 1)}
        x_in, weight_in, bias_in = self._inputs = [
            self.graph.tensor(name=name, dim=list(shape), stride=_strides(shape), data_type=kind)
            for name, shape in shapes.items()
        ]
        product = self.graph.conv_fprop(
            image=x_in, weight=weight_in, pre_padding=list(geometry.padding), post_padding=list(geometry.padding),
            stride=list(geometry.stride), dilation=list(geometry.dilation),
        )  # fmt: skip
        self._output = self.graph.bias(input=product, bias=bias_in)
        self._output.set_output(True).set_data_type(kind)
        self._output.set_dim(list(y_shape)).set_stride(_strides(y_shape))
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.index = 0

    def run(self, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, index: int | None = None) -> None:
        """Write the output to y, on the current stream."""
        index = self.index if index is None else index
        size = max(1, self.graph.get_workspace_size_plan_at_index(index))
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        self._cudnn.set_stream(handle=self._handle, stream=_stream(x))
        # Detached: the package reads them through DLPack, which refuses what needs a gradient.
        given = dict(zip(self._inputs, (t.detach() for t in (x, weight, bias)), strict=True))
        self.graph.execute_plan_at_index(given | {self._output: y}, workspace, index, handle=self._handle)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, rounded_bias: Tensor, geometry: Geometry, relu: bool
) -> Tensor:  # fmt: skip
    """Return the output, channels_last; arguments as of `in_cudnn.forward`, which is asked where a ReLU follows.

    Done by `in_triton`: what cuDNN refuses; a shape that comes up in a capture first; float32, which a graph's kernels
    would round to TF32; and with torch.backends.cudnn.benchmark, shapes for which it measures faster.
    """
    if relu:
        return in_cudnn.forward(x, weight, bias, rounded_bias, geometry, relu)
    # What cuDNN assumes of every pointer; parameters that lie in one buffer may begin anywhere.
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, weight, rounded_bias))
    plan = _plan(x, weight, bias, rounded_bias, geometry) if aligned else None
    if plan is None:
        return in_triton.forward(x, weight, bias, rounded_bias, geometry, relu)
    y = _empty_output(x, weight, geometry)
    plan.run(x, weight, rounded_bias, y)
    return y


def _plan(x: Tensor, weight: Tensor, bias: Tensor, rounded_bias: Tensor, geometry: Geometry) -> Plan | None:
    benchmark = torch.backends.cudnn.benchmark
    key = (x.shape, weight.shape, x.dtype, x.device, geometry, benchmark)
    if key in _plans:
        return _plans[key]
    if x.dtype.itemsize != 2 or geometry.groups != 1 or len(_plans) >= MOST_SHAPES or is_capturing(x):
        return None
    two_kernels = partial(in_triton.forward, x, weight, bias, rounded_bias, geometry, False)
    try:
        _plans[key] = _chosen(x, weight, rounded_bias, geometry, two_kernels if benchmark else None)
    except Exception as error:  # the package's own classes depend on its version
        if not is_refusal(error, x):
            raise
        _plans[key] = None
    return _plans[key]


def _chosen(
    x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry, rival: Callable[[], object] | None
) -> Plan | None:  # fmt: skip
    """Return cuDNN's first plan that runs; with a rival the fastest of the first, if it is faster than that."""
    y = _empty_output(x, weight, geometry)
    plan = Plan(x, weight, y.shape, geometry)
    times: dict[int, float] = {}
    for index in range(plan.graph.get_execution_plan_count()):
        if len(times) == (TRIED if rival else 1):
            break
        try:
            plan.graph.build_plan_at_index(index)
            plan.run(x, weight, bias, y, index)
            times[index] = _best_ms(partial(plan.run, x, weight, bias, y, index)) if rival else 0.0
        except Exception as error:
            if not is_refusal(error, x):
                raise
    plan.index = min(times, key=times.__getitem__, default=0)
    if not times or (rival is not None and times[plan.index] >= _best_ms(rival)):
        return None
    return plan


def _handle(cudnn: Any, x: Tensor) -> Any:
    if x.device not in _handles:
        with torch.cuda.device_of(x):
            _handles[x.device] = cudnn.create_handle()
    return _handles[x.device]


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of channels_last, also for sides of one element, where PyTorch leaves them open."""
    _, channels, height, width = shape
    return [height * width * channels, 1, width * channels, channels]


def _empty_output(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    shape = geometry.output_shape(x, weight)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _stream(x: Tensor) -> int:
    return int(torch.cuda.current_stream(x.device).cuda_stream)


def _best_ms(call: Callable[[], object], repeats: int = 3) -> float:
    """Return milliseconds of a call on the GPU, the best of some after a first."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # a millisecond, in which Python gets ahead: its time is none of the kernel's
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times)
