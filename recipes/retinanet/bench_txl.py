"""TXL-PBC, real images of blood cells, as the bench cases train on it: where it is, and with what settings."""

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from fasttrain.callbacks import CATALOGUE
from fasttrain.errors import ConfigError
from fasttrain.fit import fit
from fasttrain.judgement import yaml_text
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.retinanet.optimizer import OptimizerConfig

DATA_VARIABLE = "FASTTRAIN_TXL_PBC"
IMAGE_SIZE = (512, 512)
BATCH_SIZE = 16
MAX_BOXES = 200
EPOCHS = 12
# From scratch on a thousand images: a larger step than MLPerf's fine-tuning, and a schedule that ends.
OPTIMIZER = OptimizerConfig(name="adamw", lr=3e-4, weight_decay=0.01, warmup_epochs=1.0, schedule="cosine")


def data_folder() -> Path:
    """Return where the set lies.

    Raises:
        ConfigError: nobody has said it.
    """
    given = os.environ.get(DATA_VARIABLE)
    if not given or not (Path(given) / "instances_train.json").is_file():
        raise ConfigError(
            f"set {DATA_VARIABLE} to the folder of TXL-PBC with instances_train.json, instances_test.json and images/."
        )
    return Path(given)


def overrides_for(folder: Path, seed: int, image_size: tuple[int, int] = IMAGE_SIZE) -> list[str]:
    """Return the recipe's overrides for training on it; scored on the test split."""
    return [
        "target.stop=false",
        f"seed={seed}",
        f"data.train_images={folder}",
        f"data.train_annotations={folder / 'instances_train.json'}",
        f"data.val_images={folder}",
        f"data.val_annotations={folder / 'instances_test.json'}",
        f"data.image_size={list(image_size)}",
        f"data.batch_size={BATCH_SIZE}",
        f"data.max_boxes={MAX_BOXES}",
        *(f"module.optimizer.{key}={yaml_text(value)}" for key, value in asdict(OPTIMIZER).items()),
    ]


def fit_once(overrides: list[str]) -> tuple[dict[str, Any], float]:
    """Return a run's result and its wall seconds.

    Raises:
        KeyboardInterrupt: it was stopped before its end.
    """
    with tempfile.TemporaryDirectory() as scratch:  # a run leaves a gigabyte of checkpoints
        begin = time.perf_counter()
        resolved = resolve(find_recipe("retinanet"), overrides)
        result = fit(resolved, CATALOGUE, run_dir=Path(scratch) / "run", console=Console(width=160)).whole().result
        return result, time.perf_counter() - begin
