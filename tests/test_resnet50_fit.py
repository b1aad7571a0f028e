"""The ResNet recipe through the whole flow, on the CPU: cadence, resume, exact scores, averaged weights, photos."""

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console

from fasttrain.callbacks import CATALOGUE, labelled_images
from fasttrain.config import TargetConfig
from fasttrain.errors import ConfigError
from fasttrain.fit import Outcome, fit
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recipes.resnet50.data import ClassificationData, DataConfig
from fasttrain.recipes.resnet50.drawing import GeneratedConfig
from fasttrain.recipes.resnet50.model import ResNetConfig
from fasttrain.recipes.resnet50.module import ResNetTraining, TrainingConfig
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig
from fasttrain.recipes.resnet50.statistics import share_statistics
from fasttrain.recorder import RunRecorder
from fasttrain.validate import validate

GENERATED = GeneratedConfig(train_images=48, val_images=21, image_size=40)
TINY = [
    "module.model.width=0.25",
    "module.optimizer.name=lars",
    "module.ema_decay=0.9",
    "module.evaluation_offset=1",
    "data.generated.train_images=48",
    "data.generated.val_images=21",
    "data.generated.image_size=40",
    "data.image_size=32",
    "data.batch_size=8",
    "data.mixup=0.2",
    "trainer.max_epochs=5",
    "trainer.check_val_every_n_epoch=3",
    "trainer.log_every_n_steps=1",
    "target.stop=false",
    "optimizations=none",
    "loggers=[]",
]


def run(run_dir: Path, *overrides: str, resume: Path | None = None) -> Outcome:
    recipe = resume / "config.yaml" if resume else find_recipe("resnet50")
    items = list(overrides) if resume else [*TINY, *overrides]
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    return fit(resolve(recipe, items), CATALOGUE, run_dir=None if resume else run_dir, resume=resume, console=console)


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    return [(int(row[0]), float(row[4])) for row in lines if row[3] == name]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("finished") / "run")


def test_run_evaluates_in_its_cadence_and_at_its_end(finished: Outcome) -> None:
    result = json.loads((finished.folder / "result.json").read_text())
    assert (result["status"], result["preset"], result["epochs"], result["steps"]) == ("finished", "small", 5, 30)
    assert [(step + 1) / 6 for step, _ in rows(finished.folder, "top1")] == [2, 5], "offset 1 of every 3, and the last"
    assert len(rows(finished.folder, "loss")) == 30
    assert result["quality"]["value"] == rows(finished.folder, "top1")[-1][1]


def test_stopped_in_mid_epoch_and_resumed(finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an epoch that is evaluated after, with averaged weights and mixing: the same weights, bit for bit."""
    count = RunRecorder.on_train_batch_end

    def interrupt_after_nine(self: RunRecorder, trainer: Any, *rest: Any) -> None:
        count(self, trainer, *rest)
        if trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunRecorder, "on_train_batch_end", interrupt_after_nine)
    parts = run(tmp_path / "parts")
    assert (parts.result["status"], parts.result["steps"]) == ("interrupted", 9)
    monkeypatch.undo()
    rest = run(tmp_path, resume=tmp_path / "parts")
    whole, again = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (finished.folder, rest.folder)
    )
    for part in ("state_dict", "current_model_state"):
        for name, value in whole[part].items():
            assert torch.equal(value, again[part][name]), (part, name)
    assert rows(finished.folder, "loss") == rows(rest.folder, "loss")
    assert rows(finished.folder, "top1") == rows(rest.folder, "top1")


def test_averaged_weights_are_scored_and_kept(finished: Outcome) -> None:
    checkpoint = torch.load(finished.folder / "checkpoints" / "last.ckpt", weights_only=True)
    kept, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert not torch.equal(kept["model.fc.weight"], current["model.fc.weight"])
    scores = validate(finished.folder / "checkpoints" / "last.ckpt", [], CATALOGUE, quiet=True)
    assert scores["top1"] == rows(finished.folder, "top1")[-1][1], "that of the averaged weights"


def module(**values: Any) -> ResNetTraining:
    torch.manual_seed(0)
    model = ResNetConfig(arch="resnet10", width=0.25, num_classes=20)
    optimizer = OptimizerConfig(name="sgd", lr=0.05, lr_for_batch=None, batch_size=8)
    return ResNetTraining(TrainingConfig(model, optimizer, evaluation_offset=0, **values))


def data(cache: Path) -> ClassificationData:
    return ClassificationData(DataConfig(image_size=32, batch_size=6, cache_folder=str(cache), generated=GENERATED))


class _Tells(pl.Callback):
    """Writes down what each rank has and logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        told = {
            "top1": float(trainer.callback_metrics["top1"]),
            "top5": float(trainer.callback_metrics["top5"]),
            "state": {name: value.tolist() for name, value in pl_module.state_dict().items()},
        }
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
def test_two_processes_score_every_image_once_with_the_same_statistics(tmp_path: Path) -> None:
    """21 images in batches of 6 on 2 ranks; afterwards one process counts them with the weights that were kept."""
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=120))
    pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, logger=False,
        callbacks=[_Tells(tmp_path)], enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        enable_checkpointing=False,
    ).fit(module(), datamodule=data(tmp_path))  # fmt: skip
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert one == two, "scores, weights and running statistics"
    scored = module()
    scored.load_state_dict({name: torch.tensor(value) for name, value in one["state"].items()})
    scored.eval()
    alone = data(tmp_path)
    alone.setup("fit")
    right = images = 0
    for batch in alone.val_dataloader():
        is_image = batch["labels"] >= 0
        right += int((scored(batch["images"]).argmax(1) == batch["labels"])[is_image].sum())
        images += int(is_image.sum())
    assert images == 21
    assert one["top1"] == right / 21
    assert one["state"]["model.bn1.num_batches_tracked"] == 2 * 4, "48 images, 2 ranks, batches of 6"


def test_an_unreadable_image_counts_as_missed_and_padding_not_at_all() -> None:
    ours = module()
    ours.eval()
    ours.model.fc.bias.data[4] = 1e6  # whatever is seen is class 4
    batch = {
        "images": torch.zeros(6, 3, 32, 32, dtype=torch.uint8),
        "labels": torch.tensor([4, 4, 3, 4, -1, -1]),
        "bad_image_id": torch.tensor([-1, -1, -1, 17, -1, -1]),
    }
    with torch.no_grad():
        ours.validation_step(batch, 0)
    top1, top5, images = ours._counts[0].tolist()
    assert (top1, images) == (2, 4)
    assert top5 >= top1


def test_loss_is_smoothed_and_mixed_as_written() -> None:
    ours = module(label_smoothing=0.1)
    ours.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (4, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels, own = torch.tensor([0, 3, 7, 7]), torch.tensor([1.0, 0.25, 0.5, 0.75])
    ours.eval()
    target = 0.9 * F.one_hot(labels, 20) + 0.1 / 20
    plain = -(target * ours(images).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(ours.training_step({"images": images, "labels": labels}, 0), plain)
    share = own.view(-1, 1, 1, 1)
    normalised = ours.normalise(images)
    logits = ours.model(share * normalised + (1 - share) * normalised.flip(0))
    mixed_target = own[:, None] * target + (1 - own[:, None]) * target.flip(0)
    mixed = -(mixed_target * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(ours.training_step({"images": images, "labels": labels, "mix": own}, 0), mixed)


def test_groups_of_shared_statistics_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"^module\.model\.sync_bn is 3, but 4 processes can't be divided into"):
        share_statistics(torch.nn.Linear(1, 1), 3, 4, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"^module\.model\.sync_bn=2 needs GPUs: torch shares no batch statistics"):
        share_statistics(torch.nn.Linear(1, 1), 2, 4, torch.device("cpu"))
    share_statistics(torch.nn.Linear(1, 1), 2, 1, torch.device("cpu"))


def test_optimizer_can_be_asked_for_without_a_trainer() -> None:
    made = module().configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.SGD)


def test_real_photographs_are_learned_from(grocery: Path, tmp_path: Path) -> None:
    """All 81 kinds of groceries are found; a few steps on three of them lower the loss."""
    train, test = labelled_images(grocery / "train"), labelled_images(grocery / "test")
    assert (len(train), len(test), train.num_classes) == (2640, 2485, 81)
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("00", "27", "50"):
            (tmp_path / split / name).symlink_to(grocery / split / name)
    outcome = run(
        tmp_path / "run", f"data.train={tmp_path / 'train'}", f"data.val={tmp_path / 'test'}", "data.image_size=64",
        "data.batch_size=16", "data.mixup=0", "module.ema_decay=null", "module.optimizer.name=sgd",
        "module.optimizer.lr=0.03", "trainer.max_epochs=5", "trainer.check_val_every_n_epoch=5",
    )  # fmt: skip
    losses = [value for _, value in rows(outcome.folder, "loss")]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.15
    assert rows(outcome.folder, "top1")[-1][1] > 0.5
    assert "num_classes: 3" in (outcome.folder / "config.yaml").read_text()


def test_target_is_mlperfs_but_on_the_generated_set() -> None:
    full = resolve(find_recipe("resnet50"), ["preset=full"]).run.target
    assert full == TargetConfig(metric="top1", value=0.759)
