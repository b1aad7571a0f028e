"""What a failed capture was about, in one sentence with the user's file and line."""

import traceback
from pathlib import Path
from types import FrameType

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_utilities", "fasttrain", "contextlib", "functools")


def why_capture_failed(error: BaseException) -> str:
    """Return what went wrong and where, for an exception that left a capture.

    The end of a capture that has been broken raises an exception of its own; the first in the chain is the cause.
    """
    chain: list[BaseException] = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and earlier not in chain:
        chain.append(earlier)
    cause = chain[-1]
    message = " ".join(str(cause).split(". ")[0].split()) or type(cause).__name__
    if "CUDA error" in message or "ErrorStreamCapture" in message:
        message = "something in it needs the host to wait for the device, or CUDA can't capture it"
    where = place_of(cause)
    return f"{message} (at {where})" if where else message


def place_of(error: BaseException) -> str | None:
    """Return "file:line: source" of the innermost frame outside of the libraries that every step goes through."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_library(frame)]
    if not frames:
        return None
    frame, line = frames[-1]
    summary = traceback.extract_stack(frame, limit=1)[-1]
    source = traceback.FrameSummary(summary.filename, line, summary.name).line
    return f"{Path(summary.filename).name}:{line}" + (f": {source}" if source else "")


def _is_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] in LIBRARIES and not name.startswith("fasttrain.recipes.")
