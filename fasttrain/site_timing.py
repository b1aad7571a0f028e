"""Times the alternatives of one site against each other: plain, the compiler's, and the fused form.

Forward and backward over all calls that a step makes of the site, with the inputs that it makes them with. On a GPU
each alternative is captured as a CUDA graph, where all of them can be, so that what is compared is their kernels.
Inputs that fit the device's cache are found there, by all alternatives alike.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fasttrain.batches import map_tensors, tensors_in
from fasttrain.choices import ALTERNATIVES, BUDGET_SHORT, COMPILE, OURS, PLAIN
from fasttrain.measure import Timing, captured, sample_ms, summarize
from fasttrain.patches import PatchSite
from fasttrain.step_calls import Arguments, as_called, copied
from fasttrain.surgery import replace

SAMPLE_MS = 2.0
"""The least time of a sample: a shorter call is repeated in it, because events and clocks cost microseconds."""
GRAPH_MS = 0.5
"""The least time of a graph: launching one costs microseconds, so a shorter step is several times in it."""
MOST_IN_GRAPH = 50
ROUNDS, LEAST_ROUNDS = 6, 3
"""Of each alternative twice, forth and back; the least, where time is up."""
REASON_LENGTH = 200
IN_GRAPH = "replays of a CUDA graph"
EAGER = "calls"

Step = Callable[[], Any]


@dataclass(frozen=True)
class SiteTimes:
    """What came of one site."""

    times: dict[str, Timing]
    missing: dict[str, str]
    """Alternative -> why it has no time."""
    how: str
    compile_seconds: float | None
    """What making the compiler's alternative took, if it was made."""


def time_site(
    model: nn.Module, site: PatchSite, calls: Sequence[Arguments], device: str, seconds: float, compile_seconds: float
) -> SiteTimes:
    """Return the times of a site's alternatives.

    Args:
        model: a copy, on the device, as the run will have it, with no optimization applied. It is left as it was, but
            for what its modules count in a forward.
        site: in that model.
        calls: what a step calls it with.
        device: torch's name.
        seconds: to be done in, about.
        compile_seconds: what compiling is expected to take; it is left out where there is not that much time.
    """
    until = time.perf_counter() + seconds
    steps: dict[str, Step] = {}
    missing: dict[str, str] = {}
    spent = None
    ways = {PLAIN: _plain, OURS: _ours, COMPILE: _compiled}
    for name, make in ways.items():
        began = time.perf_counter()
        if name == COMPILE and until - began < compile_seconds:
            missing[name] = BUDGET_SHORT
            continue
        try:
            step = forward_backward(make(model, site), calls, torch.device(device))
            for _ in range(2):  # the compiler's backward is compiled, and a kernel is chosen, on the way
                step()
        except Exception as error:  # it can be anything: a kernel's, the compiler's or the device's
            missing[name] = reason_text(error)
            if name == PLAIN:
                return SiteTimes({}, missing, EAGER, None)
        else:
            steps[name] = step
            spent = time.perf_counter() - began if name == COMPILE else spent
    on_gpu = torch.device(device).type == "cuda"
    how, ready, count = in_graphs(steps) if on_gpu else (EAGER, steps, 1)
    samples = interleaved_ms(ready, device, until)
    times = {name: _timing(samples[name], count) for name in ALTERNATIVES if name in samples}
    return SiteTimes(times, missing, how, spent)


def interleaved_ms(calls: Mapping[str, Step], device: str, until: float) -> dict[str, list[float]]:
    """Return milliseconds a call of each, taken by turns forth and back, so that drift favours none.

    Ends early at `until`, on `time.perf_counter`'s clock.
    """
    inner = {name: _repeats_in_sample(call, device) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        for name in [*calls, *reversed(list(calls))]:
            samples[name].append(_sample_ms(calls[name], device, inner[name]))
    return samples


def forward_backward(module: nn.Module, calls: Sequence[Arguments], device: torch.device) -> Step:
    """Return what calls a module with each of the arguments and takes all gradients; none where none is recorded.

    The outputs' gradients are random and the same at every call. Gradients are returned, not accumulated.
    """
    given = [map_tensors((each.positional, each.named), lambda tensor: copied(tensor, device)) for each in calls]
    inputs = [tensor for each in given for tensor in tensors_in(each) if tensor.requires_grad]
    wanted = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    gradients: list[torch.Tensor] = []

    def step() -> Any:
        outputs = []
        for each, (positional, named) in zip(calls, given, strict=True):
            with as_called(each, device):
                output = module(*positional, **named)
            outputs += [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not gradients:
            gradients.extend(torch.randn_like(tensor) for tensor in outputs)
        return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True) if outputs else None

    return step


def in_graphs(steps: Mapping[str, Step]) -> tuple[str, Mapping[str, Step], int]:
    """Return what was made of the steps, what runs each, and how many times over.

    They are graphs if all of them can be captured, else the steps as they are.
    """
    try:
        graphs = {name: captured(step) for name, step in steps.items()}
        shortest = min(min(sample_ms(replay, "cuda", warmup=1, repeats=3)) for replay in graphs.values())
        count = min(MOST_IN_GRAPH, math.ceil(GRAPH_MS / max(shortest, 1e-6)))
        if count > 1:
            graphs = {name: captured(_several(step, count), warmup=1) for name, step in steps.items()}
    except RuntimeError:
        torch.cuda.synchronize()
        return EAGER, steps, 1
    return IN_GRAPH, graphs, count


def reason_text(error: Exception) -> str:
    """Return an error on one line that is not too long."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". :")
    return text if len(text) <= REASON_LENGTH else f"{text[:REASON_LENGTH].rstrip()} ..."


def _plain(model: nn.Module, site: PatchSite) -> nn.Module:
    return copy.deepcopy(site.plain)


def _compiled(model: nn.Module, site: PatchSite) -> nn.Module:
    torch._dynamo.reset()  # what other sites have compiled counts towards its limit
    compiled = torch.compile(copy.deepcopy(site.plain), dynamic=False, fullgraph=True)
    assert isinstance(compiled, nn.Module)
    return compiled


def _ours(model: nn.Module, site: PatchSite) -> nn.Module:
    # Put in its place as in the model, so that it gets the modes of what was there.
    place = nn.ModuleDict({"site": model.get_submodule(site.path)})
    replace(place, "site", site.fused())
    return place["site"]


def _repeats_in_sample(call: Step, device: str) -> int:
    once = min(sample_ms(call, device, warmup=1, repeats=2))
    return max(1, min(1000, math.ceil(SAMPLE_MS / max(once, 1e-6))))


def _sample_ms(call: Step, device: str, repeats: int) -> float:
    return sample_ms(_several(call, repeats), device, warmup=0, repeats=1)[0] / repeats


def _several(call: Step, count: int) -> Step:
    def several() -> None:
        for _ in range(count):
            call()

    return several


def _timing(samples: Sequence[float], count: int) -> Timing:
    return Timing(*summarize(sample / count for sample in samples))
