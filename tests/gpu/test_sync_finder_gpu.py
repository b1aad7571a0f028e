"""The sync finder where there is a device: copies and waits are observed, in the backward's threads too."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torchvision.models.detection import retinanet_resnet50_fpn

from fasttrain.callbacks.cuda_graph_step.sync_finder.examination import examine
from fasttrain.callbacks.cuda_graph_step.sync_finder.finder import find_syncs
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Place

pytestmark = pytest.mark.gpu

Step = Callable[[Tensor, Tensor], Any]


def line_of(function: Any, mark: str = "here") -> int:
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return found


def find(step: Step) -> list[Any]:
    x = torch.randn(4, 5, device="cuda", requires_grad=True)

    def whole() -> None:
        result = step(x, x.detach() > 0)
        (result if isinstance(result, Tensor) and result.requires_grad else x).sum().backward()

    whole()  # libraries are loaded, and may wait, the first time
    return find_syncs(whole, "cuda")


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.sum().item()  # here


def masked(x: Tensor, mask: Tensor) -> Any:
    return x[mask]  # here


def set_by_mask(x: Tensor, mask: Tensor) -> Any:
    y = x.detach().clone()
    y[mask] = y.mean()  # here


def item(x: Tensor, mask: Tensor) -> Any:
    return x * x.sum().item()  # here


def branch(x: Tensor, mask: Tensor) -> Any:
    return x if x.sum() > 0 else x * 2  # here


def nonzero(x: Tensor, mask: Tensor) -> Any:
    return mask.nonzero()  # here


def repeated(x: Tensor, mask: Tensor) -> Any:
    return x.detach().repeat_interleave(mask[:, 0].long(), dim=0)  # here


def tensor_of_numbers(x: Tensor, mask: Tensor) -> Any:
    return x * torch.tensor([1.0, 2, 3, 4, 5], device=x.device)  # here


def new_tensor(x: Tensor, mask: Tensor) -> Any:
    return x * x.new_tensor([3.0])  # here


def moved(x: Tensor, mask: Tensor) -> Any:
    return x * torch.ones(5).to(x.device)  # here


def list_as_index(x: Tensor, mask: Tensor) -> Any:
    return x.detach()[[0, 2]]  # here


def to_list(x: Tensor, mask: Tensor) -> Any:
    return x.tolist()  # here


def to_cpu(x: Tensor, mask: Tensor) -> Any:
    return x.detach().cpu()  # here


def printed(x: Tensor, mask: Tensor) -> Any:
    return str(x)  # here


def normal(x: Tensor, mask: Tensor) -> Any:
    return torch.normal(x.detach(), x.detach().exp())  # here


def inverse(x: Tensor, mask: Tensor) -> Any:
    return torch.linalg.inv(x[:, :4].detach())  # here


def eigenvalues(x: Tensor, mask: Tensor) -> Any:
    return torch.linalg.eigh(x.detach().T @ x.detach())[0]  # here


def explicit(x: Tensor, mask: Tensor) -> Any:
    torch.cuda.synchronize()  # here


def own_generator(x: Tensor, mask: Tensor) -> Any:
    generator = torch.Generator("cuda")
    return torch.rand(3, generator=generator, device="cuda")  # here


def host_noise(x: Tensor, mask: Tensor) -> Any:
    return x * torch.rand(()).item()  # here


def in_backward(x: Tensor, mask: Tensor) -> Any:
    return ReadsInBackward.apply(x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("boolean indexing", masked),
        ("boolean indexing", set_by_mask),
        ("value read on the host", item),
        ("branch on a tensor", branch),
        ("nonzero", nonzero),
        ("repeat_interleave without output_size", repeated),
        *[("copy from the host", step) for step in (tensor_of_numbers, new_tensor, moved, list_as_index)],
        *[("copy to the host", step) for step in (to_list, to_cpu)],
        ("tensor as text", printed),
        ("checked sampling", normal),
        *[("linear algebra check", step) for step in (inverse, eigenvalues)],
        ("explicit synchronization", explicit),
        ("generator of its own", own_generator),
        ("host random numbers", host_noise),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_each_kind_is_found_at_its_line(kind: str, step: Step) -> None:
    (found,) = find(step)
    assert (found.kind, found.where) == (kind, Place(__file__, line_of(step)))


def test_the_backwards_own_threads_are_looked_at() -> None:
    (found,) = find(in_backward)
    assert (found.kind, found.where) == ("value read on the host", Place(__file__, line_of(ReadsInBackward.backward)))
    (found,) = find(masked)
    assert found.count == 2, "forward and backward"


@pytest.mark.parametrize(
    "step",
    [
        lambda x, mask: torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1),
        lambda x, mask: x.clone().masked_fill(mask, 0),
        lambda x, mask: x.clone().__setitem__(mask, 0.0),  # becomes masked_fill
        lambda x, mask: torch.as_tensor(x) + torch.rand_like(x),
        lambda x, mask: torch.nn.functional.one_hot(mask.long(), 2),
        lambda x, mask: x * torch.rand(3, device="cuda").sum(),
        lambda x, mask: x.quantile(0.5),
        lambda x, mask: torch.histc(x.detach(), 10, min=-1, max=1),
        lambda x, mask: torch.multinomial(x.detach().exp(), 3),
        lambda x, mask: x * torch.tensor([1, 2, 3]).sum().item(),
        lambda x, mask: torch.nn.functional.cross_entropy(x, mask[:, 0].long()),
    ],
    ids=lambda step: inspect.getsource(step).strip(),
)
def test_what_stays_on_the_device_is_no_finding(step: Step) -> None:
    """Each of these is captured, too, so that the finder is held to what a capture really takes."""
    assert find(step) == []
    x = torch.randn(4, 5, device="cuda", requires_grad=True)
    mask, graph = x.detach() > 0, torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x, mask)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(x, mask)


class TorchvisionRetinaNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(self.model(*batch).values())


def test_torchvisions_retinanet_on_both_devices() -> None:
    """What a CPU can tell is what a GPU shows, but for what is known to differ."""
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [10.0, 10.0, 60.0, 60.0]])
    batch = ([torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": torch.tensor([1, 2])}])
    by_device = {
        device: {(each.kind, str(each.where)) for each in examine(TorchvisionRetinaNet(), batch, device)}
        for device in ("cpu", "cuda:0")
    }
    assert by_device["cpu"] == by_device["cuda:0"]
