"""Milliseconds a step in `Trainer.fit`: plain Lightning, a bare loop, the graph step, and nothing but its replay."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from fasttrain.bench import Case
from fasttrain.callbacks.cuda_graph_step.bench_fit import (
    NOTE,
    WINDOW,
    Classifier,
    Endless,
    OptimizerMaker,
    StepTimer,
    pinned,
    timed_fit,
)
from fasttrain.callbacks.cuda_graph_step.bench_foreign import foreign
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.measure import Row, make_row, sample_ms


def cases() -> list[Case]:
    """Return the room's bench cases."""
    networks = "ResNet-50, ViT-B/16, EfficientNet-B0 and BERT-base, as their libraries have them, batch 1 to 64"
    return [
        Case("cuda_graph_step", "mlp", "three-layer MLP, batch 64, AdamW, fp32", mlp, True),
        Case("cuda_graph_step", "resnet18_b8", "ResNet-18, batch 8, 64², SGD, fp32", resnet18_b8, True),
        Case("cuda_graph_step", "loop", "the MLP's step by what is on: where the host's time goes", loop, True),
        Case("cuda_graph_step", "foreign", networks, foreign, True),
    ]


def mlp() -> Iterator[Row]:
    """Yield milliseconds a step of a small MLP, where the host is all there is to wait for."""
    yield from compare("mlp", make_mlp, partial(torch.randn, 64, 128), 10, torch.optim.AdamW, steps=3000)


def resnet18_b8() -> Iterator[Row]:
    """Yield milliseconds a step of ResNet-18 on few small images."""
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    make = partial(resnet18, num_classes=10)
    yield from compare("resnet18_b8", make, partial(torch.randn, 8, 3, 64, 64), 10, sgd, steps=1000)


def make_mlp() -> nn.Module:
    """Return three small layers."""
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def compare(
    case: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[], Tensor],
    classes: int,
    make_optimizer: OptimizerMaker,
    steps: int,
    precision: Any = "32-true",
) -> Iterator[Row]:
    """Yield the rows of one network by variant."""
    batches = [pinned((x, torch.randint(classes, (len(x),)))) for x in (inputs() for _ in range(8))]
    for variant, graph in (("plain", None), ("ours", CUDAGraphStep())):
        timer = StepTimer(warm_up=steps // 4, graph=graph)
        timed_fit(Classifier(make(), make_optimizer), batches, timer, steps + 1, precision)
        yield from fit_row(case, variant, timer, NOTE)
    bare = bare_loop(make(), batches, make_optimizer)
    yield make_row("cuda_graph_step", case, "bare", "step_ms", "ms", windows(bare, steps), "a loop, copies included")
    replay = bare_replay(make(), batches, make_optimizer)
    yield make_row("cuda_graph_step", case, "floor", "step_ms", "ms", windows(replay, steps), "replays alone")


LOOPS: Mapping[str, tuple[Mapping[str, bool], Mapping[str, Any], Mapping[str, Any]]] = {
    "loop_no_log": ({"logs": False}, {}, {}),
    "loop_one_log": ({}, {}, {}),
    "loop_prog_bar": ({"prog_bar": True}, {}, {}),
    "loop_log_every_step": ({}, {"log_every_n_steps": 1}, {}),
    "loop_fwd_bwd": ({}, {}, {"scope": "fwd_bwd"}),
}
"""Case -> options of the module, of the Trainer, and of the graph step."""


def loop(steps: int = 2000) -> Iterator[Row]:
    """Yield milliseconds a step of the MLP by what is on, on the short path and on Lightning's own."""
    batches = [pinned((torch.randn(64, 128), torch.randint(10, (64,)))) for _ in range(8)]
    note = "logger and progress bar on; read by them every 50 steps, in loop_log_every_step at every one"
    for case, (module, trainer, graph_step) in LOOPS.items():
        for variant in ("lightning_path", "short_path"):
            graph = CUDAGraphStep(short_path=variant == "short_path", **graph_step)
            timer = StepTimer(warm_up=steps // 4, graph=graph)
            classifier = Classifier(make_mlp(), torch.optim.AdamW, **module)
            timed_fit(classifier, batches, timer, steps + 1, **trainer)
            yield from fit_row(case, variant, timer, note)
    for variant, copies, what in (("floor", False, "replays alone"), ("copies", True, "inputs' copies and replays")):
        replay = bare_replay(make_mlp(), batches, torch.optim.AdamW, copies)
        yield make_row("cuda_graph_step", "loop_no_log", variant, "step_ms", "ms", windows(replay, steps), what)


def fit_row(case: str, variant: str, timer: StepTimer, note: str) -> Iterator[Row]:
    """Yield the row of a timed fit; none, and say why, where a graph step fell back to eager steps."""
    if timer.why_not_credited is not None:
        print(f"cuda_graph_step: {case} has no row for {variant}: {timer.why_not_credited}")
        return
    yield make_row("cuda_graph_step", case, variant, "step_ms", "ms", timer.step_ms, note)


def bare_loop(net: nn.Module, batches: list[Any], make_optimizer: OptimizerMaker) -> Callable[[], None]:
    """Return a function that does one eager step without Lightning."""
    net.cuda().train()
    optimizer = make_optimizer(net.parameters())
    place = iter(Endless(batches, 10**9))

    def step() -> None:
        inputs, labels = (tensor.cuda(non_blocking=True) for tensor in next(place))
        loss = nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def bare_replay(
    net: nn.Module, batches: list[Any], make_optimizer: OptimizerMaker, copies: bool = False
) -> Callable[[], None]:
    """Return the replay of one step captured by hand, optimizer fused: the floor of what a graph can give.

    Args:
        copies: copy the next batch to the static inputs before each replay.
    """
    net.cuda().train()
    optimizer = make_optimizer(net.parameters())
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False, **({"capturable": True} if "capturable" in group else {}))
    static = inputs, labels = tuple(tensor.cuda() for tensor in batches[0])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    place = iter(Endless(batches, 10**9))

    def replay() -> None:
        for tensor, new in zip(static, next(place), strict=True):
            tensor.copy_(new, non_blocking=True)
        graph.replay()

    return replay if copies else graph.replay


def windows(step: Callable[[], None], steps: int) -> list[float]:
    """Return milliseconds a step, by window, of a function that does one."""

    def window() -> None:
        for _ in range(WINDOW):
            step()

    return [ms / WINDOW for ms in sample_ms(window, "cuda", warmup=5, repeats=max(10, steps // WINDOW // 2))]
