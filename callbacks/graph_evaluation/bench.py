"""The forward of ResNet-50 in an evaluation: eager, compiled, and replayed as the room does it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchvision.models import resnet50

from fasttrain.bench import Case
from fasttrain.callbacks.graph_evaluation.captured_call import CapturedCall
from fasttrain.callbacks.graph_evaluation.places import places
from fasttrain.errors import OptimizationError
from fasttrain.measure import Row, make_row, sample_ms

BATCHES = (1, 8, 64)


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case(
            "graph_evaluation",
            f"resnet50_b{batch}",
            f"ResNet-50's forward, {batch} images of 224²",
            run,
            needs_gpu=True,
        )
        for batch in BATCHES
        for run in [partial(resnet50_forward, batch)]
    ]


class Classifier(pl.LightningModule):
    """A module with one network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = resnet50()


def resnet50_forward(batch: int, *, repeats: int = 30) -> Iterator[Row]:
    """Yield milliseconds of a call, in bf16 autocast and channels_last.

    Args:
        batch: images.
        repeats: of each variant.

    Raises:
        OptimizationError: the network was not captured.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    module = Classifier().eval().to(device, memory_format=torch.channels_last)
    images = torch.rand(batch, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)
    (place,) = places(module)
    notes: list[str] = []

    def row(variant: str, call: Callable[[Tensor], Any], note: str) -> Row:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            samples = sample_ms(lambda: call(images), device, warmup=6, repeats=repeats)
        return make_row("graph_evaluation", f"resnet50_b{batch}", variant, "ms", "ms", samples, note)

    yield row("plain", module.net, "eager")
    call = CapturedCall(place, device, 1, True, False, notes.append, [])
    call.install()
    yield row("ours", module.net, "replayed, its output copied")
    call.release()
    if notes:
        raise OptimizationError(f"graph_evaluation: {notes[0]}.")
    yield row("compile", torch.compile(module.net), "torch.compile, default mode")
