"""Bench cases of the ResNet-50 recipe: images/s in `Trainer.fit` without a loader and from JPEGs, a real small set."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fasttrain.bench import Case
from fasttrain.callbacks.bn_relu.sites import BNReLUSurgery
from fasttrain.callbacks.channels_last.layout import batch_to_channels_last, to_channels_last
from fasttrain.callbacks.cuda_graph_step.bench_fit import StepTimer, timed_fit
from fasttrain.callbacks.cuda_graph_step.bench_ranks import RankWork, two_gpus
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.measure import Row, make_row
from fasttrain.recipes.resnet50 import bench_grocery, bench_imagenet
from fasttrain.recipes.resnet50.model import ResNetConfig
from fasttrain.recipes.resnet50.module import ResNetTraining, TrainingConfig
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig

BATCHES = (64, 256, 400)
WARM_UP, WINDOW, ENOUGH_S, MOST_STEPS = 20, 10, 3.0, 600
NOTE = "Trainer.fit, LARS, bf16-mixed, random batches on the device, no loader"


def cases() -> list[Case]:
    """Return the recipe's bench cases."""
    return [
        *(
            Case(
                "resnet50",
                f"step_224_b{batch}",
                f"training images/s at 224², batch {batch}, without a loader: plain, compiled, patched, in a graph",
                partial(step_rows, batch),
                needs_gpu=True,
            )
            for batch in BATCHES
        ),
        *bench_imagenet.cases(),
        bench_grocery.case(),
        Case(
            "resnet50",
            "two_gpus",
            "training images/s a GPU at 224², batch 256 a GPU: two GPUs against one",
            lambda: two_gpus("resnet50", f"{__name__}:rank_work"),
            needs_gpu=True,
        ),
    ]


def rank_work() -> RankWork:
    """Return what each GPU trains on in `two_gpus`: the network in channels_last, with bn_relu."""
    module = make_module("resnet50", 256)
    _fused(module)
    batches = [batch_to_channels_last(each) for each in random_batches(256, 224, "cpu")]
    return RankWork(module, batches, 256, "224², batch 256 a GPU, LARS, channels_last, bn_relu")


def step_rows(batch: int, side: int = 224, arch: Any = "resnet50", accelerator: str = "gpu") -> Iterator[Row]:
    """Yield images/s of each variant; one whose step was not replayed is left out, its reason printed."""
    row = partial(make_row, "resnet50", f"step_{side}_b{batch}")
    for variant, what, prepare, graph in variants():
        timer = StepTimer(WARM_UP, WINDOW, ENOUGH_S, CUDAGraphStep() if graph and accelerator == "gpu" else None)
        module = make_module(arch, batch)
        batches = random_batches(batch, side, accelerator)
        if prepare is not None:
            prepare(module)
            batches = [batch_to_channels_last(each) for each in batches]
        precision = "bf16-mixed" if accelerator == "gpu" else "32-true"  # bf16 takes seconds there
        timed_fit(module, batches, timer, MOST_STEPS, precision, accelerator)
        if timer.why_not_credited is not None:
            print(f"resnet50: {variant} at batch {batch} is left out: {timer.why_not_credited}")
            continue
        rates = [batch / time * 1e3 for time in timer.step_ms]
        yield row(variant, "images_per_second", "images/s", rates, f"{NOTE}; {what}")


def variants() -> list[tuple[str, str, Callable[[ResNetTraining], Any] | None, bool]]:
    """Return name, description, what is done to the module, and whether the step is captured."""
    return [
        ("plain", "nothing on", None, False),
        ("channels_last", "channels_last", to_channels_last, False),
        ("compile", "channels_last, the network compiled as a whole", _compiled, False),
        ("compile_graph", "the same, whole step in a graph", _compiled, True),
        ("bn_relu", "channels_last, bn_relu", _fused, False),
        ("graph", "channels_last, whole step in a graph", to_channels_last, True),
        ("full", "channels_last, bn_relu, whole step in a graph", _fused, True),
    ]


def make_module(arch: Any, batch: int) -> ResNetTraining:
    """Return the recipe's module with LARS, from a fixed start."""
    torch.manual_seed(0)
    optimizer = OptimizerConfig(batch_size=batch, warmup_epochs=0)
    return ResNetTraining(TrainingConfig(ResNetConfig(arch=arch), optimizer))


def random_batches(batch: int, side: int, accelerator: str) -> list[dict[str, torch.Tensor]]:
    """Return two batches on the device."""
    device = "cuda" if accelerator == "gpu" else "cpu"
    return [
        {
            "images": torch.randint(256, (batch, 3, side, side), dtype=torch.uint8, device=device),
            "labels": torch.randint(1000, (batch,), device=device),
            "bad_image_id": torch.full((batch,), -1, device=device),
        }
        for _ in range(2)
    ]


def _compiled(module: ResNetTraining) -> None:
    to_channels_last(module)
    torch._dynamo.reset()
    module.model.compile()


def _fused(module: ResNetTraining) -> None:
    to_channels_last(module)
    BNReLUSurgery(module).apply()
