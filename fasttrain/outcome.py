"""How a run ended: the content of `result.json`, and the few lines of it that a user reads in the terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl

from fasttrain.checkpoints import LAST
from fasttrain.config import RunConfig
from fasttrain.progress import clock_text
from fasttrain.recorder import RunRecorder
from fasttrain.target import StopAtTarget


@runtime_checkable
class CountsBadSamples(Protocol):
    """A data module that skips bad samples instead of stopping, and counts them."""

    def bad_samples(self) -> dict[str, int]:
        """Return how many were skipped, by what was wrong with them."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the content of `result.json`, and the folder it is in."""

    result: dict[str, Any]
    folder: Path

    def whole(self) -> "Outcome":
        """Return it; for whoever measures runs, to whom one that was stopped says nothing.

        Raises:
            KeyboardInterrupt: the run was interrupted, by Ctrl-C or SIGTERM.
        """
        if self.result["status"] == "interrupted":
            raise KeyboardInterrupt("a run that was measured was interrupted.")
        return self


def result_of(
    config: RunConfig,
    status: str,
    error: str | None,
    seconds: float,
    recorder: RunRecorder | None,
    target: StopAtTarget | None,
    trainer: pl.Trainer | None,
    data: pl.LightningDataModule | None,
) -> dict[str, Any]:
    """Return what `result.json` holds; None stands for what a run that failed early never had."""
    breakdown = recorder.breakdown() if recorder else {}
    # Training's wall time: on a GPU the parts inside it are launch times, their sum may miss where the host waits.
    training = seconds - sum(breakdown.get(part, 0.0) for part in ("start_up", "evaluation", "checkpoint"))
    samples = recorder.samples if recorder else 0
    goal = config.target
    return {
        "recipe": config.recipe,
        "preset": config.preset,
        "status": status,
        "seed": config.seed,
        "quality": _quality(goal.metric, target) if goal else None,
        "target": {"name": goal.metric, "value": goal.value, "mode": goal.mode} if goal else None,
        "reached": bool(target and target.reached_at),
        "reached_at": target.reached_at if target else None,
        "samples": samples,
        "steps": trainer.global_step if trainer else 0,
        "epochs": trainer.current_epoch if trainer else 0,
        "seconds": round(seconds, 3),
        "samples_per_second": round(samples / training, 3) if samples and training > 0 else None,
        "breakdown_seconds": {part: round(value, 3) for part, value in breakdown.items()},
        "bad_samples": data.bad_samples() if isinstance(data, CountsBadSamples) else {},
        "error": error,
    }


def summary_lines(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the lines printed at a run's end, without markup."""
    words = [result["status"].replace("_", " "), clock_text(result["seconds"])]
    quality = result["quality"]
    if quality and quality["value"] is not None:
        words.append(f"{quality['name']} {quality['value']:.4f} (best {quality['best']:.4f})")
    if result["samples_per_second"]:
        words.append(f"{result['samples_per_second']:,.0f} samples/s")
    lines = ["  ".join(words)]
    lines += [f"skipped: {count} {what}" for what, count in result["bad_samples"].items()]
    lines.append(f"run folder: {folder}")
    if result["status"] in ("interrupted", "failed") and (folder / "checkpoints" / LAST).exists():
        lines.append(f"go on with: fasttrain fit --resume {folder}")
    return lines


def _quality(name: str, target: StopAtTarget | None) -> dict[str, Any]:
    value = target.scores[-1][1] if target and target.scores else None
    return {"name": name, "value": value, "best": target.best if target else None}
