"""A module run in a process of its own, which may hang, crash or leave others behind, and be ended with all of them."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals, strsignal

SECONDS_TO_DIE = 10
"""How long a killed child is waited for: one that hangs in a driver may never go."""


def run_module(
    module: str,
    arguments: Sequence[str],
    output: Path,
    timeout_seconds: float | None,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """Run `python -m module` with this process's import path, and return its exit status; None if it took too long.

    Whatever ends the waiting, Ctrl-C for instance, ends the child and what it started.

    Args:
        module: its dotted name.
        arguments: the command line.
        output: file for what it prints.
        timeout_seconds: after which it is ended; None for never.
        environment: variables to set for it.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    with output.open("wb") as printed:
        # A session of its own: what it starts is ended with it, and Ctrl-C is the parent's to handle.
        child = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments],
            stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            start_new_session=True,
        )  # fmt: skip
    try:
        return child.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(child)


def signal_text(status: int) -> str | None:
    """Return the name of the signal that an exit status tells of, or None if it tells of none that is known."""
    with suppress(ValueError):
        return f"{Signals(-status).name} ({strsignal(-status)})" if status < 0 else None
    return None


def _end(child: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, Signals.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(SECONDS_TO_DIE)
