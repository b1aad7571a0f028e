"""MLPerf's evaluation at 800² from batches in memory to rows on the host: what each room adds. Nothing is scored.

The model is one at random, its class bias set so that as many candidates pass the score threshold as are asked for.
"""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fasttrain.bench import Case
from fasttrain.callbacks.batched_nms.sites import BatchedNMSPatches
from fasttrain.callbacks.graph_evaluation.captured_call import CapturedCall
from fasttrain.callbacks.graph_evaluation.places import places
from fasttrain.measure import Row, make_row, synchronize
from fasttrain.patches import PatchSurgery
from fasttrain.recipes.retinanet.model import RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining, TrainingConfig

CASE = "evaluation_800_b32"
BATCH, BATCHES, PASSES = 32, 6, 2
CONFIG = RetinaNetConfig(norm="frozen", trainable_layers=3)
SPREAD, BOX_SPREAD = 1.5, 0.2
"""Standard deviations of logits and box deltas, about a trained model's."""

Batch = dict[str, Tensor]
Move = Callable[[Batch], Batch]


def cases() -> list[Case]:
    """Return the case of the evaluation."""
    summary = f"evaluation at 800², batch {BATCH}, to rows on the host, images/s"
    return [Case("retinanet", CASE, summary, evaluation, needs_gpu=True)]


def evaluation(*, candidates: int = 1000, repeats: int = 3) -> Iterator[Row]:
    """Yield images/s of the plain evaluation, with rooms added one by one, and on batches that lie on the device.

    Args:
        candidates: pairs of box and class above the score threshold, an image.
        repeats: of each variant.
    """
    yield from rows_on(torch.device("cuda", torch.cuda.current_device()), CONFIG, BATCH, candidates, repeats)


def rows_on(device: torch.device, config: RetinaNetConfig, size: int, candidates: int, repeats: int) -> Iterator[Row]:
    """Yield the rows, see `evaluation`; on a CPU nothing is captured."""
    host = [_batch(index, size, config, device.type == "cuda") for index in range(BATCHES)]
    module = _module(config, host[0], candidates).to(device)

    def moved(batch: Batch) -> Batch:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def row(variant: str, batches: list[Batch], move: Move, note: str) -> Row:
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            rates, found = _images_per_second(module, batches, move, device, repeats)
        note = f"bf16, channels_last, {note}, {found:.0f} detections an image"
        return make_row("retinanet", CASE, variant, "images_per_second", "images/s", rates, note)

    copied = "batches copied from pinned memory"
    yield row("plain", host, moved, f"suppression image by image, {copied}")
    PatchSurgery(module, BatchedNMSPatches()).apply()
    yield row("batched_nms", host, moved, f"batched_nms, {copied}")
    notes: list[str] = []
    (place,) = places(module)
    call = CapturedCall(place, device, 2, True, False, notes.append, [])
    call.install()
    graph = "replayed" if device.type == "cuda" else "called again"
    yield row("graph_evaluation", host, moved, f"batched_nms, {graph}, {copied}")
    yield row(
        "ours", [moved(batch) for batch in host], lambda batch: batch, f"batched_nms, {graph}, batches kept on {device}"
    )
    call.release()
    assert not notes, notes


def _images_per_second(
    module: RetinaNetTraining, batches: list[Batch], move: Move, device: torch.device, repeats: int
) -> tuple[list[float], float]:
    """Return the rates, and detections an image."""
    rates, images = list[float](), PASSES * len(batches) * len(batches[0]["images"])
    for _ in range(1 + repeats):
        synchronize(device)
        begun = time.perf_counter()
        for batch in batches * PASSES:
            module.validation_step(move(batch), 0)
        rows = module.validation_rows()
        synchronize(device)
        rates.append(images / (time.perf_counter() - begun))
    return rates[1:], len(np.concatenate(rows)) / images


def _batch(index: int, size: int, config: RetinaNetConfig, pins: bool) -> Batch:
    generator = torch.Generator().manual_seed(index)
    height, width = config.image_size
    images = torch.randint(256, (size, 3, height // 16, width // 16), dtype=torch.uint8, generator=generator)
    images = images.repeat_interleave(16, dim=2).repeat_interleave(16, dim=3)
    batch = {
        "images": images.contiguous(memory_format=torch.channels_last),
        "image_id": torch.arange(size) + index * size,
        "original_size": torch.tensor([[768, 1024]]).repeat(size, 1),
        "bad_image_id": torch.full((size,), -1),
    }
    return {name: tensor.pin_memory() if pins else tensor for name, tensor in batch.items()}


@torch.no_grad()
def _module(config: RetinaNetConfig, batch: Batch, candidates: int) -> RetinaNetTraining:
    torch.manual_seed(0)
    module = RetinaNetTraining(TrainingConfig(config)).eval().to(memory_format=torch.channels_last)
    model = module.model
    logits, deltas = model.head.classification_head.cls_logits, model.head.regression_head.bbox_reg
    bias = logits.bias
    assert bias is not None
    bias.zero_()  # beside it the spread at random would be less than a bit of bf16
    images = batch["images"][:2]
    found = model(images)
    logits.weight.mul_(SPREAD / found.cls_logits.std())
    deltas.weight.mul_(BOX_SPREAD / found.box_deltas.std())
    best = model(images).cls_logits.flatten().topk(len(images) * candidates).values[-1]
    bias.fill_(math.log(config.score_threshold / (1 - config.score_threshold)) - float(best))
    return module
