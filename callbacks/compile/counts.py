"""What torch.compile has counted in this process, as numbers that can be subtracted."""

from collections import Counter
from functools import cache
from typing import NamedTuple


class Counts(NamedTuple):
    """Everything that was compiled, in all of the process."""

    frames: int = 0
    """Functions, or pieces of them, that were looked at."""
    failed: int = 0
    """Those of them that stay in Python: too many recompilations, or something that can't be compiled."""
    graphs: int = 0
    breaks: int = 0
    """Cuts of a function in two, since Python must run between them. One in a function that others call cuts each."""
    hits: int = 0
    """Graphs that were found compiled on disk; a backward is a graph of its own."""
    misses: int = 0
    """Graphs that were compiled and kept for the next time."""
    bypasses: int = 0
    """Graphs that were compiled and can't be kept."""

    def since(self, before: "Counts") -> "Counts":
        """Return what has been counted after `before`."""
        # Somebody may have set the counters back in between.
        return Counts(*(max(0, mine - theirs) for mine, theirs in zip(self, before, strict=True)))

    def plus(self, other: "Counts") -> "Counts":
        """Return the sum of both."""
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def counts_now() -> Counts:
    """Return the counts of this moment; it takes about two microseconds."""
    counters = _counters()
    frames, inductor = counters["frames"], counters["inductor"]
    total = frames["total"]
    return Counts(
        total,
        total - frames["ok"],
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        inductor["fxgraph_cache_hit"],
        inductor["fxgraph_cache_miss"],
        inductor["fxgraph_cache_bypass"],
    )


@cache
def _counters() -> dict[str, Counter[str]]:
    from torch._dynamo.utils import counters  # it takes seconds to import, and is needed by who compiles only

    return counters
