"""The examination of a module: its step runs as in a fit, is left alone, and each wait in it is told with its line."""

import inspect
from typing import Any

import examined_modules
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from examined_modules import Clean, Frozen
from marked_lines import line_of
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models.detection import _utils, retinanet, retinanet_resnet50_fpn

from fasttrain.callbacks.cuda_graph_step.host_state import (
    changed,
    plain_attributes,
)
from fasttrain.callbacks.cuda_graph_step.sync_finder.examination import examine
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Place
from fasttrain.errors import OptimizationError
from fasttrain.randomness import random_state


def a_batch() -> list[Tensor]:
    return [torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_a_clean_module_has_no_finding_and_is_left_alone(precision: str) -> None:
    module, batch = Clean(), a_batch()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    attributes, before = plain_attributes(module), random_state()
    assert examine(module, batch, "cpu", precision) == []
    assert changed(attributes, plain_attributes(module)) == []
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(batch[0], a_batch()[0])
    assert str(random_state()) == str(before)
    assert "log" not in vars(module)


def test_values_that_a_capture_would_freeze() -> None:
    module = Frozen()
    module.accuracy = MulticlassAccuracy(3, validate_args=False)
    everything = examine(module, a_batch(), "cpu")
    of_metric = [each for each in everything if each.user_where is not None]
    assert {each.user_where for each in of_metric} == {
        Place(examined_modules.__file__, line_of(Frozen.training_step, "metric"))
    }
    assert {each.kind for each in of_metric} == {"counting into bins", "tensor replaced"}
    assert "self.accuracy.tp is bound to a new tensor" in " ".join(each.what for each in of_metric)
    found = {(each.kind, each.where.line): each for each in everything if each.where and each not in of_metric}
    step, keep = Frozen.training_step, Frozen.keep
    assert set(found) == {
        ("host value changed", line_of(step, "count")),
        ("container changed", line_of(keep, "losses")),
        ("tensor replaced", line_of(keep, "average")),
        ("tensor replaced", line_of(keep, "last")),
        ("host random numbers", line_of(step, "python")),
        ("host random numbers", line_of(step, "numpy")),
        ("host random numbers", line_of(step, "torch")),
        ("host number logged", line_of(step, "logged")),
    }
    assert not any(each.breaks for each in found.values())
    assert {kind for (kind, _), each in found.items() if each.freezes} == {
        "host value changed", "container changed", "host random numbers",
    }  # fmt: skip
    assert found["host value changed", line_of(step, "count")].what == (
        "self.count goes from 1 to 2 on the host; a replay leaves it as it is"
    )
    assert found["container changed", line_of(keep, "losses")].what.startswith(
        "self.losses goes from a list of 1 to a list of 2"
    )
    assert module.count == 0
    assert module.losses == []


class HostAttribute(Clean):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.tensor([1.0, 2.0, 3.0])
        self.register_buffer("others", torch.tensor([1.0, 2.0, 3.0]))
        self.lazy = torch.tensor([1.0, 2.0, 3.0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0]) * self.others.to(self.device)
        self.lazy = self.lazy.to(self.device)
        return F.cross_entropy(logits * self.lazy, batch[1], self.weights.to(logits.device))  # here


def test_an_attribute_that_does_not_move_with_the_module() -> None:
    (found,) = examine(HostAttribute(), a_batch(), "cpu")
    assert (found.kind, found.where) == ("copy from the host", Place(__file__, line_of(HostAttribute.training_step)))


BATCH = a_batch()


class Asks(Clean):
    """Looks at what it is run with."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.training
        assert not self.net[1].training
        assert batch[0].dtype == torch.float32
        assert torch.equal(batch[0], BATCH[0] + 1)
        assert batch_idx == 1
        assert (self.global_step, self.current_epoch, self.trainer.is_global_zero) == (0, 0, True)
        batch[0].zero_()
        output = self.net(batch[0])
        assert output.dtype == torch.bfloat16
        return F.cross_entropy(output, batch[1])


def test_the_step_runs_as_in_a_fit() -> None:
    module = Asks()
    module.net[1].eval()
    kinds = {each.kind for each in examine(module, a_batch(), "cpu", "bf16-mixed")}
    assert kinds == {"comparison read on the host"}, "but for what this test asks"


def test_a_trainer_that_is_there_is_used_and_not_copied() -> None:
    class Uncopyable(pl.Callback):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    module = Clean()
    module.trainer = pl.Trainer(accelerator="cpu", callbacks=[Uncopyable()], logger=False, enable_checkpointing=False)
    assert examine(module, a_batch(), "cpu") == []


class ByHand(Clean):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Skips(Clean):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Fails(Clean):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.optimizers().param_groups  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            ByHand(),
            "ByHand optimizes by itself (automatic_optimization=False), so that its step is not one forward and "
            "backward to be captured; the parts of it that are can be, each by itself.",
        ),
        (
            Skips(),
            "Skips.training_step returned None for the first batch: there is nothing to go backward from, and a "
            "captured step can't decide that anew.",
        ),
        (
            Fails(),
            "Fails.training_step could not be run outside of a fit (AttributeError: 'list' object has no attribute "
            "'param_groups').",
        ),
    ],
)
def test_a_step_that_cant_be_examined(module: pl.LightningModule, sentence: str) -> None:
    with pytest.raises(OptimizationError) as caught:
        examine(module, a_batch(), "cpu")
    assert str(caught.value) == sentence


class TorchvisionRetinaNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        losses = self.model(images, targets)  # here
        return sum(losses.values())


def test_torchvisions_retinanet_is_named_with_the_users_line() -> None:
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 10.0, 60.0, 60.0]])
    batch = ([torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": torch.tensor([1, 2])}])
    found = examine(TorchvisionRetinaNet(), batch, "cpu")
    user = Place(__file__, line_of(TorchvisionRetinaNet.training_step))
    assert {each.user_where for each in found} == {user}

    def expected(owner: Any, code: str) -> int:
        lines, first = inspect.getsourcelines(owner)
        return next(first + index for index, line in enumerate(lines) if code in line)

    where = {(each.kind, each.where) for each in found}
    for kind, module, owner, code in [
        (
            "boolean indexing",
            retinanet,
            retinanet.RetinaNetClassificationHead,
            "gt_classes_target[valid_idxs_per_image],",
        ),
        ("nonzero", retinanet, retinanet.RetinaNetRegressionHead, "torch.where(matched_idxs_per_image >= 0)[0]"),
        ("branch on a tensor", retinanet, retinanet.RetinaNet, "if degenerate_boxes.any()"),
        ("copy from the host", _utils, _utils.BoxCoder, "torch.as_tensor(self.weights, dtype=dtype, device=device)"),
    ]:
        assert (kind, Place(module.__file__, expected(owner, code))) in where
    breaking = [each for each in found if each.breaks]
    assert found[: len(breaking)] == breaking, "those that break a capture come first"
    assert "torchvision/models/detection/retinanet.py:" in " ".join(str(each.where) for each in found)
