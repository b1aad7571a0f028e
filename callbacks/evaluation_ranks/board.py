"""Where ranks of both roles leave short messages for each other, and see whether the others are still there."""

import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, exported without saying so

from fasttrain.errors import OptimizationError

FAULT = "fault"
BEATS = 5
"""Signs of life that a rank gives in the time after which it counts as dead."""
LOOKS = 20
"""Looks at the others in that time."""
ENDED = b"ended"


class Board:
    """A store of messages by name, with a sign of life from every rank.

    Collectives fail or hang where a rank is missing; from here a rank learns which one, and why.

    Args:
        store: this process's own connection.
        rank: of this process among all.
        ranks: number of all processes.
        dead_after_seconds: a rank that gave no sign of life for so long counts as dead.
    """

    def __init__(self, store: TCPStore, rank: int, ranks: int, dead_after_seconds: float) -> None:
        self.rank, self.dead_after_seconds = rank, dead_after_seconds
        self._store = store
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._next_look = 0.0
        self._ended = threading.Event()
        self._leave_sign(store, b"0")
        self._thread = threading.Thread(target=self._beat, name="fasttrain-sign-of-life", daemon=True)
        self._thread.start()

    @property
    def look_every_seconds(self) -> float:
        """The time between two looks at the others."""
        return self.dead_after_seconds / LOOKS

    def post(self, name: str, message: Any) -> None:
        """Leave a message.

        Raises:
            OptimizationError: the first rank, which keeps them, is gone.
        """
        with _first_rank_must_answer():
            self._store.set(name, json.dumps(message))

    def read(self, name: str) -> Any:
        """Return a message, or None where it is not there yet. Never waits.

        Raises:
            OptimizationError: the first rank, which keeps them, is gone.
        """
        with _first_rank_must_answer():
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def wait(self, name: str, watched: Collection[int], timeout_seconds: float | None = None) -> Any:
        """Return a message once it is there; None when it is not there in time.

        Raises:
            OptimizationError: one of the watched ranks is gone, or any rank told a fault.
        """
        begun = time.monotonic()
        while (message := self.read(name)) is None:
            self.look(watched)
            if timeout_seconds is not None and time.monotonic() - begun > timeout_seconds:
                return None
            time.sleep(0.02)
        return message

    def tell_fault(self, text: str) -> None:
        """Have all ranks raise this at their next look, unless another fault was told before. Never raises."""
        with suppress(RuntimeError):
            self._store.compare_set(FAULT, "", json.dumps({"rank": self.rank, "text": text}))

    def look(self, watched: Iterable[int]) -> None:
        """See whether the others are still there; most calls do nothing, since one look every few seconds is enough.

        Raises:
            OptimizationError: one of the watched ranks is gone, or any rank told a fault.
        """
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + self.look_every_seconds
        fault = self.read(FAULT)
        if fault is not None and fault["rank"] != self.rank:
            raise OptimizationError(f"evaluation_ranks: rank {fault['rank']} has ended: {fault['text']}")
        watched = list(watched)
        with _first_rank_must_answer():
            signs = self._store.multi_get([f"alive/{rank}" for rank in watched])
        for rank, sign in zip(watched, signs, strict=True):
            before, since = self._seen.get(rank, (b"", now))
            if sign != before:
                self._seen[rank] = (sign, now)
            elif sign != ENDED and now - since > self.dead_after_seconds:
                raise OptimizationError(
                    f"evaluation_ranks: rank {rank} gave no sign of life for {now - since:.0f} s; its process was "
                    "killed or its machine is gone."
                )

    def wait_for_end(self, ranks: Iterable[int], timeout_seconds: float) -> None:
        """Wait until those ranks have ended in order, but not for ever. Never raises."""
        end = time.monotonic() + timeout_seconds
        with suppress(RuntimeError):
            while set(self._store.multi_get([f"alive/{rank}" for rank in ranks])) != {ENDED}:
                if time.monotonic() > end:
                    return
                time.sleep(0.02)

    def close(self) -> None:
        """Say that this rank ends in order, and give no more signs of life. May be called again."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(5)
        with suppress(RuntimeError):
            self._leave_sign(self._store, ENDED)

    def _beat(self) -> None:
        # A connection of its own: one that waits in another thread would hold up the signs.
        store, count = self._store.clone(), 0
        with suppress(RuntimeError):  # the first rank is gone; who waits for it hears of that
            while not self._ended.wait(self.dead_after_seconds / BEATS):
                count += 1
                self._leave_sign(store, str(count).encode())

    def _leave_sign(self, store: Any, sign: bytes) -> None:
        store.set(f"alive/{self.rank}", sign)


@contextmanager
def _first_rank_must_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own errors of a connection are among them
        raise OptimizationError(
            "evaluation_ranks: the first training rank does not answer any more; its process has ended."
        ) from error


def open_store(host: str, port: int, is_first: bool, timeout_seconds: float = 60.0) -> TCPStore:
    """Return a connection to the store that the first rank keeps; port 0 chooses a free one, for the first rank."""
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=timeout)
