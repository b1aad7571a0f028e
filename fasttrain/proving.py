"""Whether an operator of a third-party package can be believed on this machine: tried once, in a process of its own.

    proof = prove(Trial("Apex's ConvBiasReLU", "apex", "my_project.in_apex:trial"))
    proof.ok, proof.reason      # (False, "Apex's ConvBiasReLU ended its process by SIGSEGV (Segmentation fault)")

Compiled extensions break with the versions around them, and some end the process that calls them. So nothing of the
package is imported here: a child process runs the trial, which calls the operator and checks it against a reference.
What came of it is kept in $FASTTRAIN_CACHE, or ~/.cache/fasttrain, for the same files of the package, the same trial,
torch, cuDNN and device; `forget` removes it. Processes that ask at the same time wait for one answer.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from fasttrain.child_process import run_module, signal_text
from fasttrain.environment import cache_folder
from fasttrain.fingerprint import file_digest, package_fingerprint, why_not_importable

LAST_WORDS = 4000
"""Characters of what a child printed last that are kept beside its verdict."""


@dataclass(frozen=True)
class Trial:
    """An operator to be tried."""

    name: str
    """For people: begins a sentence."""
    package: str
    """The import name of the package that it comes from."""
    target: str
    """`module:function`, called without arguments in the child process. It runs the operator and raises AssertionError
    if the numbers are not its reference's. Importing its module must not import the package."""
    timeout_seconds: float = 180.0
    """Imports, and kernels that are compiled on first use, included."""


@dataclass(frozen=True)
class Proof:
    """What came of a trial: whether the operator may be used, and a sentence's worth of why."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class _Ending:
    proof: Proof
    printed: str = ""
    lasting: bool = True
    """Whether the same would come of it another time: a process that lacked memory may have it tomorrow."""


def prove(trial: Trial) -> Proof:
    """Return whether an operator of an optional package works on this machine; never raises on its account.

    The first call on a machine may take as long as the trial's timeout, later ones read what came of it, and within a
    process the answer is remembered.
    """
    if reason := why_not_importable(trial.package):
        return Proof(False, f"{trial.name} is not there: {reason}")
    return _proof(trial, _folder(), _device_index())


def forget(package: str | None = None) -> int:
    """Remove what is kept about a package's operators, or about all, and return how many there were.

    They are tried anew when asked for next, also in this process.
    """
    _proof.cache_clear()
    kept = sorted(_folder().glob("*.json"))
    about = [path for path in kept if package is None or (_read(path) or {}).get("package") == package]
    for path in about:
        path.unlink(missing_ok=True)
    return len(about)


@cache
def _proof(trial: Trial, folder: Path, device: int | None) -> Proof:
    key = _key(trial, device)
    path = folder / f"{trial.package}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    with _alone(path.with_suffix(".lock")):
        kept = _read(path)
        if kept is not None and kept.get("key") == key:
            return Proof(bool(kept["ok"]), str(kept["reason"]))
        ending = _try(trial, device)
        if ending.lasting:
            _write(path, {"package": trial.package, **asdict(ending.proof), "printed": ending.printed,
                          "date": time.strftime("%Y-%m-%d"), "key": key})  # fmt: skip
    return ending.proof


def _key(trial: Trial, device: int | None) -> dict[str, Any]:
    """Return all that the outcome may depend on, in JSON's types."""
    return {
        "target": trial.target,
        "trial": file_digest(trial.target.partition(":")[0]),
        "package": package_fingerprint(trial.package),
        "python": sys.version.partition(" ")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device is not None else None,
        "device": "cpu" if device is None else torch.cuda.get_device_name(device),
    }


def _try(trial: Trial, device: int | None) -> _Ending:
    """Run a trial in a child process and tell how it ended."""
    with tempfile.TemporaryDirectory(prefix="fasttrain-trial-") as folder:
        told, printed = Path(folder, "told.json"), Path(folder, "printed.txt")
        arguments = [trial.target, str(told), *([] if device is None else [str(device)])]
        status = run_module("fasttrain.proving_child", arguments, printed, trial.timeout_seconds)
        words = printed.read_text(errors="replace")[-LAST_WORDS:]
        return _ending(trial, status, _read(told), words)


def _ending(trial: Trial, status: int | None, told: dict[str, Any] | None, printed: str) -> _Ending:
    if status is None:
        reason = f"{trial.name} hung: it was not done after {trial.timeout_seconds:g} s, and was ended"
        return _Ending(Proof(False, reason), printed)
    if (signal := signal_text(status)) is not None:
        reason = f"{trial.name} ended its process by {signal}"
        # The kernel ends by SIGKILL whom the machine's memory does not suffice for.
        return _Ending(Proof(False, reason), printed, lasting=-status != Signals.SIGKILL)
    if told is None:
        reason = f"{trial.name} ended its process with status {status} before it had an answer"
        return _Ending(Proof(False, reason), printed)
    return _Ending(Proof(bool(told["ok"]), f"{trial.name} {told['what']}"), printed, bool(told["lasting"]))


def _device_index() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _folder() -> Path:
    return cache_folder() / "proofs"


def _read(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, or None where there is none: a damaged verdict is as good as none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"ok"} <= set(content) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        warnings.warn(
            f"what came of a trial can't be kept in {path.parent} ({error.strerror}), so every run tries again; name a "
            "folder that can be written in the environment variable FASTTRAIN_CACHE.",
            stacklevel=2,
        )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes out that ask for the same, where the folder allows it: all ranks shall get one answer."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except (ImportError, OSError):
        yield
        return
    with lock:
        with suppress(OSError):  # a network file system may have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
