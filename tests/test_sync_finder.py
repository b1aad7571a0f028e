"""The sync finder: every line that would break a capture, by file and line, and no other."""

import contextlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models.detection import _utils, retinanet, retinanet_resnet50_fpn

from fasttrain.callbacks.cuda_graph_step.host_state import (
    changed,
    host_random_state,
    plain_attributes,
    random_changed,
    tensor_attributes,
)
from fasttrain.callbacks.cuda_graph_step.sync_finder.cures import KINDS
from fasttrain.callbacks.cuda_graph_step.sync_finder.examination import examine
from fasttrain.callbacks.cuda_graph_step.sync_finder.finder import Finding, find_syncs
from fasttrain.callbacks.cuda_graph_step.sync_finder.line_trace import lines_that_change
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Place, is_machinery, short_path, site_of
from fasttrain.errors import OptimizationError
from fasttrain.randomness import random_state

Step = Callable[[Tensor, Tensor], Any]


def line_of(function: Any, mark: str = "here") -> int:
    """Return the number of the line of a function that is marked by a comment."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return found


def find(step: Step) -> list[Finding]:
    """Examine forward and backward of a step; it gets floats (4, 5) that need a gradient, and a mask of their shape."""
    torch.manual_seed(0)
    x = torch.randn(4, 5, requires_grad=True)

    def whole() -> None:
        result = step(x, x.detach() > 0)
        (result if isinstance(result, Tensor) and result.requires_grad else x).sum().backward()

    return find_syncs(whole, "cpu")


def item(x: Tensor, mask: Tensor) -> Any:
    return x * x.sum().item()  # here


def to_float(x: Tensor, mask: Tensor) -> Any:
    return x * float(x.detach().sum())  # here


def scalar_argument(x: Tensor, mask: Tensor) -> Any:
    return torch.full((2,), x.detach().sum())  # here


def list_of_tensors(x: Tensor, mask: Tensor) -> Any:
    return torch.tensor([x[0, 0].detach(), x[0, 1].detach()])  # here


def one_hot_without_classes(x: Tensor, mask: Tensor) -> Any:
    return F.one_hot(mask.long())  # here


def branch(x: Tensor, mask: Tensor) -> Any:
    if x.sum() > 0:  # here
        return x * 2
    return x


def python_max(x: Tensor, mask: Tensor) -> Any:
    return x / max(1, mask.sum())  # here


def assertion(x: Tensor, mask: Tensor) -> Any:
    assert x.isfinite().all()  # here
    return x


def slice_end(x: Tensor, mask: Tensor) -> Any:
    n = mask[0].sum()
    return x[:, :n]  # here


def number_as_index(x: Tensor, mask: Tensor) -> Any:
    first = x[:, 0].argmax()
    return x[first]  # here


def length_of_range(x: Tensor, mask: Tensor) -> Any:
    return [x for _ in range(mask.sum())]  # here


def formatted(x: Tensor, mask: Tensor) -> Any:
    return f"{x.sum():.3f}"  # here


def printed(x: Tensor, mask: Tensor) -> Any:
    return str(x)  # here


def to_cpu(x: Tensor, mask: Tensor) -> Any:
    return x.detach().cpu() + 1  # here


def to_named_cpu(x: Tensor, mask: Tensor) -> Any:
    return x.detach().to("cpu").sum().item()  # here


def to_list(x: Tensor, mask: Tensor) -> Any:
    return x.tolist()  # here


def to_numpy(x: Tensor, mask: Tensor) -> Any:
    return np.asarray(x.detach())  # here


def tensor_of_numbers(x: Tensor, mask: Tensor) -> Any:
    return x * torch.tensor([1.0, 2, 3, 4, 5], device=x.device)  # here


def new_tensor(x: Tensor, mask: Tensor) -> Any:
    return x * x.new_tensor(3.0)  # here


def moved_to_device(x: Tensor, mask: Tensor) -> Any:
    weights = torch.from_numpy(np.ones(5, dtype=np.float32))
    return x * weights.to(x.device)  # here


def moved_to_type(x: Tensor, mask: Tensor) -> Any:
    weights = torch.ones(5) / 5
    return x * weights.type_as(x)  # here


def copied_in(x: Tensor, mask: Tensor) -> Any:
    return torch.empty_like(x).copy_(torch.zeros(4, 5))  # here


def list_as_index(x: Tensor, mask: Tensor) -> Any:
    return x.detach()[[0, 2]]  # here


def masked(x: Tensor, mask: Tensor) -> Any:
    return x[mask]  # here


def mask_and_slice(x: Tensor, mask: Tensor) -> Any:
    return x.detach()[mask[:, 0], 1:]  # here


def masked_select(x: Tensor, mask: Tensor) -> Any:
    return x.detach().masked_select(mask)  # here


def set_by_mask(x: Tensor, mask: Tensor) -> Any:
    y = x.detach().clone()
    y[mask] = y.mean()  # here
    return y


def nonzero(x: Tensor, mask: Tensor) -> Any:
    return mask.nonzero()  # here


def where_of_one(x: Tensor, mask: Tensor) -> Any:
    return torch.where(mask)[0]  # here


def unique(x: Tensor, mask: Tensor) -> Any:
    return torch.unique(mask.long())  # here


def unique_rows(x: Tensor, mask: Tensor) -> Any:
    return torch.unique(mask.long(), dim=0)  # here


def repeated(x: Tensor, mask: Tensor) -> Any:
    return x.detach().repeat_interleave(mask[:, 0].long(), dim=0)  # here


def equal(x: Tensor, mask: Tensor) -> Any:
    return torch.equal(x, x + 1)  # here


def close(x: Tensor, mask: Tensor) -> Any:
    return torch.allclose(x, x + 1)  # here


def bincount(x: Tensor, mask: Tensor) -> Any:
    return torch.bincount(mask.long().flatten())  # here


def histogram(x: Tensor, mask: Tensor) -> Any:
    return torch.histc(x.detach(), 10)  # here


def inverse(x: Tensor, mask: Tensor) -> Any:
    return torch.linalg.inv(x[:, :4].detach())  # here


def eigenvalues(x: Tensor, mask: Tensor) -> Any:
    return torch.linalg.eigh(x.detach().T @ x.detach())[0]  # here


def normal(x: Tensor, mask: Tensor) -> Any:
    return torch.normal(x.detach(), x.detach().exp())  # here


def ctc(x: Tensor, mask: Tensor) -> Any:
    labels, lengths = torch.ones_like(mask[0:1, :2], dtype=torch.int64), mask[0:1, 0].long() * 0
    logits = x[:, None].detach().log_softmax(2)
    return F.ctc_loss(logits, labels, lengths + 4, lengths + 2)  # here


def own_generator(x: Tensor, mask: Tensor) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, generator=generator, device=x.device)  # here


def host_noise(x: Tensor, mask: Tensor) -> Any:
    return x * torch.rand(()).item()  # here


CASES: list[tuple[str, Step]] = [
    *[("value read on the host", step) for step in (item, to_float, scalar_argument, list_of_tensors)],
    ("value read on the host", one_hot_without_classes),
    *[("branch on a tensor", step) for step in (branch, python_max, assertion)],
    *[("tensor as an index", step) for step in (slice_end, number_as_index, length_of_range)],
    *[("tensor as text", step) for step in (formatted, printed)],
    *[("copy to the host", step) for step in (to_cpu, to_named_cpu, to_list, to_numpy)],
    *[("copy from the host", step) for step in (tensor_of_numbers, new_tensor, moved_to_device, moved_to_type)],
    *[("copy from the host", step) for step in (copied_in, list_as_index)],
    *[("boolean indexing", step) for step in (masked, mask_and_slice, masked_select, set_by_mask)],
    *[("nonzero", step) for step in (nonzero, where_of_one)],
    *[("unique", step) for step in (unique, unique_rows)],
    ("repeat_interleave without output_size", repeated),
    *[("comparison read on the host", step) for step in (equal, close)],
    *[("counting into bins", step) for step in (bincount, histogram)],
    *[("linear algebra check", step) for step in (inverse, eigenvalues)],
    ("checked sampling", normal),
    ("lengths read on the host", ctc),
    ("generator of its own", own_generator),
    ("host random numbers", host_noise),
]


@pytest.mark.parametrize(("kind", "step"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_each_kind_is_found_at_its_line(kind: str, step: Step) -> None:
    (found,) = find(step)
    line = line_of(step)
    assert (found.kind, found.where, found.user_where) == (kind, Place(__file__, line), None)
    lines, first = inspect.getsourcelines(step)
    assert found.code == lines[line - first].strip()
    assert found.breaks == KINDS[kind].breaks
    assert found.cure == KINDS[kind].cure
    assert "{" not in found.what


HARMLESS: list[Step] = [
    lambda x, mask: torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1),
    lambda x, mask: x.index_select(0, x[:, 0].argmax().view(1)),
    lambda x, mask: x[torch.arange(2, device=x.device)],
    lambda x, mask: x.detach().clone().masked_fill_(mask, 0),
    lambda x, mask: x.clone().index_put_((mask,), torch.zeros(())),
    lambda x, mask: F.one_hot(mask.long(), 2),
    lambda x, mask: x.quantile(0.5),
    lambda x, mask: torch.nonzero_static(mask, size=3),
    lambda x, mask: x.repeat_interleave(2, dim=0),
    lambda x, mask: x.repeat_interleave(torch.ones_like(mask[:, 0], dtype=torch.int64), dim=0, output_size=4),
    lambda x, mask: torch.histc(x.detach(), 10, min=-1, max=1),
    lambda x, mask: torch.multinomial(x.detach().exp(), 3),
    lambda x, mask: torch.linalg.inv_ex(x[:, :4].detach()),
    lambda x, mask: F.dropout(x) + torch.rand_like(x) + torch.rand(4, 5, device=x.device),
    lambda x, mask: x * torch.tensor([1, 2, 3]).sum().item(),
    lambda x, mask: x * len(x) + x.shape[0] * x.detach().to(x.device).to(torch.float32),
    lambda x, mask: list(x),
    lambda x, mask: (x.detach() == x.detach()).all(),
]


@pytest.mark.parametrize("step", HARMLESS, ids=lambda step: inspect.getsource(step).strip())
def test_what_stays_on_one_side_is_no_finding(step: Step) -> None:
    assert find(step) == []


def test_every_place_is_found_and_counted_in_one_run() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        total = x.sum()
        for row in x.detach():
            total = total + row.max().item()  # read
        picked = x[mask]  # picked
        if picked.mean() > 100:  # branch
            total = total + 1
        return total + picked.sum() * torch.tensor(2.0, device=x.device) * float(x.detach().sum())  # twice

    found = [(each.kind, each.where.line if each.where else None, each.count) for each in find(step)]
    assert found == [
        ("value read on the host", line_of(step, "read"), 4),
        ("boolean indexing", line_of(step, "picked"), 2),  # forward and backward
        ("branch on a tensor", line_of(step, "branch"), 1),
        ("copy from the host", line_of(step, "twice"), 1),
        ("value read on the host", line_of(step, "twice"), 1),
    ]


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.sum().item()  # here


def test_the_backward_is_looked_at_too() -> None:
    def in_function(x: Tensor, mask: Tensor) -> Any:
        return ReadsInBackward.apply(x)  # type: ignore[no-untyped-call]

    def hook(gradient: Tensor) -> Tensor:
        return gradient * gradient.sum().item()  # here

    def in_hook(x: Tensor, mask: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(hook)
        return y

    def part(x: Tensor, mask: Tensor) -> Tensor:
        return (x * x)[mask].square()  # here

    def recomputed(x: Tensor, mask: Tensor) -> Any:
        return checkpoint(part, x, mask, use_reentrant=False)

    def list_index(x: Tensor, mask: Tensor) -> Tensor:
        return x[[0, 1]]  # here

    (found,) = find(in_function)
    assert (found.kind, found.where) == ("value read on the host", Place(__file__, line_of(ReadsInBackward.backward)))
    (found,) = find(in_hook)
    assert (found.kind, found.where) == ("value read on the host", Place(__file__, line_of(hook)))
    (found,) = find(recomputed)
    assert (found.kind, found.where) == ("boolean indexing", Place(__file__, line_of(part)))
    (found,) = find(list_index)
    assert (found.where, found.count) == (Place(__file__, line_of(list_index)), 2)


def test_modes_and_settings_are_put_back_even_after_an_exception() -> None:
    def fails(x: Tensor, mask: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        find(fails)
    assert not torch.is_anomaly_enabled()
    assert torch.overrides._get_current_function_mode() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_what_was_moved_is_judged_where_it_is() -> None:
    def back_and_forth(x: Tensor, mask: Tensor) -> Tensor:
        scale = torch.tensor(3.0)
        moved = scale.to(x.device)  # there
        scale.item()
        copied = moved.detach().cpu()  # back
        copied.item()
        return x * moved.item()  # read

    found = [(each.kind, each.where.line if each.where else None) for each in find(back_and_forth)]
    assert found == [
        ("copy from the host", line_of(back_and_forth, "there")),
        ("copy to the host", line_of(back_and_forth, "back")),
        ("value read on the host", line_of(back_and_forth, "read")),
    ]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, step: Callable[[], Any]) -> list[Finding]:
    """Look for waits as on a GPU, where none is."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    return find_syncs(step, "cuda")


def test_what_only_torchs_warning_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        message = "called a synchronizing CUDA operation (Triggered internally at c10/cuda/CUDAFunctions.cpp:1.)"
        warnings.warn(message, stacklevel=1)  # wait

    def step() -> None:
        wait()
        wait()
        warnings.warn("something else", stacklevel=1)
        with contextlib.suppress(Exception):
            torch._C._accelerator_synchronizeDevice(0)  # explicit

    with warnings.catch_warnings(record=True) as seen:
        found = on_a_gpu(monkeypatch, step)
        warnings.warn("back to normal", stacklevel=1)
    assert [(each.kind, each.where, each.count, each.what) for each in found] == [
        (
            "explicit synchronization", Place(__file__, line_of(step, "explicit")), 1,
            "accelerator_synchronizeDevice() waits for the device",
        ),
        (
            "hidden synchronization", Place(__file__, line_of(wait, "wait")), 2,
            "an operator waits for the device in its own code",
        ),
    ]  # fmt: skip
    assert [str(each.message) for each in seen] == ["back to normal"]
    assert sys.getprofile() is None


# The examination of a module


class Clean(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3, validate_args=False)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss / self.trainer.world_size}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


class Frozen(Clean):
    """Keeps on the host what a replay would not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate, self.phase = 0, 0.5, "start"
        self.losses: list[Tensor] = []
        self.cache: Tensor | None = None
        self.average = torch.zeros(())
        self.register_buffer("last", torch.zeros(()))
        self.in_place = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.cache is None:
            self.cache = torch.tensor([1.0, 2, 3], device=self.device)
        loss: Tensor = F.cross_entropy(self.net(batch[0]) * self.cache, batch[1])
        self.count += 1  # count
        self.keep(loss.detach())
        loss = loss * random.random()  # python
        noise = np.random.rand()  # numpy
        noisy = loss * noise + torch.randn(1).item()  # torch
        self.log("noise", noise)  # logged
        self.accuracy(self.net(batch[0]), batch[1])  # metric
        return noisy

    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss)  # losses
        self.average = self.newer(loss)  # average
        self.last = loss  # last
        self.in_place.mul_(0.9).add_(loss)

    def newer(self, loss: Tensor) -> Tensor:
        return 0.9 * self.average + loss


def test_values_that_a_capture_would_freeze() -> None:
    module = Frozen()
    module.accuracy = MulticlassAccuracy(3, validate_args=False)
    everything = examine(module, a_batch(), "cpu")
    of_metric = [each for each in everything if each.user_where is not None]
    assert {each.user_where for each in of_metric} == {Place(__file__, line_of(Frozen.training_step, "metric"))}
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


# Snapshots of the host's state


def test_random_generators_that_were_drawn_from() -> None:
    before = host_random_state()
    assert random_changed(before) == []
    random.random()
    assert random_changed(before) == ["python"]
    np.random.rand()
    torch.rand(1)
    assert random_changed(before) == ["python", "numpy", "torch"]
    assert random_changed(host_random_state()) == []


def test_attributes_by_path() -> None:
    module = Frozen()
    plain = plain_attributes(module)
    assert {path: plain[path] for path in ("count", "rate", "phase", "cache")} == {
        "count": 0, "rate": 0.5, "phase": "start", "cache": None,
    }  # fmt: skip
    assert str(plain["losses"]) == "a list of 0"
    assert plain["net.3.p"] == 0.1
    assert "training" not in plain
    assert "net.3.training" not in plain
    assert not any(path.startswith(("_", "accuracy._")) for path in plain), "the libraries' own"
    tensors = tensor_attributes(module)
    assert {"average", "last", "in_place", "net.1.running_mean", "accuracy.tp"} <= set(tensors)
    assert "net.0.weight" not in tensors
    assert tensors["last"] is module.last


def test_changes_between_snapshots() -> None:
    one = torch.zeros(())
    before = {
        "same": 1,
        "type": 1,
        "value": 1,
        "nan": float("nan"),
        "gone": 1,
        "tensor": one,
        "kept": one,
        "none": None,
    }
    after = {"same": 1, "type": True, "value": 2, "nan": float("nan"), "tensor": one.clone(), "kept": one, "new": 0}
    assert changed(before, after) == ["type", "value", "gone", "tensor", "none", "new"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.losses.append(1),
        lambda m: m.table.update(a=2),
        lambda m: m.table.update(b=1),
        lambda m: m.table.__setitem__("t", torch.zeros(1)),
    ],
)
def test_containers_are_compared_by_what_they_hold(change: Callable[[Any], Any]) -> None:
    module: Any = Frozen()
    module.table = {"a": 1, "t": torch.zeros(1)}
    before = plain_attributes(module)
    assert changed(before, plain_attributes(module)) == []
    old = module.table["t"]
    change(module)
    assert len(changed(before, plain_attributes(module))) == 1, old


# Places


def test_the_line_of_an_assignment_whose_value_a_function_made() -> None:
    held: dict[str, Any] = {"value": None, "other": 0}

    def made() -> list[int]:
        return [1]

    def step() -> None:
        held["value"] = made()  # value
        held["other"] += 1  # other
        held["other"] += 1

    found = lines_that_change(step, {"value": lambda: held["value"], "other": lambda: held["other"], "no": lambda: 0})
    assert {name: site.where for name, site in found.items()} == {
        "value": Place(__file__, line_of(step, "value")),
        "other": Place(__file__, line_of(step, "other")),
    }


def test_where_and_who_called_it() -> None:
    mine, library = Place("/home/me/model.py", 3), Place("/x/site-packages/timm/loss.py", 7)
    inside, generated = Place(torch.nn.modules.module.__file__, 1), Place("<frozen runpy>", 1)
    site = site_of([inside, library, generated, mine])
    assert site is not None
    assert (site.where, site.user_where) == (library, mine)
    site = site_of([inside, mine, library])
    assert site is not None
    assert (site.where, site.user_where) == (mine, None)
    assert site_of([inside, generated]) is None
    assert is_machinery(pl.__file__)
    assert is_machinery(inspect.__file__)
    assert not is_machinery(retinanet.__file__)
    assert str(library) == "timm/loss.py:7"
    assert short_path(str(retinanet.__file__)) == "torchvision/models/detection/retinanet.py"
    assert short_path("/home/me/model.py") == "/home/me/model.py"


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_its_words(name: str) -> None:
    kind = KINDS[name]
    for text in (kind.what, kind.cure):
        assert text == text.strip()
        assert not text.endswith(".")
        assert "\n" not in text
    assert not (kind.breaks and kind.freezes)
