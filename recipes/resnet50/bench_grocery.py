"""A real small set, from scratch: the recipe against torchvision's ResNet-50 in plain Lightning, same schedule."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from rich.console import Console

from fasttrain.bench import Case
from fasttrain.callbacks import CATALOGUE
from fasttrain.environment import usable_cores
from fasttrain.errors import ConfigError
from fasttrain.fit import fit
from fasttrain.judgement import yaml_text
from fasttrain.measure import Row, make_row
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig

DATA_VARIABLE = "FASTTRAIN_GROCERY"
SEEDS = (0, 1, 2)
SIDE, RESIZE, BATCH_SIZE = 144, 160, 64
EPOCHS, EVERY = 40, 5
CROP_AREA = (0.2, 1.0)
LABEL_SMOOTHING = 0.1
TARGET = 0.5
"""Top-1 on the test split whose time is told."""
# From scratch on 2,640 photographs: SGD with momentum, the decay that small sets want.
OPTIMIZER = OptimizerConfig(name="sgd", lr=0.1, lr_for_batch=None, weight_decay=5e-4, warmup_epochs=3.0)

Run = tuple[float, float, float]
"""Top-1 at the end, wall seconds, and wall seconds until an evaluation reached `TARGET` (NaN if none did)."""


def case() -> Case:
    """Return the case."""
    summary = f"top-1 on cls_grocery160's test split (folder in ${DATA_VARIABLE}) after {EPOCHS} epochs, 3 seeds"
    return Case("resnet50", "cls_grocery160", summary, grocery_rows, needs_gpu=True)


def grocery_rows(seeds: tuple[int, ...] = SEEDS) -> Iterator[Row]:
    """Yield accuracy, seconds and seconds to the target of both, over the seeds."""
    folder = _data_folder()
    for variant, train in (("full", train_ours), ("plain", train_plain)):
        runs = [train(folder, seed) for seed in seeds]
        note = f"{EPOCHS} epochs at batch {BATCH_SIZE}, {SIDE}², from scratch; top1 of seeds {seeds}: "
        note += " ".join(f"{run[0]:.4f}" for run in runs)
        row = partial(make_row, "resnet50", "cls_grocery160", variant)
        yield row("top1", "", [run[0] for run in runs], note)
        yield row("train_seconds", "s", [run[1] for run in runs], note)
        yield row("seconds_to_target", "s", [run[2] for run in runs], f"top1 {TARGET}; {note}")


def train_ours(folder: Path, seed: int) -> Run:
    """Train the recipe through `fasttrain fit` with its preset for this hardware."""
    overrides = [
        f"seed={seed}",
        f"data.train={folder / 'train'}",
        f"data.val={folder / 'test'}",
        f"data.image_size={SIDE}",
        f"data.resize={RESIZE}",
        f"data.batch_size={BATCH_SIZE}",
        f"data.crop_area={list(CROP_AREA)}",
        f"module.label_smoothing={LABEL_SMOOTHING}",
        *(
            f"module.optimizer.{key}={yaml_text(value)}"
            for key, value in asdict(OPTIMIZER).items()
            if key != "batch_size"
        ),
        f"trainer.max_epochs={EPOCHS}",
        f"trainer.check_val_every_n_epoch={EVERY}",
        f"module.evaluation_offset={EVERY - 1}",
        f"target.value={TARGET}",
        "target.stop=false",
    ]
    with tempfile.TemporaryDirectory() as scratch:  # a run leaves gigabytes of checkpoints
        begin = time.perf_counter()
        resolved = resolve(find_recipe("resnet50"), overrides)
        result = fit(resolved, CATALOGUE, run_dir=Path(scratch) / "run", console=Console(width=160)).whole().result
        seconds = time.perf_counter() - begin
    reached = result["reached_at"]["seconds"] if result["reached_at"] else float("nan")
    return result["quality"]["value"], seconds, reached


def train_plain(folder: Path, seed: int) -> Run:
    """Train torchvision's network, with its loader and transforms, in plain Lightning."""
    from fasttrain.recipes.resnet50.peer import TorchvisionResNet, plain_loader

    pl.seed_everything(seed, workers=True, verbose=False)
    begin = time.perf_counter()
    workers = min(16, usable_cores() - 1)
    train = plain_loader(folder / "train", SIDE, RESIZE, BATCH_SIZE, CROP_AREA, workers)
    test = plain_loader(folder / "test", SIDE, RESIZE, BATCH_SIZE, None, workers)
    module = TorchvisionResNet(81, OPTIMIZER, LABEL_SMOOTHING)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=EPOCHS, check_val_every_n_epoch=EVERY, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, benchmark=True,
    )  # fmt: skip
    trainer.fit(module, train, test)
    reached = [moment - begin for moment, score in module.scores if score >= TARGET]
    return module.scores[-1][1], time.perf_counter() - begin, reached[0] if reached else float("nan")


def _data_folder() -> Path:
    given = os.environ.get(DATA_VARIABLE)
    if not given or not (Path(given) / "train").is_dir():
        raise ConfigError(f"set {DATA_VARIABLE} to the folder of cls_grocery160 with train/ and test/.")
    return Path(given)
