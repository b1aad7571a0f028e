"""Training from JPEGs on disk: images/s of whole fits, and the share of their time in which they wait for data.

ImageNet's own files may not be passed on, so these are pictures that cost a decoder as much: 500 x 375 pixels, 91 kB,
in the page cache.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import lightning.pytorch as pl

from fasttrain.bench import Case
from fasttrain.bench_data import WARM_UP, Rates, bench_data
from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.dali_loader.bench_images import photo_like_classes
from fasttrain.callbacks.dali_loader.optimization import QUEUES
from fasttrain.environment import Hardware, cache_folder, usable_cores
from fasttrain.measure import Row, make_row
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig
from fasttrain.step_clock import StepClock, StepTime

BATCHES = (256, 64)  # of the first no more is said in the case's name
IMAGES, CLASSES, DISTINCT, SIZE = 102_400, 1000, 2048, (500, 375)
DALI = "optimizations.dali_loader={num_threads: 12, hw_decoder_load: 1.0}"
VARIANTS = {
    "full": ("bf16-mixed, channels_last, bn_relu, whole step in a graph, DALI", [DALI]),
    "eager": ("the same without the graph", [DALI, "optimizations.cuda_graph_step=false"]),
}


def cases() -> list[Case]:
    """Return the cases."""
    return [
        Case(
            "resnet50",
            "imagenet_224" if batch == BATCHES[0] else f"imagenet_224_b{batch}",
            f"training images/s from JPEGs of {SIZE[0]} x {SIZE[1]} in Trainer.fit, batch {batch}, and its data wait",
            partial(imagenet_rows, batch),
            needs_gpu=True,
        )
        for batch in BATCHES
    ]


def imagenet_rows(batch: int, *, steps: int = 100, preset: str = "full", image_size: int = 224) -> Iterator[Row]:
    """Yield the rows of plain Lightning with torchvision's transforms and of the recipe, with a graph and without.

    Args:
        batch: images a step.
        steps: that are timed, of each.
        preset: of the recipe.
        image_size: side of what is cut out of the pictures.
    """
    case = "imagenet_224" if batch == BATCHES[0] else f"imagenet_224_b{batch}"
    folder = photo_like_classes(cache_folder() / "bench-images", IMAGES, CLASSES, DISTINCT, SIZE)
    row = partial(make_row, "resnet50", case)
    for variant, (what, overrides) in VARIANTS.items():
        given = [f"preset={preset}", f"data.train={folder}", f"data.val={folder}", f"data.batch_size={batch}",
                 f"data.image_size={image_size}", *overrides]  # fmt: skip
        found, prepared = bench_data(resolve(find_recipe("resnet50"), given), CATALOGUE, steps)
        names = [each.name for each in prepared.plan.applying if each.applied()]
        note = f"{what}; applied: {', '.join(names)}; {QUEUES} {os.environ.get(QUEUES, 'not set')}"
        yield from _of_fit(case, variant, batch, found.steps, note)
        for part, rates in (("loader", found.loader), ("step", found.step)):
            yield row(variant, f"{part}_images_per_second", "images/s", rates.parts, f"the {part} alone; {note}")
    workers = min(16, usable_cores())
    note = f"torchvision's ResNet-50, ImageFolder and v2 transforms, bf16-mixed, {workers} processes"
    yield from _of_fit(case, "plain", batch, plain_steps(folder, batch, steps, workers, image_size), note)


def plain_steps(folder: Path, batch: int, steps: int, workers: int, image_size: int) -> list[StepTime]:
    """Return the times of steps as plain Lightning takes them."""
    from fasttrain.recipes.resnet50.peer import TorchvisionResNet, plain_loader

    hardware = Hardware.here()
    clock = StepClock(hardware.device)
    module = TorchvisionResNet(CLASSES, OptimizerConfig(batch_size=batch, warmup_epochs=0), label_smoothing=0.1)
    on_gpu = hardware.kind == "gpu"
    with quiet_libraries():
        trainer = pl.Trainer(
            accelerator="gpu" if on_gpu else "cpu", devices=1, precision="bf16-mixed" if on_gpu else "32-true",
            max_steps=WARM_UP + steps + 1, limit_val_batches=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, benchmark=True, profiler=clock,
        )  # fmt: skip
        loader = plain_loader(folder, image_size, image_size, batch, (0.05, 1.0), workers)
        trainer.fit(module, loader)
    return clock.steps(WARM_UP, WARM_UP + steps)


def _of_fit(case: str, variant: str, batch: int, steps: Sequence[StepTime], note: str) -> Iterator[Row]:
    row = partial(make_row, "resnet50", case, variant)
    rates = Rates.of([batch] * len(steps), [step.whole for step in steps])
    yield row("images_per_second", "images/s", rates.parts, note)
    waited = 100 * sum(step.data_wait for step in steps) / sum(step.whole for step in steps)
    yield row("data_wait_percent", "%", [waited], f"of all steps' time; {note}")
