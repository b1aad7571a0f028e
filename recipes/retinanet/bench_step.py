"""The MLPerf training step alone, on static random batches: what each optimization adds to a CUDA graph.

Images/s without a loader, and but for the last variant without matching, which MLPerf's submissions do in their loader.
Every variant is in channels_last and bf16 autocast, with fused Adam, and its whole step is one replayed graph.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttrain.bench import Case
from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.cuda_graph_step.bench_ranks import RankWork, two_gpus
from fasttrain.callbacks.focal_loss import FocalLoss
from fasttrain.callbacks.focal_loss.sites import FocalLossSurgery
from fasttrain.measure import Row, captured, make_row, sample_ms
from fasttrain.patches import PatchOptimization, PatchSurgery
from fasttrain.plan import requested
from fasttrain.recipes.retinanet.matching import PADDING_LABEL as PADDING
from fasttrain.recipes.retinanet.matching import match
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining, TrainingConfig

BATCHES = (16, 32)
BOXES, MAX_BOXES = 16, 1000
WARMUP, REPEATS = 3, 20
FOCAL = "focal_loss"
# In the order in which a plan applies them; each variant has those of the one before.
PATCHES = (FOCAL, "conv_bias_relu", "bottleneck", "frozen_bn")
MATCHING = "anchor_matching"
# MLPerf's: constants for batch norm, conv1 and layer1 frozen.
CONFIG = RetinaNetConfig(norm="frozen", trainable_layers=3)


def cases() -> list[Case]:
    """Return the cases of the step."""
    return [
        Case("retinanet", f"step_800_b{batch}", f"MLPerf's step at 800², batch {batch}, images/s and ms",
             lambda batch=batch: step_rows(batch), needs_gpu=True)  # type: ignore[misc]
        for batch in BATCHES
    ] + [
        Case("retinanet", "two_gpus", "training images/s a GPU at 800², batch 32 a GPU: two GPUs against one",
             lambda: two_gpus("retinanet", f"{__name__}:rank_work"), needs_gpu=True)
    ]  # fmt: skip


def rank_work() -> RankWork:
    """Return what each GPU trains on in `two_gpus`: MLPerf's network with all patches, matching in the step."""
    torch.manual_seed(0)
    module = RetinaNetTraining(TrainingConfig(model=CONFIG))
    module.to(memory_format=torch.channels_last)
    for name in (*PATCHES, MATCHING):
        _patch(module.model, name)
    images, boxes, labels = _batch(32, "cpu")
    boxes, labels = F.pad(boxes, (0, 0, 0, MAX_BOXES - BOXES)), F.pad(labels, (0, MAX_BOXES - BOXES), value=PADDING)
    batch = {"images": images, "boxes": boxes, "labels": labels}
    what = f"800², batch 32 a GPU, Adam, channels_last, {', '.join((*PATCHES, MATCHING))}"
    return RankWork(module, [batch], 32, what)


def step_rows(batch: int) -> Iterator[Row]:
    """Yield the rows of plain, compiled and patched steps, patches added one by one."""
    yield from _rows(batch, "graph", ())
    yield from _rows(batch, "compile_graph", (), compiled=True)
    for count in range(1, len(PATCHES) + 1):
        patches = PATCHES[:count]
        variant = "ours" if patches == PATCHES else f"graph_{patches[-1]}"
        yield from _rows(batch, variant, patches)
    yield from _rows(batch, "ours_matching", (*PATCHES, MATCHING))


def make_step(batch: int, patches: Sequence[str] = (), compiled: bool = False) -> Callable[[], None]:
    """Return an eager training step of the whole model on one batch: forward, losses, backward, Adam.

    Where the matching is patched it is a part of the step, over boxes padded to MLPerf's capacity; else it is given.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = True
    model = RetinaNet(CONFIG).cuda().to(memory_format=torch.channels_last)
    for name in patches:
        _patch(model, name)
    images, boxes, labels = _batch(batch)
    matched = None if MATCHING in patches else match(model.anchors, boxes, labels)
    if matched is None:
        boxes, labels = F.pad(boxes, (0, 0, 0, MAX_BOXES - BOXES)), F.pad(labels, (0, MAX_BOXES - BOXES), value=PADDING)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-5, fused=True, capturable=True)

    def losses() -> Tensor:
        terms = model.loss(model.forward_levels(images), boxes, labels, matched)
        return torch.stack(list(terms.values())).sum()

    compute: Any = torch.compile(losses) if compiled else losses

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = compute()
        loss.backward()
        optimizer.step()

    return step


def _rows(batch: int, variant: str, patches: Sequence[str], compiled: bool = False) -> Iterator[Row]:
    step = make_step(batch, patches, compiled)
    times = sample_ms(captured(step), "cuda", warmup=WARMUP, repeats=REPEATS)
    with_ = ", ".join(patches) or ("torch.compile" if compiled else "no patch")
    note = f"bf16, channels_last, whole step in a CUDA graph, {with_}; no loader, "
    note += "matching in the step" if MATCHING in patches else "matching given"
    case = f"step_800_b{batch}"
    yield make_row("retinanet", case, variant, "step_ms", "ms", times, note)
    rates = [batch / time * 1e3 for time in times]
    yield make_row("retinanet", case, variant, "images_per_second", "images/s", rates, note)
    del step
    torch.cuda.empty_cache()


def _patch(model: RetinaNet, name: str) -> None:
    if name == FOCAL:
        FocalLossSurgery(model).apply(lambda alpha, gamma: FocalLoss(alpha, gamma))
        return
    ((optimization,), _) = requested({name: {}}, CATALOGUE)
    assert isinstance(optimization, PatchOptimization)
    PatchSurgery(model, optimization.callback.patches).apply()


def _batch(batch: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    images = torch.randint(256, (batch, 3, *CONFIG.image_size), dtype=torch.uint8, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    corners = torch.rand(batch, BOXES, 2, device=device) * 500
    boxes = torch.cat([corners, corners + 32 + torch.rand(batch, BOXES, 2, device=device) * 250], dim=2)
    labels = torch.randint(CONFIG.num_classes, (batch, BOXES), device=device)
    return images, boxes, labels
