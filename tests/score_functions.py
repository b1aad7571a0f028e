"""Score functions for a process of their own, each with a fault or none; nothing here imports torch or Lightning.

A folder in the ground truth counts the calls, so that a fault can happen at some of them only.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Truth = dict[str, Any]
Rows = NDArray[np.float64]


def mean(truth: Truth, rows: Rows) -> dict[str, float]:
    return {"mean": float(rows.mean()) + truth.get("offset", 0.0), "count": float(len(rows))}


def in_order(truth: Truth, rows: Rows) -> dict[str, float]:
    """Numbers that tell whether all rows are there, once, and in their order; the first column is the image."""
    places = np.arange(1.0, len(rows) + 1)
    return {"places": float(places @ rows[:, 0]), "sum": float(places @ rows[:, 1]), "count": float(len(rows)),
            "images": float(len(np.unique(rows[:, 0])))}  # fmt: skip


def slow(truth: Truth, rows: Rows) -> dict[str, float]:
    time.sleep(truth["seconds"])
    return mean(truth, rows)


def starts_another(truth: Truth, rows: Rows) -> dict[str, float]:
    """Starts a process of its own, as encoding masks does, and takes its time."""
    other = subprocess.Popen(["sleep", "600"])
    (Path(truth["folder"]) / "other").write_text(str(other.pid))
    time.sleep(60)
    return mean(truth, rows)


def looks_around(truth: Truth, rows: Rows) -> dict[str, float]:
    heavy = {"torch", "lightning", "lightning.pytorch", "fasttrain"} & set(sys.modules)
    ignores = os.getsid(0) == os.getpid()
    return {"heavy": len(heavy), "gpus": float(bool(os.environ["CUDA_VISIBLE_DEVICES"])), "session": float(ignores),
            "pid": os.getpid(), "threads": float(os.environ["RAYON_NUM_THREADS"]), "nice": os.nice(0)}  # fmt: skip


def scribbles(truth: Truth, rows: Rows) -> dict[str, float]:
    """Writes over its rows, then fails at the first call."""
    found = mean(truth, rows)
    rows[:] = -1
    if _calls(truth) == 1:
        raise ValueError("the first call fails")
    return found


def _calls(truth: Truth) -> int:
    folder = Path(truth["folder"])
    (folder / str(time.monotonic_ns())).touch()
    return len(list(folder.iterdir()))


def faulty(truth: Truth, rows: Rows) -> Any:
    """Fails by `truth["fault"]` at the first `truth["times"]` calls."""
    if _calls(truth) > truth["times"]:
        return mean(truth, rows)
    fault = truth["fault"]
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crashes":
        print("free(): invalid pointer", file=sys.stderr, flush=True)
        os.abort()
    if fault == "exits":
        os._exit(3)
    if fault == "memory":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        np.ones(2**32)
    if fault == "hangs":
        time.sleep(600)
    if fault == "raises":
        raise KeyError("image 7")
    return {
        "none": None, "list": [1.0], "empty": {}, "text": {"mean": "0.5"}, "key": {1: 0.5}, "bool": {"mean": True},
        "other": {"middle": 0.5}, "unreadable": {"mean": _Foreign()},
    }[fault]  # fmt: skip


class _Foreign:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def coco_of_set(truth: Truth, rows: Rows) -> dict[str, float]:
    """COCO's numbers of the set whose number stands in the first row."""
    from fasttrain.coco_scores import score_boxes

    return score_boxes(truth["truths"][int(rows[0, 0])], rows[1:], "hotcoco")


def images(truth: Truth, rows: Rows) -> dict[str, float]:
    """How many rows and how many images there are, and the step that is in the rows."""
    time.sleep(truth.get("seconds", 0.0))
    return {"step": float(rows[:, 1].max()), "rows": float(len(rows)), "images": float(len(np.unique(rows[:, 0])))}
