"""One optimizer step over the parameters of real models, on gradients that stay where they are."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torchvision.models import resnet50

from fasttrain.bench import Case
from fasttrain.callbacks.optimizers.groups import parameter_groups
from fasttrain.callbacks.optimizers.lamb import LAMB
from fasttrain.callbacks.optimizers.lars import LARS
from fasttrain.callbacks.optimizers.layerwise import LayerwiseOptimizer
from fasttrain.callbacks.optimizers.reference import lamb, lars
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, make_row, sample_ms

# fp32. LAMB: gradients once for the global norm; then gradient, weight and both moments read, the last three written.
# It takes for granted that a tensor stays in the cache between the sums of its norms and its update.
LAMB_BYTES = 4 * (1 + 4 + 3)
ADAMW_BYTES = 4 * (4 + 3)
# LARS and SGD: gradient, weight and buffer read, the last two written.
LARS_BYTES = 4 * (3 + 2)
CACHED_ELEMENTS = 2**21  # 8 MiB for each of a bucket's six lists: they fit in the H200's 50 MiB of L2


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case("optimizers", "bert_large_lamb", "LAMB and AdamW over BERT-large, fp32", bert_large_lamb, True),
        Case("optimizers", "resnet50_lars", "LARS and SGD over ResNet-50, fp32", resnet50_lars, True),
    ]


def bert_large_lamb() -> Iterator[Row]:
    """Yield milliseconds a step over BERT-large's 336 million parameters by optimizer and implementation."""
    numbers: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6}
    make = partial(LAMB, **numbers)
    for_graph = {"capturable": True}
    yield from layerwise_rows("bert_large_lamb", bert_large_shapes, make, LAMB_BYTES, _plain_lamb, for_graph)
    adamw: Any = partial(AdamW, **numbers)
    yield from torch_rows("bert_large_lamb", "adamw", bert_large_shapes, adamw, ADAMW_BYTES)


def resnet50_lars() -> Iterator[Row]:
    """Yield milliseconds a step over ResNet-50's 26 million parameters by optimizer and implementation."""
    numbers: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    yield from layerwise_rows("resnet50_lars", resnet50_groups, partial(LARS, **numbers), LARS_BYTES, _plain_lars, {})
    sgd: Any = partial(SGD, **numbers)
    yield from torch_rows("resnet50_lars", "sgd", resnet50_groups, sgd, LARS_BYTES)


Groups = Callable[[], list[dict[str, Any]]]


def layerwise_rows(
    case: str,
    groups: Groups,
    make: Callable[..., LayerwiseOptimizer],
    bytes_each: int,
    plain_step: Callable[[LayerwiseOptimizer, dict[Tensor, tuple[Tensor, ...]]], None],
    for_graph: Mapping[str, Any],
    device: str = "cuda",
) -> Iterator[Row]:
    """Yield the rows of one of ours: one parameter at a time, multi-tensor, by Triton, in graphs, and the floor."""
    for variant in (
        "plain",
        "ours",
        "ours_cached",
        "ours_graph",
        "ours_graph_cached",
        "ours_fused",
        "ours_fused_graph",
    ):
        options = {**(for_graph if "graph" in variant else {}), "fused": "fused" in variant}
        if options["fused"] and device == "cpu":
            continue
        optimizer = made(groups, partial(make, **options), device)
        note = "one parameter at a time, norms read on the host" if variant == "plain" else "multi-tensor"
        if options["fused"]:
            note = "Triton"
        step: Callable[[], Any] = optimizer.step
        if "cached" in variant:
            optimizer.most_elements = CACHED_ELEMENTS
            note += f", at most {CACHED_ELEMENTS:,} elements at a time"
        if variant == "plain":
            step = partial(plain_step, optimizer, {})
        if "graph" in variant:
            if device == "cpu":
                continue
            step = captured(optimizer.step).replay
            note += ", a replay"
        yield _row(case, variant, step, device, note)
    yield floor(case, "floor", groups, bytes_each)


def torch_rows(
    case: str, name: str, groups: Groups, make: Callable[..., Optimizer], bytes_each: int, device: str = "cuda"
) -> Iterator[Row]:
    """Yield the rows of one of torch's: a loop over the parameters, foreach, fused, and the floor."""
    flags = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    for variant, options in flags.items():
        optimizer = made(groups, partial(make, **options), device)
        yield _row(case, f"{name}_{variant}", optimizer.step, device, f"torch.optim, {variant}")
    yield floor(case, f"{name}_floor", groups, bytes_each)


def made(groups: Groups, make: Callable[[Any], Any], device: str) -> Any:
    """Return an optimizer over new fp32 parameters, with gradients, that has taken a step."""
    on_device = groups()
    for group in on_device:
        group["params"] = [nn.Parameter(param.detach().to(device)) for param in group["params"]]
        for param in group["params"]:
            param.grad = torch.randn_like(param) * 1e-3
    optimizer = make(on_device)
    optimizer.step()
    return optimizer


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of one step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def floor(case: str, variant: str, groups: Groups, bytes_each: int) -> Row:
    """Return the time to move the bytes that any implementation has to move."""
    elements = sum(param.numel() for group in groups() for param in group["params"])
    milliseconds = elements * bytes_each / H200_BYTES_PER_SECOND * 1e3
    note = f"{elements:,} parameters, {bytes_each} bytes each over 4.3 TB/s"
    return make_row("optimizers", case, variant, "step_ms", "ms", [milliseconds], note)


def bert_large_shapes() -> list[dict[str, Any]]:
    """Return BERT-large's parameters without its code: 24 layers of width 1024, 30528 words, its pre-training heads."""
    shapes: list[tuple[int, ...]] = [(30528, 1024), (512, 1024), (2, 1024)]
    shapes += [(1024,)] * 2
    for _ in range(24):
        shapes += [(1024, 1024), (1024,)] * 4 + [(1024,)] * 2  # query, key, value, output; layer norm
        shapes += [(4096, 1024), (4096,), (1024, 4096), (1024,)] + [(1024,)] * 2
    shapes += [(1024, 1024), (1024,)]  # pooler
    shapes += [(1024, 1024), (1024,), (1024,), (1024,), (30528,)]  # masked words: transform, layer norm, bias
    shapes += [(2, 1024), (2,)]  # next sentence
    params = [torch.randn(shape) * 0.02 for shape in shapes]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "adapt": False},
    ]


def resnet50_groups() -> list[dict[str, Any]]:
    """Return ResNet-50's parameters, batch norms and the bias left out of decay and adaptation."""
    return parameter_groups(resnet50(weights=None), 5e-5)


def _row(case: str, variant: str, step: Callable[[], Any], device: str, note: str) -> Row:
    values = sample_ms(step, device, warmup=5, repeats=30)
    return make_row("optimizers", case, variant, "step_ms", "ms", values, note)


def _parameters(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], Any]]:
    return ((group, param) for group in optimizer.param_groups for param in group["params"])


@torch.no_grad()
def _plain_lamb(optimizer: LayerwiseOptimizer, kept: dict[Tensor, tuple[Tensor, ...]]) -> None:
    divisor = float(torch.nn.utils.get_total_norm([p.grad for _, p in _parameters(optimizer)]).clamp_min(1.0))
    for group, param in _parameters(optimizer):
        m, v = kept.get(param) or (torch.zeros_like(param), torch.zeros_like(param))
        weight, m, v = lamb(
            param, param.grad, m, v, 1, lr=group["lr"], betas=group["betas"], eps=group["eps"],
            weight_decay=group["weight_decay"], divisor=divisor,
        )  # fmt: skip
        param.copy_(weight)
        kept[param] = (m, v)


@torch.no_grad()
def _plain_lars(optimizer: LayerwiseOptimizer, kept: dict[Tensor, tuple[Tensor, ...]]) -> None:
    for group, param in _parameters(optimizer):
        (buffer,) = kept.get(param) or (torch.zeros_like(param),)
        weight, buffer = lars(
            param, param.grad, buffer, lr=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"],
            adapt=group["adapt"],
        )  # fmt: skip
        param.copy_(weight)
        kept[param] = (buffer,)
