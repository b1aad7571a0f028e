"""The training loader with its batches moved to the device when they are pulled, which may be ahead of their turn."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from fasttrain.callbacks.device_prefetch.ahead import Ahead
from fasttrain.callbacks.device_prefetch.exchange import Exchange
from fasttrain.callbacks.device_prefetch.mover import Moved
from fasttrain.fetching import Fetched, LoaderInBetween

PullAhead = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Pulled:
    """A batch, and where the loader stood after it."""

    fetched: Fetched
    moved: Moved
    states: list[dict[str, Any]]


class PrefetchingLoader(LoaderInBetween):
    """Hands out the host's batches in order, each of which was offered to the exchange.

    The first of each pass is pulled by the caller's thread, where a loader starts its worker processes, the others by
    a thread ahead of their turn, or by the caller in their turn. The state is that of the batches that were taken.

    Args:
        inner: the training loader.
        exchange: where the moved batches go.
        kept_back: tells how many of the batches that were handed out wait for later steps.
        depth: batches pulled ahead; 0 pulls each in its turn.
        convert: what the precision does to a host batch before it is moved.
    """

    def __init__(
        self,
        inner: CombinedLoader,
        exchange: Exchange,
        kept_back: Callable[[], int],
        depth: int,
        convert: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        super().__init__(inner)
        self._exchange, self._kept_back, self._depth, self._convert = exchange, kept_back, depth, convert
        self._ahead: Ahead[Pulled] | None = None
        self._states: deque[list[dict[str, Any]]] = deque([inner._state_dicts()], maxlen=4)
        self._handed_out = 0

    def __iter__(self) -> "PrefetchingLoader":
        self.stop()
        iter(self.inner)
        self._states = deque([self.inner._state_dicts()], maxlen=4)
        self._handed_out = 0
        return self

    def __next__(self) -> Fetched:
        if self._ahead is not None:
            pulled = next(self._ahead)
        else:
            pulled = self._pull()
            if self._depth:
                length = sized_len(self.inner)
                most = None if length is None else length - self._handed_out - 1
                self._ahead = Ahead(self._pull, self._depth, most)
        self._handed_out += 1
        self._states.append(pulled.states)
        self._exchange.offer(pulled.moved)
        return pulled.fetched

    def stop(self) -> None:
        """End the thread, and drop what was pulled and not taken. The state stays that of what was."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        self._exchange.drop()

    def reset(self) -> None:
        """End the thread before the loader's processes."""
        self.stop()
        super().reset()

    def _state_dicts(self) -> list[dict[str, Any]]:
        if self._handed_out == 0:
            return self.inner._state_dicts()
        return self._states[max(-1 - self._kept_back(), -len(self._states))]

    def _pull(self) -> Pulled:
        batch, number, loader = next(self.inner)
        batch = self._convert(batch)
        return Pulled((batch, number, loader), self._exchange.mover.move(batch), self.inner._state_dicts())


def depth_for(loader: CombinedLoader, depth: int, ahead: PullAhead) -> int:
    """Return how many batches are pulled ahead: none, where that would make samples in a thread of this process.

    Their random draws would come between the step's, and the state of the global generators in a checkpoint would be
    that after batches which the resumed run pulls again.
    """
    if ahead == "auto":
        by_workers = all(isinstance(each, DataLoader) and each.num_workers > 0 for each in loader.flattened)
        return depth if by_workers else 0
    return depth if ahead == "always" else 0
