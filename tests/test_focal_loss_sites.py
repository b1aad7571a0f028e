"""Where focal_loss is put: torchvision's RetinaNet, modules that say what they are, and nowhere else."""

import copy
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.detection.retinanet import RetinaNetClassificationHead

from fasttrain.callbacks.focal_loss import FocalLoss, FocalLossConfig, FocalLossOptimization, FusedFocalLoss
from fasttrain.callbacks.focal_loss.reference import reference
from fasttrain.callbacks.focal_loss.sites import ROLE, FocalLossSurgery, loss_sites
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, Refuses

CPU = Hardware("cpu", "cpu", "a CPU", 2)


class PlainFocalLoss(nn.Module):
    """The seam: a loss that says what it is."""

    fasttrain_role = ROLE

    def __init__(self, alpha: float = 0.5, gamma: float = 1.5) -> None:
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, levels: Sequence[Tensor], targets: Tensor) -> Tensor:
        return reference(levels, targets, self.alpha, self.gamma)


class Detector(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = RetinaNetClassificationHead(3, 2, 5)
        self.body = nn.Linear(4, 6)
        self.loss = PlainFocalLoss()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        targets = torch.arange(len(batch[0])).remainder(8).sub(2).unsqueeze(0)
        loss = self.loss([self.body(batch[0]).unsqueeze(0)], targets) + torchvision_loss(self.head)
        self.losses.append(float(loss.detach()))
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def torchvision_loss(head: RetinaNetClassificationHead) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    outputs = head([torch.randn(2, 3, 4, 4, generator=generator)])
    matched = [torch.arange(32) % 5 - 2, torch.full((32,), -1)]
    targets = [{"labels": torch.tensor([4, 0, 2])}, {"labels": torch.zeros(0, dtype=torch.long)}]
    return head.compute_loss(targets, {"cls_logits": outputs}, matched)  # type: ignore[no-any-return]


def train(callbacks: list[pl.Callback]) -> Detector:
    torch.manual_seed(0)
    module = Detector()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    return module


def test_the_callback_trains_the_same_and_can_be_undone() -> None:
    callback = FusedFocalLoss()
    plain, ours = train([]), train([callback])
    assert isinstance(ours.loss, FocalLoss)
    assert (ours.loss.alpha, ours.loss.gamma) == (0.5, 1.5)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.losses[-1] != ours.losses[0]
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert callback.changes == [Change("head.compute_loss", "FocalLoss"), Change("loss", "FocalLoss")]
    callback.setup(None, ours, "validate")  # type: ignore[arg-type]
    assert len(callback.changes) == 2, "a second stage finds them replaced"
    callback.undo()
    assert isinstance(ours.loss, PlainFocalLoss)
    assert "compute_loss" not in vars(ours.head)


def test_torchvisions_head_gives_the_same_loss() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": RetinaNetClassificationHead(3, 2, 5)})
    wanted = torchvision_loss(model["head"])
    assert loss_sites(model) == ["head.compute_loss"]
    surgery = FocalLossSurgery(model)
    surgery.apply(FocalLoss)
    assert loss_sites(model) == []
    torch.testing.assert_close(torchvision_loss(model["head"]), wanted)
    torch.testing.assert_close(torchvision_loss(copy.deepcopy(model)["head"]), wanted)
    surgery.undo()
    assert loss_sites(model) == ["head.compute_loss"]


def test_a_head_with_a_loss_of_its_own_is_left_alone() -> None:
    class Own(RetinaNetClassificationHead):
        def compute_loss(self, *_: Any) -> Tensor:
            return torch.zeros(())

    assert loss_sites(nn.ModuleDict({"head": Own(3, 2, 5)})) == []


def test_the_plans_door() -> None:
    optimization = FocalLossOptimization(FocalLossConfig(in_place=True))
    module = Detector()
    verdict = optimization.check(Context(module, pl.LightningDataModule(), CPU))
    assert verdict == Applies("head.compute_loss, loss; in plain PyTorch")
    assert isinstance(module.loss, PlainFocalLoss), "a check changes nothing"
    verdict = optimization.check(Context(module, pl.LightningDataModule(), Hardware("cuda", "cuda:0", "a GPU", 2)))
    assert verdict == Applies("head.compute_loss, loss; Triton kernel")
    (callback,) = optimization.attach(Context(module, pl.LightningDataModule(), CPU)).callbacks
    assert optimization.applied() == []
    callback.setup(None, module, "fit")  # type: ignore[arg-type]
    assert [change.path for change in optimization.applied()] == ["head.compute_loss", "loss"]
    assert module.loss.in_place is True  # type: ignore[comparison-overlap]


def test_a_model_without_focal_loss_is_refused() -> None:
    reason = (
        "LightningModule has no focal loss to replace: neither torchvision's RetinaNetClassificationHead nor a module "
        "whose fasttrain_role is 'sigmoid_focal_loss'"
    )
    module = pl.LightningModule()
    verdict = FocalLossOptimization(FocalLossConfig()).check(Context(module, pl.LightningDataModule(), CPU))
    assert verdict == Refuses(reason)
    with pytest.raises(OptimizationError) as caught:
        FusedFocalLoss().setup(None, module, "fit")  # type: ignore[arg-type]
    assert str(caught.value) == f"focal_loss: {reason}; leave it out."
