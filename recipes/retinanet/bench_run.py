"""One training to a target in a process of its own, so that its start counts from the first import on.

    python -m fasttrain.recipes.retinanet.bench_run JSON

The last line of its output is JSON too. Moments are seconds since `begun`, which the parent noted before it started it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STARTING_BATCHES = 10
"""In ours eager steps, the capture, checked replays, and a few more; in both what the first batches wait for."""


@dataclass(frozen=True)
class Order:
    """What to train."""

    variant: str
    """`full` or `plain`."""
    folder: str
    seed: int
    epochs: int
    every: int
    """Epochs from one evaluation to the next."""
    target: float
    batch_size: int
    begun: float
    """`time.time()` of the parent."""
    optimizer: dict[str, Any]
    """Of plain Lightning: the fields of `OptimizerConfig`."""
    overrides: Sequence[str] = ()
    """Of the recipe; plain Lightning is given none."""
    workers: int | None = None
    """Of plain Lightning's loader; None is as many as there are cores, at most 16."""
    image_size: tuple[int, int] = (512, 512)
    accelerator: str = "gpu"
    """Of plain Lightning."""


@dataclass(frozen=True)
class Report:
    """What came of it."""

    startup_seconds: float
    """Until the first few batches were trained on: imports, reading, building, compiling, capturing, warming up."""
    seconds_to_target: float | None
    """Until the score was known that reached the target; None if none did."""
    seconds: float
    """Until training ended, at the target or after all epochs."""
    scores: Sequence[float]
    """One for each evaluation."""
    details: dict[str, Any]


def train(order: Order) -> Report:
    """Train, and stop at the target."""
    return (_full if order.variant == "full" else _plain)(order)


def _full(order: Order) -> Report:
    from rich.console import Console

    from fasttrain.callbacks import CATALOGUE
    from fasttrain.fit import fit
    from fasttrain.fit_windows import Started
    from fasttrain.recipe import find_recipe, resolve
    from fasttrain.run_summary import load_run

    started = Started(STARTING_BATCHES)
    with tempfile.TemporaryDirectory() as scratch:
        resolved = resolve(find_recipe("retinanet"), order.overrides)
        called = time.time()
        console = Console(file=sys.stderr, width=160)
        outcome = fit(resolved, CATALOGUE, run_dir=Path(scratch) / "run", console=console, callbacks=[started])
        curve = load_run(outcome.folder).curves.get("map")
    result = outcome.whole().result
    reached = result["reached_at"]
    known = None if reached is None else reached.get("score_arrived_seconds", reached["seconds"])
    return Report(
        (started.at or called) - order.begun,
        None if known is None else called - order.begun + known,
        called - order.begun + result["seconds"],
        curve.values if curve is not None else (),
        {"imports": called - order.begun, **result["breakdown_seconds"], "steps": result["steps"]},
    )


def _plain(order: Order) -> Report:
    import lightning.pytorch as pl

    from fasttrain.config import TargetConfig
    from fasttrain.environment import usable_cores
    from fasttrain.fit_windows import Started
    from fasttrain.recipes.retinanet.optimizer import OptimizerConfig
    from fasttrain.recipes.retinanet.peer import PlainCoco, TorchvisionRetinaNet, plain_loader
    from fasttrain.target import StopAtTarget

    pl.seed_everything(order.seed, workers=True, verbose=False)
    folder = Path(order.folder)
    train, test = (
        PlainCoco(folder, folder / f"instances_{split}.json", flip=split == "train") for split in ("train", "test")
    )
    workers = min(16, usable_cores()) if order.workers is None else order.workers
    module = TorchvisionRetinaNet(test.coco, order.image_size, OptimizerConfig(**order.optimizer))
    started, target = Started(STARTING_BATCHES), StopAtTarget(TargetConfig("map", order.target))
    target.moment = lambda: {"seconds": time.time() - order.begun}
    trainer = pl.Trainer(
        accelerator=order.accelerator, devices=1, max_epochs=order.epochs, check_val_every_n_epoch=order.every,
        num_sanity_val_steps=0, callbacks=[started, target], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, benchmark=True,
    )  # fmt: skip
    called = time.time()
    trainer.fit(
        module,
        plain_loader(train, order.batch_size, True, workers),
        plain_loader(test, order.batch_size, False, workers),
    )
    reached = target.reached_at
    return Report(
        (started.at or called) - order.begun,
        None if reached is None else reached["seconds"],
        time.time() - order.begun,
        [score for _, score in target.scores],
        {"imports": called - order.begun, "steps": trainer.global_step},
    )


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    report = train(Order(**{**values, "image_size": tuple(values["image_size"])}))
    print(json.dumps(asdict(report)))
