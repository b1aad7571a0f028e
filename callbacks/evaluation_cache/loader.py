"""The evaluation's loader: makes batches while they are not trusted, and hands out those kept from then on."""

from collections.abc import Callable
from enum import Enum

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

from fasttrain.batches import OpaqueLeaf
from fasttrain.callbacks.evaluation_cache.draws import draw_seeds, now, seeds_drawn
from fasttrain.callbacks.evaluation_cache.kept import KeptBatches, bytes_of
from fasttrain.fetching import Fetched, LoaderInBetween


class Doing(Enum):
    """What a pass does."""

    KEEPING = "kept"
    COMPARING = "compared with those kept"
    HANDING_OUT = "handed out from the device"
    NOTHING = "made by the loader"


class KeepingLoader(LoaderInBetween):
    """Keeps the batches of the first whole pass, compares those of later ones, and then makes none any more.

    A pass that hands out kept batches draws from torch's generator what the loader would have drawn, so that all that
    comes after is the same.

    Args:
        inner: the evaluation's loader.
        device: where batches are kept.
        most_bytes: asked for at the first batch: what all of them may take.
        compared: passes whose batches are compared before those kept are trusted.
        tell: given the reason why batches are not kept any more.
    """

    def __init__(
        self,
        inner: CombinedLoader,
        device: torch.device,
        most_bytes: Callable[[], float],
        compared: int,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(inner)
        self.kept = KeptBatches(device)
        self.doing = Doing.KEEPING
        self.passes: dict[Doing, int] = dict.fromkeys(Doing, 0)
        """Whole passes of each kind."""
        self._most_bytes, self._to_compare, self._tell = most_bytes, compared, tell
        self._most = 0.0
        self._draws: dict[int, int] = {}  # seeds drawn before the batch of this number; -1 stands for the start
        self._number, self._over = 0, False

    @property
    def limits(self) -> list[int | float] | None:
        """The most batches of each loader, which Lightning sets before each pass."""
        return self.inner.limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        before = self.inner.limits
        self.inner.limits = limits
        if before is not None and self.inner.limits != before and len(self.kept):
            self.stop("another number of batches was asked for")

    def __len__(self) -> int:
        return len(self.kept) if self.doing is Doing.HANDING_OUT else len(self.inner)

    def __iter__(self) -> "KeepingLoader":
        if self.doing is Doing.KEEPING:
            self.kept.clear()  # of a pass that was not gone through to its end
        if self.doing is Doing.HANDING_OUT and self.kept.was_written_to():
            self.stop("a step wrote to a batch in place")
        self._number, self._over = 0, False
        if self.doing is Doing.HANDING_OUT:
            draw_seeds(self._draws.get(-1, 0))
            return self
        self._draws.clear()
        before = now()
        iter(self.inner)
        self._note_draws(-1, before)
        return self

    def __next__(self) -> Fetched:
        if self._over:
            raise StopIteration
        number = self._number
        if self.doing is Doing.HANDING_OUT:
            draw_seeds(self._draws.get(number, 0))
            self._number += 1
            if self._number == len(self.kept):
                self._end_pass()
            return self.kept.hand_out(number)
        before = now() if self.doing is not Doing.NOTHING else None
        try:
            fetched: Fetched = next(self.inner)
        except StopIteration:
            self._end_pass()
            raise
        if before is not None:
            self._note_draws(number, before)
        self._number += 1
        self._look_at(number, fetched)
        if self._number == sized_len(self.inner):
            self._end_pass()
        return fetched

    def stop(self, reason: str) -> None:
        """Keep nothing any more."""
        if self.doing is not Doing.NOTHING:
            self.doing = Doing.NOTHING
            self.kept.clear()
            self._tell(reason)

    def reset(self) -> None:
        """Give the memory back, at the fit's end."""
        self.kept.clear()
        super().reset()

    def _look_at(self, number: int, fetched: Fetched) -> None:
        if self.doing is Doing.COMPARING:
            self.kept.compare(number, fetched)
        if self.doing is not Doing.KEEPING:
            return
        if number == 0:
            self._most = self._most_bytes()
        length = sized_len(self.inner)
        wanted = bytes_of(fetched[0]) * length if number == 0 and length else self.kept.bytes + bytes_of(fetched[0])
        if wanted > self._most:
            self.stop(f"its batches take {wanted / 1e9:,.1f} GB, and {self._most / 1e9:,.1f} GB are for them")
            return
        try:
            self.kept.add(fetched)
        except OpaqueLeaf as error:
            self.stop(f"{error}, which can't be told from another")
        except torch.OutOfMemoryError:
            self.stop(f"the device has no room for the batch after {self.kept.bytes / 1e9:,.1f} GB of them")

    def _end_pass(self) -> None:
        """Count the pass, and decide what the next one does."""
        self._over = True
        self.passes[self.doing] += 1
        if self.doing is Doing.COMPARING:
            difference = self.kept.difference() or ("fewer of them" if self._number < len(self.kept) else None)
            if difference is not None:
                self.stop(f"the loader made other batches than before ({difference})")
        if self.doing in (Doing.KEEPING, Doing.COMPARING) and len(self.kept):
            trusted = self.passes[Doing.COMPARING] >= self._to_compare
            self.doing = Doing.HANDING_OUT if trusted else Doing.COMPARING

    def _note_draws(self, number: int, before: dict[str, object]) -> None:
        if self.doing is Doing.NOTHING:
            return
        drawn = seeds_drawn(before, now())
        if drawn is None:
            self.stop("making its batches draws random numbers in this process")
        elif drawn:
            self._draws[number] = drawn
