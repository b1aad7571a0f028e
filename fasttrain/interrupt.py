"""Ctrl-C once: stop at the next exact place with a checkpoint. Twice: stop now."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def graceful_interrupt(first: Callable[[], None]) -> Iterator[None]:
    """Call `first` on the first SIGINT or SIGTERM inside; the second one raises KeyboardInterrupt as always.

    Puts the former handlers back at the end. Outside of the main thread, where Python allows no handlers, does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.getsignal(number) for number in signals}
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        first()

    for number in signals:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
