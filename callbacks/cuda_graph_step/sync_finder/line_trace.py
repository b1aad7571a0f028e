"""At which line a value of the host changes, for values that nothing else reports: attributes, random generators."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fasttrain.callbacks.cuda_graph_step.host_state import same
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Site, is_machinery, site_of_frame

Read = Callable[[], Any]


def lines_that_change(step: Callable[[], Any], watched: Mapping[str, Read]) -> dict[str, Site]:
    """Run `step` and return where each watched value first became another one, as far as that is seen.

    Every value is read after every line of Python outside of torch and Lightning, so reading must be cheap. Looks at
    the calling thread only, and takes the place of a debugger's or a coverage tool's trace function meanwhile.
    """
    trace = _LineTrace(watched)
    previous = sys.gettrace()
    sys.settrace(trace.on_call)
    try:
        step()
    finally:
        sys.settrace(previous)
    trace.look()
    return trace.found


class _LineTrace:
    def __init__(self, watched: Mapping[str, Read]) -> None:
        self.found: dict[str, Site] = {}
        self._watched = dict(watched)
        self._values = {name: read() for name, read in watched.items()}
        self._running: tuple[FrameType, int] | None = None

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Look before another function begins; follow it line by line unless it is torch's."""
        self.look()
        if is_machinery(frame.f_code.co_filename):
            return None
        self._running = (frame, frame.f_lineno)
        return self.on_event

    def on_event(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        """Look when a line is done: at the beginning of the next, or at the function's end."""
        self.look()
        if event == "line":
            self._running = (frame, frame.f_lineno)
        elif event == "return":
            # The line of the caller goes on, without an event of its own.
            caller = frame.f_back
            while caller is not None and is_machinery(caller.f_code.co_filename):
                caller = caller.f_back
            self._running = None if caller is None else (caller, caller.f_lineno)
        return self.on_event

    def look(self) -> None:
        """Hold the line that is done responsible for what has changed since the last look."""
        for name, read in list(self._watched.items()):
            if same(self._values[name], read()):
                continue
            site = site_of_frame(*self._running) if self._running is not None else None
            if site is not None:
                self.found[name] = site
            del self._watched[name]
