"""Which signatures have a captured graph, which are still run eagerly, and which must make room."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fasttrain.errors import ConfigError

MOST_KEYS_WITHOUT_A_HIT = 32
"""Different keys in a row after which nobody may expect that one comes again."""


class Releasable(Protocol):
    """What the pool holds."""

    def release(self) -> None:
        """Give its memory back."""


@dataclass
class Tally:
    """What happened to the steps of one key."""

    eager: int = 0
    captures: int = 0
    hits: int = 0
    evictions: int = 0


G = TypeVar("G", bound=Releasable)


class GraphPool(Generic[G]):
    """Captured graphs by key, at most `capacity` of them; the one unused for longest makes room.

    Args:
        capacity: graphs kept at the same time.
        warm_up: eager steps before the first capture, of whatever signature: libraries choose kernels, the optimizer
            makes its state.
        eager_first: eager steps of every further signature before it is worth a graph.

    Raises:
        ConfigError: no room for a single graph.
    """

    def __init__(self, capacity: int = 16, warm_up: int = 3, eager_first: int = 1) -> None:
        if capacity < 1:
            raise ConfigError(
                f"optimizations.cuda_graph_step.max_graphs is {capacity}, and a step needs at least one graph; leave "
                "cuda_graph_step out to run every step eagerly."
            )
        self.capacity, self.warm_up, self.eager_first = capacity, warm_up, eager_first
        self.tallies: dict[Hashable, Tally] = {}
        self.warm_steps = 0
        self._graphs: OrderedDict[Hashable, G] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def captures(self) -> int:
        """Captures so far."""
        return sum(tally.captures for tally in self.tallies.values())

    @property
    def evictions(self) -> int:
        """Graphs that had to make room so far."""
        return sum(tally.evictions for tally in self.tallies.values())

    @property
    def hits(self) -> int:
        """Replayed steps so far."""
        return sum(tally.hits for tally in self.tallies.values())

    def find(self, key: Hashable) -> G | None:
        """Return the key's graph and count the step as a hit; None where it must run eagerly or be captured."""
        graph = self._graphs.get(key)
        if graph is not None:
            if len(self._graphs) > 1:
                self._graphs.move_to_end(key)
            self.tallies[key].hits += 1
        return graph

    def is_due(self, key: Hashable) -> bool:
        """Whether the key has been seen often enough to be captured now."""
        seen = self.tallies[key].eager if key in self.tallies else 0
        return self.warm_steps >= self.warm_up and seen >= self.eager_first and not self.is_thrashing

    @property
    def is_thrashing(self) -> bool:
        """Whether graphs are thrown out faster than they pay: more evictions than twice the capacity, few hits."""
        return self.evictions > 2 * self.capacity and self.hits < 10 * self.captures

    @property
    def is_hopeless(self) -> bool:
        """Whether every one of many steps was of another key, so that no graph would ever be used twice."""
        return len(self.tallies) >= MOST_KEYS_WITHOUT_A_HIT and not self._graphs and self.hits == 0

    def last_keys(self) -> tuple[Hashable, Hashable]:
        """Return the two keys that were new last."""
        *_, one, other = self.tallies
        return one, other

    def count_eager(self, key: Hashable) -> None:
        """Note that a step of this key ran eagerly."""
        self.warm_steps += 1
        self.tallies.setdefault(key, Tally()).eager += 1

    def add(self, key: Hashable, graph: G) -> None:
        """Keep a captured graph; the one unused for longest goes if there are too many."""
        while len(self._graphs) >= self.capacity:
            oldest, dropped = self._graphs.popitem(last=False)
            dropped.release()
            self.tallies[oldest].evictions += 1
        self._graphs[key] = graph
        self.tallies.setdefault(key, Tally()).captures += 1

    def clear(self) -> None:
        """Release every graph. What was seen stays seen, but everything is warmed up anew before the next capture."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self.warm_steps = 0
