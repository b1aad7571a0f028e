"""RetinaNet on real images to a score, and to the same score through either loader."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from fasttrain.bench import Case
from fasttrain.measure import Row, make_row
from fasttrain.recipes.retinanet.bench_run import STARTING_BATCHES, Order, Report
from fasttrain.recipes.retinanet.bench_txl import (
    BATCH_SIZE,
    DATA_VARIABLE,
    EPOCHS,
    IMAGE_SIZE,
    OPTIMIZER,
    data_folder,
    fit_once,
    overrides_for,
)

TARGET = 0.70
"""Every seed of either passed it in 12 epochs (rows `txl_pbc_512`: the lowest last score is 0.7258)."""

DALI = "optimizations.dali_loader={}"
EVERYTHING = (DALI, "optimizations.async_scoring={}", "checkpoint.every_n_minutes=null")


def cases() -> list[Case]:
    """Return the two cases."""
    where = f"TXL-PBC (folder in ${DATA_VARIABLE})"
    return [
        Case("retinanet", "txl_pbc_ttt", f"{where} to mAP {TARGET}: seconds, and those of the start", to_target, True),
        Case(
            "retinanet", "txl_pbc_loaders", f"{where} through either loader: mAP after {EPOCHS} epochs", loaders, True
        ),
    ]


def to_target(
    *, variants: str = "full plain", seeds: str = "0 1 2", epochs: int = EPOCHS, every: int = 1, target: float = TARGET,
    more: str = "", image_size: int = IMAGE_SIZE[0], accelerator: str = "gpu",
) -> Iterator[Row]:  # fmt: skip
    """Yield seconds to a score and of the start, of the recipe with everything on and of torchvision's model.

    Each run is a process of its own; the kernels that Triton compiled for one are there for the next, and the first
    row's note says which run was the first here.

    Args:
        variants: `full`, `plain` or both, with a space between.
        seeds: with spaces between.
        epochs: of the schedule, which ends there.
        every: epochs from one evaluation to the next.
        target: mAP on the test split.
        more: overrides of the recipe, with spaces between.
        image_size: height and width.
        accelerator: of plain Lightning.
    """
    folder = data_folder()
    size = (image_size, image_size)
    schedule = [f"trainer.max_epochs={epochs}", f"trainer.check_val_every_n_epoch={every}", f"target.value={target}"]
    for variant in variants.split():
        runs = []
        for seed in map(int, seeds.split()):
            overrides = [*overrides_for(folder, seed, size), "target.stop=true", *schedule, *EVERYTHING, *more.split()]
            runs.append(
                in_its_own_process(
                    Order(variant, str(folder), seed, epochs, every, target, BATCH_SIZE, time.time(), asdict(OPTIMIZER),
                          overrides, image_size=size, accelerator=accelerator)
                )
            )  # fmt: skip
        yield from target_rows(variant, runs, seeds, epochs, every, target)


def target_rows(
    variant: str, runs: Sequence[Report], seeds: str, epochs: int, every: int, target: float
) -> Iterator[Row]:
    """Yield the rows of one variant; seconds to the target are those of runs that reached it, which the note counts."""
    reached = [run.seconds_to_target for run in runs if run.seconds_to_target is not None]
    last = " ".join(f"{run.scores[-1]:.4f}" if run.scores else "none" for run in runs)
    note = (
        f"mAP {target} of {epochs} epochs at batch {BATCH_SIZE}, evaluated every {every}; reached by {len(reached)} of "
        f"{len(runs)}, seeds {seeds}, last scores {last}"
    )
    case = "txl_pbc_ttt"
    if reached:
        yield make_row("retinanet", case, variant, "seconds_to_target", "s", reached, note)
    starts = [run.startup_seconds for run in runs]
    what = f"from the process's start until {STARTING_BATCHES} batches were trained on: "
    yield make_row(
        "retinanet", case, variant, "startup_seconds", "s", starts, what + " ".join(f"{s:.1f}" for s in starts)
    )
    yield make_row("retinanet", case, variant, "seconds", "s", [run.seconds for run in runs], f"{_parts(runs)}; {note}")


def loaders(*, seeds: str = "0 1 2", epochs: int = EPOCHS, more: str = "") -> Iterator[Row]:
    """Yield the score after a whole schedule, and its seconds, through torch's loader and through DALI's.

    Args:
        seeds: with spaces between.
        epochs: of the schedule.
        more: overrides of both, with spaces between.
    """
    folder = data_folder()
    schedule = [f"trainer.max_epochs={epochs}", f"trainer.check_val_every_n_epoch={epochs}", "target.stop=false"]
    # The first run of a process compiles kernels and chooses algorithms.
    briefly = ["trainer.max_epochs=1", "trainer.limit_val_batches=0", "target=null"]
    fit_once([*overrides_for(folder, 0), *schedule, DALI, *more.split(), *briefly])
    for variant, overrides in (("dali", [DALI]), ("torch", [])):
        runs = [
            fit_once([*overrides_for(folder, seed), *schedule, *overrides, *more.split()])
            for seed in map(int, seeds.split())
        ]
        scores = [result["quality"]["value"] for result, _ in runs]
        note = f"{epochs} epochs at batch {BATCH_SIZE}; map of seeds {seeds}: {' '.join(f'{s:.4f}' for s in scores)}"
        yield make_row("retinanet", "txl_pbc_loaders", variant, "map", "", scores, note)
        seconds = [wall for _, wall in runs]
        yield make_row("retinanet", "txl_pbc_loaders", variant, "train_seconds", "s", seconds, note)


def in_its_own_process(order: Order) -> Report:
    """Return what a child process made of it.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "fasttrain.recipes.retinanet.bench_run", json.dumps(asdict(order))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run of {order.variant}, seed {order.seed}, failed: {done.stderr[-2000:]}")
    return Report(**json.loads(done.stdout.splitlines()[-1]))


def _parts(runs: Sequence[Report]) -> str:
    """Return the mean seconds of each part of a run."""
    names = [name for name in runs[0].details if name != "steps"]
    return ", ".join(f"{name} {sum(run.details[name] for run in runs) / len(runs):.2f}" for name in names)
