"""Ctrl-C once: stop at the next exact place with a checkpoint. Twice: stop now."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# `timeout`, and a terminal that signals a whole group, deliver one wish to stop two or three times at once.
SAME_WISH_SECONDS = 1.0


@contextmanager
def graceful_interrupt(first: Callable[[], None]) -> Iterator[None]:
    """Call `first` on the first SIGINT or SIGTERM inside; a later one raises KeyboardInterrupt as always.

    Puts the former handlers back at the end. Outside of the main thread, where Python allows no handlers, does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.getsignal(number) for number in signals}
    asked_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            first()
        elif time.monotonic() - asked_at > SAME_WISH_SECONDS:
            raise KeyboardInterrupt

    for number in signals:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
