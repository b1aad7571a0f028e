"""The sync finder: every line that would break a capture, by file and line, and no other."""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from marked_lines import line_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.cuda_graph_step.sync_finder.cures import KINDS
from fasttrain.callbacks.cuda_graph_step.sync_finder.finder import Finding, find_syncs
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Place

Step = Callable[[Tensor, Tensor], Any]


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
