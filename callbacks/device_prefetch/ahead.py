"""Pulling ahead: a thread that makes the next items while the last one is in use."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from lightning.pytorch.utilities import rank_zero_warn

T = TypeVar("T")

SECONDS_TO_END = 60.0
"""How long the end of the thread is awaited: it may be in the middle of making one more item."""


class Ahead(Generic[T]):
    """Items from a function, made by a thread up to `depth` ahead.

    What the function raises, StopIteration included, is raised in the place of the item that it was to return, and
    again after that. Nothing is pulled after it.

    Args:
        pull: returns the next item; called in the thread alone, until `stop` has returned.
        depth: items made ahead of the one that was taken last.
        most: items to make; None if only `pull` knows.
    """

    def __init__(self, pull: Callable[[], T], depth: int, most: int | None = None) -> None:
        self._pull, self._left = pull, most
        self._made: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopping = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="device_prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        if self._failed is None:
            item, self._failed = self._made.get()
            self._room.release()
        if self._failed is not None:
            raise self._failed
        return item  # type: ignore[return-value]

    def stop(self) -> None:
        """End the thread; items that nobody took are lost. One that is being made is waited for."""
        self._stopping = True
        self._room.release()
        self._thread.join(SECONDS_TO_END)
        if self._thread.is_alive():
            rank_zero_warn(
                f"DevicePrefetcher: the loader has not returned within {SECONDS_TO_END:.0f} s of the fit's end; its "
                "thread is left to end when it does."
            )

    def _run(self) -> None:
        while True:
            self._room.acquire()
            if self._stopping:
                return
            try:
                if self._left is not None and self._left <= 0:
                    raise StopIteration
                item = self._pull()
            except BaseException as error:  # whatever it is, it belongs to whoever asks for this item
                self._made.put((None, error))
                return
            if self._left is not None:
                self._left -= 1
            self._made.put((item, None))
