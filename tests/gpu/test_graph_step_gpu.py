"""The graph step on a GPU: replays equal eager steps bit for bit, in every combination that users train with."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Kept, Small, adamw, assert_same_state, batches, fit, same_start, sgd
from torch import Tensor, nn

from fasttrain.callbacks import CapturedFunction, CUDAGraphStep
from fasttrain.recipes.retinanet.model import RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining, TrainingConfig

pytestmark = pytest.mark.gpu

NEVER = 10**9
GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "max_epochs": 1}
STEPS = 200


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels in a fixed order, so that equal means equal."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.7), "interval": "step"}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return {
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1),
        "interval": "step",
    }


class Overflowing(Small):
    """Scales its loss by a number from the batch, which may be infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, scale = batch
        return super().training_step((x, y), batch_idx) * scale


def overflowing_batches(precision: str) -> Batches:
    made = []
    for index, (x, y) in enumerate(batches(STEPS, rows=(16,)).made):
        bad = precision == "16-mixed" and index % 37 in (5, 6)
        made.append((x, y, torch.tensor(float("inf") if bad else 1.0)))
    return Batches(made)


@pytest.mark.parametrize("schedule", [step_lr, one_cycle])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_200_replayed_steps_equal_eager_ones(
    make: Any, precision: Any, clip: float | None, accumulate: int, schedule: Callable[[Any], Any]
) -> None:
    ours, eager = same_start(lambda: Overflowing(make, schedule))
    data = overflowing_batches(precision)
    options: dict[str, Any] = {
        **GPU, "precision": precision, "gradient_clip_val": clip, "accumulate_grad_batches": accumulate,
    }  # fmt: skip
    graph = CUDAGraphStep(on_failure="error")
    trainer = fit(ours, data, graph, **options)
    expected = fit(eager, data, CUDAGraphStep(warm_up=NEVER), **options)
    assert graph.pool.hits > 180, graph.notes
    assert not [note for note in graph.notes if "outside" in note], graph.notes
    assert_same_state(trainer, expected)
    if precision == "16-mixed":
        assert trainer.precision_plugin.state_dict() == expected.precision_plugin.state_dict()
        assert trainer.precision_plugin.state_dict()["scale"] < 2.0**16  # steps were skipped


@pytest.mark.parametrize("make", [sgd, adamw])
def test_bf16_true(make: Any) -> None:
    ours, eager = same_start(lambda: Small(make, step_lr))
    data, graph = batches(60, rows=(16,)), CUDAGraphStep(on_failure="error")
    trainer = fit(ours, data, graph, **GPU, precision="bf16-true")
    assert_same_state(trainer, fit(eager, data, CUDAGraphStep(warm_up=NEVER), **GPU, precision="bf16-true"))
    assert graph.pool.hits == 56


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_it_trains_as_plain_lightning_does(make: Any, precision: Any) -> None:
    ours, plain = same_start(lambda: Overflowing(make, step_lr))
    data = overflowing_batches(precision)
    kept, expected = Kept(), Kept()
    fit(ours, data, CUDAGraphStep(on_failure="error"), callbacks=[kept], **GPU, precision=precision)
    fit(plain, data, callbacks=[expected], **GPU, precision=precision)
    finite = [(a, b) for a, b in zip(kept.losses, expected.losses, strict=True) if b < 1e30]
    assert len(finite) > 150
    worst = max(abs(a - b) / abs(b) for a, b in finite)
    assert worst < (1e-3 if precision == "32-true" else 3e-2), worst


def test_five_shapes_in_random_order() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(24, 32, 40, 48, 64)[int(i)] for i in torch.randint(5, (500,), generator=generator)]
    data = Batches([batches(1, (n,), seed=i).made[0] for i, n in enumerate(sizes)])
    ours, eager = same_start(lambda: Small(adamw))

    class Memory(pl.Callback):
        def __init__(self) -> None:
            self.used: list[int] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.used.append(torch.cuda.memory_reserved())

    memory, graph = Memory(), CUDAGraphStep(on_failure="error")
    trainer = fit(ours, data, graph, callbacks=[memory], **GPU)
    assert_same_state(trainer, fit(eager, data, CUDAGraphStep(warm_up=NEVER), **GPU))
    assert graph.pool.captures == 5
    assert len(set(memory.used[60:])) == 1, sorted(set(memory.used[60:]))


def test_dropout_differs_from_replay_to_replay_and_comes_again_with_the_seed() -> None:
    class Masks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "kept": nn.functional.dropout(torch.ones(4096, device=self.device), 0.25)}

    class Keep(pl.Callback):
        def __init__(self) -> None:
            self.masks: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.masks.append(outputs["kept"] != 0)

    runs = []
    for make_graph in (CUDAGraphStep, CUDAGraphStep, partial(CUDAGraphStep, warm_up=NEVER)):
        keep = Keep()
        torch.manual_seed(1)
        fit(Masks(dropout=0.3), batches(100, rows=(16,)), make_graph(), callbacks=[keep], **GPU)
        runs.append(torch.stack(keep.masks))
    first, again, eager = runs
    assert torch.equal(first, again)
    assert torch.equal(first, eager)  # the generator is advanced as the eager kernels advance it
    share = first.float().mean().item()
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / first.numel()) ** 0.5
    agreement = (first[:-1] == first[1:]).float().mean().item()
    assert abs(agreement - (0.75**2 + 0.25**2)) < 0.005


class Syncing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 1e9 else loss


def test_a_capture_that_fails_leaves_a_usable_run() -> None:
    ours, plain = same_start(lambda: Syncing(dropout=0.2))
    graph = CUDAGraphStep()
    with pytest.warns(UserWarning, match=r"steps run eagerly, since .*test_graph_step_gpu.py:\d+: .*loss.item\(\)"):
        trainer = fit(ours, batches(40), graph, **GPU)
    assert graph.pool.hits == 0
    # The optimizer's step ran prepared at first (fused, learning rate on the device), so bits may differ.
    assert_same_state(trainer, fit(plain, batches(40), **GPU), rtol=1e-4, atol=1e-5)


def test_stop_resume_and_go_on_in_plain_lightning(tmp_path: Path) -> None:
    data = batches(30, rows=(16,))
    options = {**GPU, "max_epochs": 4}
    make = partial(Small, adamw, step_lr)
    whole, _ = same_start(make)
    expected = fit(whole, data, CUDAGraphStep(), **options)
    start, resumed = same_start(make)
    first = fit(start, data, CUDAGraphStep(), **{**options, "max_epochs": 2})
    first.save_checkpoint(tmp_path / "two.ckpt")
    second = fit(resumed, data, CUDAGraphStep(), **options, ckpt_path=tmp_path / "two.ckpt")
    assert_same_state(second, expected)
    plain, _ = same_start(make)
    third = fit(plain, data, **options, ckpt_path=tmp_path / "two.ckpt")
    assert third.global_step == expected.global_step
    assert_same_state(third, expected, rtol=1e-4, atol=1e-5)


def test_memory_comes_back_after_the_fit() -> None:
    module = Small(adamw)
    fit(module, batches(20), CUDAGraphStep(), **GPU)
    module.cpu()
    torch.cuda.synchronize()
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 20 * 2**20, torch.cuda.memory_allocated()


def test_averaged_weights_equal_plain_ones() -> None:
    trainers = []
    for module, graph in zip(same_start(Small), (CUDAGraphStep(), CUDAGraphStep(warm_up=NEVER)), strict=True):
        average = pl.callbacks.EMAWeightAveraging(decay=0.9, update_starting_at_step=4)
        trainers.append(fit(module, batches(40), graph, callbacks=[average], **GPU))
    assert_same_state(*trainers)


def test_live_loader_workers_do_not_disturb_a_capture() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randint(4, (512,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2, pin_memory=True)
    graph = CUDAGraphStep(on_failure="error")
    fit(Small(), loader, graph, **GPU)
    assert graph.pool.hits > 20


def test_the_retinanet_recipe_is_captured_whole() -> None:
    torch.use_deterministic_algorithms(False)  # the loss gathers with atomics
    model = RetinaNetConfig(num_classes=5, backbone="resnet18", image_size=(128, 160), fpn_channels=64)
    generator = torch.Generator().manual_seed(0)

    def batch() -> dict[str, Tensor]:
        corner = torch.rand(4, 8, 2, generator=generator) * 60
        boxes = torch.cat([corner, corner + 20 + 40 * torch.rand(4, 8, 2, generator=generator)], -1)
        count = torch.randint(0, 9, (4,), generator=generator)
        labels = torch.randint(5, (4, 8), generator=generator)
        there = torch.arange(8)[None] < count[:, None]
        return {
            "images": torch.randint(0, 255, (4, 3, 128, 160), generator=generator, dtype=torch.uint8),
            "boxes": boxes * there[..., None],
            "labels": torch.where(there, labels, -1),
            "box_count": count,
            "image_id": torch.arange(4),
            "bad_image_id": torch.full((4,), -1),
            "original_size": torch.tensor([[128, 160]] * 4),
        }

    data = Batches([batch() for _ in range(30)])
    graph = CUDAGraphStep(on_failure="error")
    module = RetinaNetTraining(TrainingConfig(model=model))
    kept, expected = Kept(), Kept()
    fit(module, data, graph, callbacks=[kept], **GPU, precision="bf16-mixed")
    assert graph.pool.hits == 26, graph.notes  # three eager steps, one captured
    assert not [note for note in graph.notes if "outside" in note]
    fit(RetinaNetTraining(TrainingConfig(model=model)), data, callbacks=[expected], **GPU, precision="bf16-mixed")
    assert kept.steps == expected.steps


def test_a_captured_function_in_manual_optimization() -> None:
    class Manual(Small):
        def __init__(self, captured: bool) -> None:
            super().__init__(adamw)
            self.automatic_optimization = False
            self.captured = captured

        def on_train_start(self) -> None:
            warm_up = 3 if self.captured else NEVER
            self.function = CapturedFunction(self.one_step, optimizers=self.optimizers(), warm_up=warm_up)

        def on_train_end(self) -> None:
            self.function.release()

        def one_step(self, x: Tensor, y: Tensor) -> Tensor:
            optimizer = self.optimizers()
            loss = nn.functional.cross_entropy(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss.detach()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.function(*batch))

    torch.manual_seed(1)
    ours = Manual(True)
    torch.manual_seed(1)
    eager = Manual(False)
    trainers = [fit(module, batches(30), **GPU) for module in (ours, eager)]
    assert ours.function.pool.hits == 26
    assert not ours.function.failure
    assert [t.global_step for t in trainers] == [30, 30]
    assert_same_state(*trainers)
