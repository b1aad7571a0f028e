"""A recipe's runs by DALI and by torch's loader: the same losses within the pixels' tolerance; and a resume."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fasttrain.callbacks import CATALOGUE
from fasttrain.fit import fit
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recorder import RunRecorder

SHORT = ("trainer.max_epochs=2", "trainer.log_every_n_steps=1", "optimizations=none", "loggers=[]")
OURS = ("data.loader=dali", "data.dali.num_threads=1")
STEPS = 6


def assert_dali_learns_what_torch_learns(recipe: str, tiny: Sequence[str], place: Path) -> None:
    """Fit a recipe through torch, DALI, and DALI with an interruption. With `tiny` two epochs have 6 steps."""

    def run(name: str, *overrides: str, resume: Path | None = None) -> Any:
        if resume is not None:
            resolved = resolve(resume / "config.yaml", [])
            return fit(resolved, CATALOGUE, resume=resume, console=Console(quiet=True)).result
        resolved = resolve(find_recipe(recipe), [*tiny, *SHORT, *overrides])
        return fit(resolved, CATALOGUE, run_dir=place / name, console=Console(quiet=True)).result

    def losses(name: str) -> list[float]:
        rows = [line.split(",") for line in (place / name / "metrics.csv").read_text().splitlines()[1:]]
        return [float(row[4]) for row in rows if row[3] == "loss"]

    run("torch", "data.loader=torch", "data.num_workers=0")
    run("dali", *OURS)
    assert len(losses("dali")) == len(losses("torch")) == STEPS
    assert losses("dali") == pytest.approx(losses("torch"), rel=0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "on_train_batch_end", _interrupting(RunRecorder.on_train_batch_end))
        assert run("parts", *OURS)["status"] == "interrupted"
    assert run("parts", resume=place / "parts")["steps"] == STEPS
    assert losses("parts") == losses("dali")


def _interrupting(count: Any) -> Any:
    def interrupt_after_four(self: RunRecorder, trainer: Any, *rest: Any) -> None:
        count(self, trainer, *rest)
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt_after_four
