"""Forward and backward of the MLPerf RetinaNet's classification loss: one-hot, eager, compiled, ours, and the floor."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.retinanet import RetinaNetClassificationHead

from fasttrain.bench import Case
from fasttrain.callbacks.focal_loss import bench_apex
from fasttrain.callbacks.focal_loss.loss import FocalLoss
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms
from fasttrain.peers import runs_beside
from fasttrain.recipes.retinanet.loss import focal_loss as of_recipe

# MLPerf Training v2.0, RetinaNet: images of 800 x 800, nine anchors a cell at strides 8 to 128, 264 classes.
ANCHORS = tuple(9 * side**2 for side in (100, 50, 25, 13, 7))
CLASSES = 264
BOXES = 32
LOSS_SCALE = 65536.0  # GradScaler's first

Step = Callable[[], Any]


def cases() -> list[Case]:
    """Return the room's bench cases."""
    size = "16 x 120,087 x 264 logits, fp16 and bf16"
    return [
        Case("focal_loss", "mlperf_b16", f"forward and backward on {size}, in one tensor", mlperf_b16, True),
        Case("focal_loss", "mlperf_b16_levels", f"the same on {size}, level by level", mlperf_b16_levels, True),
        Case("focal_loss", "coco_b4_cpu", "the same on 4 x 4,536 x 80 logits, fp32 on the CPU", coco_b4_cpu),
    ]


def mlperf_b16() -> Iterator[Row]:
    """Yield milliseconds of forward and backward by way of computing it; the case of bf16 has it in its name."""
    for dtype, case in ((torch.float16, "mlperf_b16"), (torch.bfloat16, "mlperf_b16_bf16")):
        yield from _gpu_rows(case, dtype, (sum(ANCHORS),), with_one_hot=True)


def mlperf_b16_levels() -> Iterator[Row]:
    """Yield the same for the five levels as the head gives them; all but ours concatenate them first."""
    for dtype, case in ((torch.float16, "mlperf_b16_levels"), (torch.bfloat16, "mlperf_b16_levels_bf16")):
        yield from _gpu_rows(case, dtype, ANCHORS, with_one_hot=False)


def coco_b4_cpu() -> Iterator[Row]:
    """Yield the same on the CPU."""
    work = _Work(torch.device("cpu"), torch.float32, 4, (3402, 864, 270), 80)
    for variant, step in (("plain", work.one_hot), ("eager", work.eager), ("ours", work.ours())):
        yield work.row("coco_b4_cpu", variant, step)


def _gpu_rows(case: str, dtype: torch.dtype, anchors: tuple[int, ...], with_one_hot: bool) -> Iterator[Row]:
    work = _Work(torch.device("cuda"), dtype, 16, anchors, CLASSES)
    note = str(dtype).removeprefix("torch.")
    yield work.row(case, "ours", work.ours(), note)
    yield work.row(case, "ours_graph", captured(work.ours()), f"{note}, replays of a CUDA graph")
    yield work.row(case, "ours_scaled", work.ours((LOSS_SCALE,)), f"{note}, under a loss scale of {LOSS_SCALE:.0f}")
    yield work.row(
        case, "ours_unexpected", work.ours((1.0, 2.0)), f"{note}, the gradient of the loss is never the last one"
    )
    compiled = torch.compile(of_recipe, fullgraph=True)
    yield work.row(case, "compile", lambda: work.eager(compiled), f"{note}, torch.compile of eager")
    yield work.row(case, "eager", work.eager, f"{note}, the RetinaNet recipe's: no one-hot targets, in float32")
    if with_one_hot:
        yield work.row(case, "plain", work.one_hot, f"{note}, torchvision's: image by image, one-hot targets")
    yield work.row(case, "ours_in_place", work.ours(in_place=True), f"{note}, gradients over the logits")
    if len(anchors) == 1 and dtype == torch.float16 and runs_beside(bench_apex.TRIAL):
        # Not in a graph: its kernels go to the legacy stream, which a capture refuses.
        yield work.row(case, "apex", work.apex, f"{note}, Apex's focal_loss, one normalizer for all images")
    logits = work.levels[0].detach()
    other = torch.empty_like(logits)
    if len(anchors) == 1:
        yield work.row(case, "copy", lambda: other.copy_(logits), f"{note}, the logits to as much memory: no loss")
    size = 2 * sum(level.numel() * level.element_size() for level in work.levels)
    floor_ms = size / H200_BYTES_PER_SECOND * 1e3
    yield make_row("focal_loss", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], "logits in, gradients out, at 4.3 TB/s")


class _Work:
    """Logits, targets, and a step of forward and backward for each variant."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, batch: int, anchors: tuple[int, ...], classes: int
    ) -> None:
        torch.manual_seed(0)
        self.device, total = device, sum(anchors)
        self.levels = [
            (torch.randn(batch, n, classes, device=device, dtype=dtype) - 4).requires_grad_() for n in anchors
        ]
        self.labels = torch.randint(classes, (batch, BOXES), device=device)
        self.matched = torch.full((batch, total), -1, device=device)
        # Matched anchors lie side by side: 12 for each box, and 20 that match too little to be used.
        for box in range(BOXES):
            start = (box * total) // BOXES
            self.matched[:, start : start + 20] = -2
            self.matched[:, start + 4 : start + 16] = box
        classes_of_boxes = self.labels.gather(1, self.matched.clamp(min=0))
        self.targets = torch.where(self.matched >= 0, classes_of_boxes, self.matched)
        self.foreground = (self.targets >= 0).sum().float().reshape(1)
        self.head = RetinaNetClassificationHead(8, 1, classes)

    def row(self, case: str, variant: str, step: Step, note: str = "") -> Row:
        """Return the row of a step."""
        repeats = 30 if self.device.type == "cuda" else 10
        times = sample_ms(step, self.device, warmup=5 if repeats == 30 else 2, repeats=repeats)
        return make_row("focal_loss", case, variant, "fwd_bwd_ms", "ms", times, note)

    def ours(self, factors: tuple[float, ...] = (1.0,), in_place: bool = False) -> Step:
        """Return the step of FocalLoss, whose loss is multiplied by the factors in turn."""
        loss, turns = FocalLoss(in_place=in_place), cycle(factors)

        def step() -> None:
            factor = next(turns)
            value = loss(self.levels, self.targets)
            self._backward(value if factor == 1 else value * factor)

        return step

    def eager(self, loss: Callable[..., Tensor] = of_recipe) -> None:
        """Concatenate, if there is more than one level, and compute as the recipe does."""
        logits = torch.cat(self.levels, dim=1) if len(self.levels) > 1 else self.levels[0]
        self._backward(loss(logits, self.labels, self.matched))

    def one_hot(self) -> None:
        """As torchvision's RetinaNet."""
        targets = [{"labels": labels} for labels in self.labels]
        logits = torch.cat(self.levels, dim=1) if len(self.levels) > 1 else self.levels[0]
        self._backward(self.head.compute_loss(targets, {"cls_logits": logits}, list(self.matched)))

    def apex(self) -> None:
        """As Apex computes it."""
        self._backward(bench_apex.focal_loss(self.levels[0], self.targets, self.foreground))

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        for level in self.levels:
            level.grad = None
