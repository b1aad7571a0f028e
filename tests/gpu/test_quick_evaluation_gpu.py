"""Evaluations on a GPU: torchvision's detections without a wait, replays that read the weights of now, kept batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fasttrain.callbacks import CUDAGraphStep, EvaluationCache, FusedBatchedNMS, GraphedEvaluation
from fasttrain.callbacks.batched_nms import batched_nms
from fasttrain.callbacks.batched_nms.candidates import Candidates, random_candidates
from fasttrain.callbacks.batched_nms.reference import reference
from fasttrain.capture import captured
from fasttrain.recipes.retinanet.model import RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining, TrainingConfig

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def near_the_threshold() -> Candidates:
    """Pairs whose IoU is 1/2 give or take the last bit."""
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(4, 2000, 2, generator=generator) * 50 + 5
    place = torch.stack([torch.arange(2000) % 50, torch.arange(2000) // 50], dim=1) * 200.0
    corner = place + torch.rand(4, 2000, 2, generator=generator)
    shift = torch.stack([size[..., 0] / 3, torch.zeros(4, 2000)], dim=2)
    pairs = [torch.cat([at, at + size], dim=2) for at in (corner, corner + shift)]
    boxes = torch.stack(pairs, dim=2).reshape(4, 4000, 4)
    labels = torch.randint(264, (4, 2000), generator=generator).repeat_interleave(2, dim=1)
    scores = torch.rand(4, 4000, generator=generator)
    return boxes.to(CUDA), scores.to(CUDA), labels.to(CUDA), torch.ones(4, 4000, dtype=torch.bool, device=CUDA)


@pytest.mark.parametrize("most", [300, 5000])
@pytest.mark.parametrize("iou_threshold", [0.2, 0.5])
@pytest.mark.parametrize(
    "candidates",
    [
        lambda: random_candidates(CUDA, 32),
        lambda: random_candidates(CUDA, 4, classes=1, objects=2),
        lambda: random_candidates(CUDA, 1, candidates=30_000, objects=40),
        near_the_threshold,
    ],
    ids=["a batch", "one class", "class by class", "near the threshold"],
)
def test_suppression_is_torchvisions(candidates: Any, iou_threshold: float, most: int) -> None:
    given = candidates()
    found = batched_nms(*given, iou_threshold, most)
    assert all(map(torch.equal, found, reference(*given, iou_threshold, most)))


def test_it_waits_for_nothing() -> None:
    candidates = random_candidates(CUDA, 8)
    wanted = batched_nms(*candidates)  # compiled before it is watched
    with nothing_waits():
        found = batched_nms(*candidates)
    assert all(map(torch.equal, found, wanted))
    results: list[Any] = []
    captured(lambda: results.append(batched_nms(*candidates)))()
    assert all(map(torch.equal, results[-1], wanted))


class Shapes(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Twenty-two images of noise with a box in each."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "images": torch.randint(256, (3, 64, 64), dtype=torch.uint8, generator=generator),
            "boxes": torch.tensor([[8.0, 8.0, 40.0, 36.0]]),
            "labels": torch.tensor([index % 3]),
            "image_id": torch.tensor(index),
            "original_size": torch.tensor([96, 128]),
            "bad_image_id": torch.tensor(-1),
        }


class Detector(RetinaNetTraining):
    """Keeps its rows, unscored."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = RetinaNetConfig(
            num_classes=3, backbone="small", image_size=(64, 64), fpn_channels=32, head_depth=1, head_norm="group",
            score_threshold=0.005,
        )  # fmt: skip
        super().__init__(TrainingConfig(config))
        self.evaluations: list[Any] = []

    def on_validation_epoch_end(self) -> None:
        rows = np.concatenate(self.validation_rows())
        if not self.trainer.sanity_checking:
            self.evaluations.append(rows)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def fitted(*callbacks: pl.Callback) -> Detector:
    module = Detector()
    torch.manual_seed(1)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=5, callbacks=list(callbacks), logger=False, precision="bf16-mixed",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    training = DataLoader(Shapes(), batch_size=4, shuffle=True, drop_last=True)
    trainer.fit(module, training, DataLoader(Shapes(), batch_size=5))
    return module


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation.*")
def test_a_retinanets_evaluations_are_the_eager_ones_and_training_too() -> None:
    graphs, cache = GraphedEvaluation(), EvaluationCache()
    plain, ours = fitted(FusedBatchedNMS()), fitted(FusedBatchedNMS(), graphs, cache)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert len(plain.evaluations) == len(ours.evaluations) == 5
    assert all(map(np.array_equal, plain.evaluations, ours.evaluations))
    assert not np.array_equal(plain.evaluations[0], plain.evaluations[4]), "weights have changed"
    assert not graphs.notes
    rows = graphs.table().rows
    assert [row[2:] for row in rows] == [(5 * 4 - 3, 2, 1), (3, 1, 1)]
    assert cache.table().rows == [(1, "kept"), (1, "compared with those kept"), (3, "handed out from the device")]


def test_a_suppression_that_waits_is_told_and_the_fit_goes_on() -> None:
    graphs = GraphedEvaluation()
    module = fitted(graphs)
    assert len(module.evaluations) == 5
    (note,) = graphs.notes
    assert "evaluate_batch runs eagerly, since it can't be captured" in note


def test_beside_a_captured_training_step() -> None:
    module = fitted(CUDAGraphStep(), FusedBatchedNMS(), graphs := GraphedEvaluation(), EvaluationCache())
    assert not graphs.notes
    assert len(module.evaluations) == 5


def test_replays_read_the_weights_of_now() -> None:
    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    from fasttrain.callbacks.graph_evaluation.captured_call import CapturedCall
    from fasttrain.callbacks.graph_evaluation.places import places

    device = torch.device("cuda", torch.cuda.current_device())
    module, notes = Plain().to(device).eval(), list[str]()
    (place,) = places(module)
    call = CapturedCall(place, device, 4, True, False, notes.append, [])
    call.install()
    x = torch.randn(5, 8, device=device)
    with torch.inference_mode():
        for change in (1.0, 2.0, 3.0):
            kept = [module.net(x) for _ in range(4)]
            assert all(torch.equal(each, call.plain(x)) for each in kept)
            with torch.autocast("cuda", torch.bfloat16):
                assert all(torch.equal(module.net(x), call.plain(x)) for _ in range(4))
            for tensor in (*module.net.parameters(), module.net[1].running_mean):
                tensor.data.mul_(change + 0.5)
        for parameter in module.net.parameters():
            parameter.data = parameter.data * 2
        assert all(torch.equal(module.net(x), call.plain(x)) for _ in range(4))
    assert call.pool.captures == 3
    assert call.pool.hits > 10
    assert not notes
    call.release()
