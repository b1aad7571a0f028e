"""What a region's calls cost the compiler: seconds, graphs, recompilations, graph breaks, and what the cache had.

Seconds are those of a call in which something was compiled, less those of one in which nothing was. A backward is
compiled when it first runs, or found in the cache together with the forward, so its first runs are timed too.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from fasttrain.batches import tensors_in
from fasttrain.callbacks.compile.counts import Counts, counts_now
from fasttrain.optimization import Cell

MOST_NODES = 2000
"""Nodes of autograd's graph that are looked through for compiled ones, in a region with graph breaks."""
LATER_CALLS = 2
"""Calls after a compiled one whose backward is timed, to know what it takes by itself."""


@dataclass
class Kind:
    """A function compiled for all modules of one look, in training or in evaluation."""

    function: Callable[..., Any]
    compilations: int = 0
    """Calls in which something was compiled. The first is none of the recompilations."""


@dataclass
class Tally:
    """What happened to one region."""

    path: str
    calls: int = 0
    compilations: int = 0
    recompilations: int = 0
    counts: Counts = field(default_factory=Counts)
    first_seconds: float = 0.0
    later_seconds: float = float("inf")
    backward: list[tuple[bool, float]] = field(default_factory=list)
    """Of each backward that was timed: whether something was compiled for it, and the seconds."""
    _to_time: int = 0

    def call(self, kind: Kind, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function and count."""
        before, begin = counts_now(), time.perf_counter()
        output = kind.function(module, *args, **kwargs)
        seconds, done = time.perf_counter() - begin, counts_now().since(before)
        self.calls += 1
        compiled = bool(done.graphs or done.frames)
        if compiled:
            self.recompilations += kind.compilations > 0
            kind.compilations += 1
            self.compilations += 1
            self.counts = self.counts.plus(done)
            self.first_seconds += seconds
        else:
            self.later_seconds = min(self.later_seconds, seconds)
        self._to_time = LATER_CALLS if compiled or self.calls == 1 else max(0, self._to_time - 1)
        if compiled or self._to_time:
            self._time_backward(output, (args, kwargs), compiled)
        return output

    @property
    def compile_seconds(self) -> float:
        """Seconds that were spent on compiling, or on loading what was compiled, as far as they are known by now."""
        later = 0.0 if self.later_seconds == float("inf") else self.later_seconds
        later_backward = min((seconds for first, seconds in self.backward if not first), default=0.0)
        backward = sum(max(0.0, seconds - later_backward) for first, seconds in self.backward if first)
        return max(0.0, self.first_seconds - self.compilations * later) + backward

    @property
    def start(self) -> str:
        """Whether the cache had what was needed."""
        if not self.calls:
            return "never called"
        if not (self.counts.hits or self.counts.misses):
            return "not kept" if self.compilations else "shared"
        return "cold" if not self.counts.hits else "partly warm" if self.counts.misses else "warm"

    def row(self, name: str | None = None) -> tuple[Cell, ...]:
        """Return the region's row of the table."""
        counts = self.counts
        return (
            name or self.path, self.calls, counts.graphs, self.recompilations, counts.breaks,
            round(self.compile_seconds, 2), self.start, counts.hits, counts.misses,
        )  # fmt: skip

    def _time_backward(self, output: Any, inputs: Any, compiled: bool) -> None:
        """Have the compiled nodes that this call has left to autograd timed when they run."""
        for node in _compiled_nodes(tensors_in(output), tensors_in(inputs)):
            _Stopwatch(self, compiled).attach(node)


COLUMNS = (
    "region", "calls", "graphs", "recompilations", "graph breaks", "compile s", "start", "cache hits", "cache misses",
)  # fmt: skip


def total(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of some regions."""
    joint = Tally("all", later_seconds=0.0)
    for tally in tallies:
        joint.calls += tally.calls
        joint.compilations += tally.compilations
        joint.recompilations += tally.recompilations
        joint.counts = joint.counts.plus(tally.counts)
        joint.first_seconds += tally.compile_seconds
    return joint


class _Stopwatch:
    def __init__(self, tally: Tally, compiled: bool) -> None:
        self.tally, self.compiled = tally, compiled
        self.before, self.begin = Counts(), 0.0

    def attach(self, node: Node) -> None:
        node.register_prehook(self.start)
        node.register_hook(self.stop)

    def start(self, gradients: Any) -> None:
        self.before, self.begin = counts_now(), time.perf_counter()

    def stop(self, gradients: Any, given: Any) -> None:
        seconds, done = time.perf_counter() - self.begin, counts_now().since(self.before)
        # One of the blocks that share a function is the first to run its backward, and need not be the one that was
        # the first to run its forward.
        self.tally.backward.append((self.compiled or any(done), seconds))
        self.tally.counts = self.tally.counts.plus(done)


def _compiled_nodes(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the compiled nodes between outputs and inputs."""
    seen: set[Node | None] = {None, *(tensor.grad_fn for tensor in inputs)}
    waiting = [tensor.grad_fn for tensor in outputs]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("CompiledFunction"):
            yield node
        waiting += [following for following, _ in node.next_functions]
