"""MLPerf's RetinaNet in `Trainer.fit`, from JPEGs to Adam: ours with everything on, torchvision's in plain Lightning.

Steady state: after the capture and the choice of algorithms, no evaluation inside, everything else that a run has.
"""

import gc
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console

from fasttrain.bench import Case
from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.dali_loader.bench_annotations import detection_files
from fasttrain.callbacks.dali_loader.bench_images import photo_like_jpegs
from fasttrain.environment import cache_folder, usable_cores
from fasttrain.fit import fit
from fasttrain.fit_windows import StopAfter, data_wait_fraction, samples_per_second, windows_of
from fasttrain.kernel_times import StepProfile
from fasttrain.measure import Row, make_row
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.retinanet.bench_roofline import roofline_rows
from fasttrain.recipes.retinanet.bench_weights import backbone_file
from fasttrain.recipes.retinanet.model import RetinaNetConfig
from fasttrain.recipes.retinanet.optimizer import OptimizerConfig
from fasttrain.recipes.retinanet.peer import PlainCoco, TorchvisionRetinaNet, plain_loader
from fasttrain.step_clock import StepClock

CASE = "openimages_800_b32"
PROFILED_STEPS = 6
GIB = 2**30


@dataclass(frozen=True)
class Work:
    """What is trained on. The usual values are MLPerf's, of images that are like OpenImages' in size and bytes."""

    batch_size: int = 32
    image_size: tuple[int, int] = (800, 800)
    width: int = 1024
    height: int = 768
    files: int = 256
    """Different JPEGs; a set of any length shows them over and over."""
    quality: int = 75
    """Of the JPEGs: 215 kB a file."""
    classes: int = 264
    overrides: tuple[str, ...] = ()
    """Of the recipe."""

    def annotations(self, batches: int) -> Path:
        """Return a COCO file of so many batches, whose images lie beside it."""
        return detection_files(self._pictures(), self.height, self.width, batches * self.batch_size, self.classes)

    def weights(self) -> Path:
        """Return a backbone that stands in for a pretrained one."""
        return backbone_file(self._pictures()[:16])

    def _pictures(self) -> list[Path]:
        return photo_like_jpegs(cache_folder() / "bench-images", self.files, (self.width, self.height), self.quality)


MLPERF = Work()


@dataclass(frozen=True)
class Steps:
    """Which steps of a fit are measured."""

    warm_up: int
    measured: int
    window: int

    @property
    def last(self) -> int:
        """Batches until the fit is stopped: a step is over when the next one begins."""
        return self.warm_up + self.measured + 1


def cases() -> list[Case]:
    """Return the case."""
    summary = f"Trainer.fit at 800², batch {MLPERF.batch_size}, from JPEGs of {MLPERF.width} x {MLPERF.height}: "
    return [Case("retinanet", CASE, summary + "images/s, data wait, memory, where the time goes", in_fit, True)]


def in_fit(
    *, variants: str = "full plain", steps: int = 80, plain_steps: int = 24, precision: str = "bf16-mixed",
    overrides: str = "",
) -> Iterator[Row]:  # fmt: skip
    """Yield images/s, waits for data and memory of both, and of ours where the time goes.

    Args:
        variants: `full`, `plain` or both, with a space between.
        steps: of ours that count.
        plain_steps: of plain Lightning's.
        precision: of both.
        overrides: of the recipe, with spaces between.
    """
    for variant in variants.split():
        _empty()
        if variant == "full":
            profiled = StepProfile(20 + steps, PROFILED_STEPS)
            work = Work(overrides=(*overrides.split(), f"trainer.precision={precision}"))
            yield from full(work, Steps(20, steps, max(1, steps // 8)), profiled)
        else:
            yield from plain(MLPERF, Steps(8, plain_steps, max(1, plain_steps // 8)), precision)


def full(work: Work, steps: Steps, profiled: StepProfile | None = None) -> Iterator[Row]:
    """Yield the rows of `fasttrain fit retinanet` with everything on.

    Args:
        work: what is trained on.
        steps: that count.
        profiled: traces steps after them.
    """
    last = max(steps.last, profiled.first + profiled.steps + 1 if profiled is not None else 0)
    annotations = work.annotations(last + 8)
    clock = StepClock("cuda" if torch.cuda.is_available() else "cpu")
    watching: list[pl.Callback] = [StopAfter(last), *([profiled] if profiled is not None else [])]
    resolved = resolve(find_recipe("retinanet"), _everything_on(annotations, work))
    with tempfile.TemporaryDirectory() as scratch:
        console = Console(width=160)
        outcome = fit(
            resolved, CATALOGUE, run_dir=Path(scratch) / "run", console=console, callbacks=watching, clock=clock
        ).whole()
        note = f"fasttrain fit, {_acting(outcome.folder)}; {resolved.config.trainer.precision}"
    yield from _rows("full", clock, steps, work.batch_size, note)
    if profiled is not None:
        config = RetinaNetConfig(work.classes, image_size=work.image_size, norm="frozen", trainable_layers=3)
        yield from roofline_rows(CASE, "full", profiled.kernels, config, work.batch_size, note)


def plain(
    work: Work, steps: Steps, precision: Any, accelerator: str = "gpu", workers: int | None = None
) -> Iterator[Row]:
    """Yield the rows of torchvision's RetinaNet in plain Lightning, with 16 worker processes at most."""
    annotations = work.annotations(steps.last + 8)
    dataset = PlainCoco(annotations.parent, annotations, flip=True)
    module = TorchvisionRetinaNet(dataset.coco, work.image_size, OptimizerConfig(), str(work.weights()))
    workers = min(16, usable_cores()) if workers is None else workers
    clock = StepClock("cuda" if accelerator == "gpu" else "cpu")
    with quiet_libraries():
        trainer = pl.Trainer(
            accelerator=accelerator, devices=1, max_epochs=1, limit_val_batches=0, precision=precision, profiler=clock,
            callbacks=[StopAfter(steps.last)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, benchmark=True,
        )  # fmt: skip
        trainer.fit(module, plain_loader(dataset, work.batch_size, True, workers))
    note = f"torchvision's RetinaNet, plain Lightning, {workers} worker processes, cuDNN's benchmark; {precision}"
    yield from _rows("plain", clock, steps, work.batch_size, note)


def _everything_on(annotations: Path, work: Work) -> list[str]:
    height, width = work.image_size
    return [
        "seed=0",
        *(f"data.{split}_images={annotations.parent}" for split in ("train", "val")),
        *(f"data.{split}_annotations={annotations}" for split in ("train", "val")),
        f"data.image_size=[{height}, {width}]",
        f"data.batch_size={work.batch_size}",
        f"module.model.weights={work.weights()}",  # so batch norm is frozen, and conv1 and layer1 do not train
        "checkpoint.every_n_minutes=null",
        "trainer.max_epochs=1",
        # The unit that decodes JPEGs takes all of them, so that the cores are left to the step.
        f"optimizations.dali_loader={{hw_decoder_load: 1.0, image_size_hint: [{work.height}, {work.width}]}}",
        "optimizations.async_scoring={}",
        *work.overrides,
    ]


def _acting(folder: Path) -> str:
    entries = json.loads((folder / "plan.json").read_text())["optimizations"]
    return ", ".join(entry["name"] for entry in entries if entry["verdict"] == "applies")


def _rows(variant: str, clock: StepClock, steps: Steps, batch_size: int, note: str) -> Iterator[Row]:
    windows = windows_of(clock, steps.warm_up, steps.measured, steps.window)
    note = f"windows of {steps.window} steps, {note}"
    rates = samples_per_second(windows, batch_size)
    yield make_row("retinanet", CASE, variant, "images_per_second", "images/s", rates, note)
    yield make_row("retinanet", CASE, variant, "data_wait_fraction", "", data_wait_fraction(windows), note)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_reserved() / GIB
        yield make_row("retinanet", CASE, variant, "peak_memory_gib", "GiB", [peak], f"PyTorch's; {note}")


def _empty() -> None:
    gc.collect()  # a Trainer and its module hold each other, and the last fit's memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
