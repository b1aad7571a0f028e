"""Bench cases of the RetinaNet recipe: score after a short schedule, against torchvision's in plain Lightning."""

import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch

from fasttrain.bench import Case
from fasttrain.environment import usable_cores
from fasttrain.measure import Row, make_row
from fasttrain.recipes.retinanet import bench_evaluation, bench_fit, bench_step, bench_target
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

SEEDS = (0, 1, 2)


def cases() -> list[Case]:
    """Return the recipe's bench cases."""
    return [
        Case(
            "retinanet",
            "txl_pbc_512",
            f"mAP on TXL-PBC's test split (folder in ${DATA_VARIABLE}) after {EPOCHS} epochs from scratch, 3 seeds",
            txl_pbc_512,
            needs_gpu=True,
        ),
        Case(
            "retinanet",
            "txl_pbc_evaluated",
            f"wall time on TXL-PBC (folder in ${DATA_VARIABLE}), each epoch scored beside, blocking, not at all",
            txl_pbc_evaluated,
            needs_gpu=True,
        ),
        *bench_step.cases(),
        *bench_evaluation.cases(),
        *bench_fit.cases(),
        *bench_target.cases(),
    ]


def txl_pbc_512() -> Iterator[Row]:
    """Yield score, seconds and images/s of torchvision's model in plain Lightning and of ours, over the seeds."""
    folder = data_folder()
    for variant, train in (("ours", train_ours), ("plain", train_plain)):
        runs = [train(folder, seed) for seed in SEEDS]
        scores = " ".join(f"{run[0]:.4f}" for run in runs)
        note = f"{EPOCHS} epochs at batch {BATCH_SIZE} from scratch; map of seeds {SEEDS}: {scores}"
        yield make_row("retinanet", "txl_pbc_512", variant, "map", "", [run[0] for run in runs], note)
        yield make_row("retinanet", "txl_pbc_512", variant, "train_seconds", "s", [run[1] for run in runs], note)
        yield make_row(
            "retinanet", "txl_pbc_512", variant, "images_per_second", "images/s", [run[2] for run in runs], note
        )


EVALUATIONS = {
    "async_scoring": ["optimizations.async_scoring={}"],
    "blocking": [],
    "no_evaluation": ["trainer.limit_val_batches=0", "target=null"],
}


def txl_pbc_evaluated(*, epochs: int = 6, repeats: int = 2, more: str = "") -> Iterator[Row]:
    """Yield wall seconds of training with an evaluation each epoch, and of those without its share, by who scores.

    Args:
        epochs: of each run.
        repeats: runs of each kind, taken in turn.
        more: overrides for all of them, with spaces between.
    """
    folder = data_folder()
    seconds: dict[str, list[float]] = {name: [] for name in EVALUATIONS}
    inside: dict[str, list[float]] = {name: [] for name in EVALUATIONS}
    saving: dict[str, list[float]] = {name: [] for name in EVALUATIONS}
    schedule = [f"trainer.max_epochs={epochs}", "trainer.check_val_every_n_epoch=1", *more.split()]
    fit_once(
        [*overrides_for(folder, 0), *schedule, "trainer.max_epochs=1", *EVALUATIONS["no_evaluation"]]
    )  # starts cold
    for seed in range(repeats):
        for name, overrides in EVALUATIONS.items():
            result, wall = fit_once(
                [*overrides_for(folder, seed), *schedule, f"trainer.max_epochs={epochs}", *overrides]
            )
            seconds[name].append(wall)
            inside[name].append(result["breakdown_seconds"]["evaluation"])
            saving[name].append(result["breakdown_seconds"]["checkpoint"])
    note = f"{epochs} epochs at batch {BATCH_SIZE}, test split evaluated after each"
    for name in EVALUATIONS:
        yield make_row("retinanet", "txl_pbc_evaluated", name, "wall_seconds", "s", seconds[name], note)
        yield make_row("retinanet", "txl_pbc_evaluated", name, "evaluation_seconds", "s", inside[name], note)
        # Without a target no best checkpoint is kept; for a late score the weights of each evaluation are saved.
        yield make_row("retinanet", "txl_pbc_evaluated", name, "checkpoint_seconds", "s", saving[name], note)


def train_ours(folder: Path, seed: int) -> tuple[float, float, float]:
    """Return score, wall seconds and training images/s of the recipe through `fasttrain fit`."""
    schedule = [f"trainer.max_epochs={EPOCHS}", f"trainer.check_val_every_n_epoch={EPOCHS}"]
    result, seconds = fit_once([*overrides_for(folder, seed), *schedule])
    return result["quality"]["value"], seconds, result["samples_per_second"]


def train_plain(folder: Path, seed: int) -> tuple[float, float, float]:
    """Return the same of torchvision's RetinaNet in plain Lightning."""
    from fasttrain.recipes.retinanet.peer import PlainCoco, TorchvisionRetinaNet, plain_loader

    pl.seed_everything(seed, workers=True, verbose=False)
    begin = time.perf_counter()
    train = PlainCoco(folder, folder / "instances_train.json", flip=True)
    test = PlainCoco(folder, folder / "instances_test.json", flip=False)
    workers = min(16, usable_cores() - 1)
    module = TorchvisionRetinaNet(test.coco, IMAGE_SIZE, OPTIMIZER)
    clock = _TrainingClock()
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=EPOCHS, check_val_every_n_epoch=EPOCHS, num_sanity_val_steps=0,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False, benchmark=True,
    )  # fmt: skip
    trainer.fit(module, plain_loader(train, BATCH_SIZE, True, workers), plain_loader(test, BATCH_SIZE, False, workers))
    seconds = time.perf_counter() - begin
    return module.score["map"], seconds, trainer.global_step * BATCH_SIZE / clock.seconds


class _TrainingClock(pl.Callback):
    """Wall seconds of training epochs without their validation."""

    def __init__(self) -> None:
        self.seconds, self._begun = 0.0, 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.is_last_batch:
            torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self._begun
