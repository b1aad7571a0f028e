"""Milliseconds a step in `Trainer.fit`: plain Lightning, a bare loop, the graph step, and nothing but its replay."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchvision.models import resnet18

from fasttrain.bench import Case
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.measure import Row, make_row, sample_ms, synchronize
from fasttrain.quiet import quiet_libraries

WINDOW = 50
"""Steps between two looks at the clock, which wait for the device."""

NOTE = "logger, progress bar and one self.log per step on; batches pinned in host memory"


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case("cuda_graph_step", "mlp", "three-layer MLP, batch 64, AdamW, fp32", mlp, True),
        Case("cuda_graph_step", "resnet18_b8", "ResNet-18, batch 8, 64², SGD, fp32", resnet18_b8, True),
    ]


def mlp() -> Iterator[Row]:
    """Yield milliseconds a step of a small MLP, where the host is all there is to wait for."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )  # fmt: skip

    yield from compare("mlp", make, partial(torch.randn, 64, 128), 10, torch.optim.AdamW, steps=3000)


def resnet18_b8() -> Iterator[Row]:
    """Yield milliseconds a step of ResNet-18 on few small images."""
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    make = partial(resnet18, num_classes=10)
    yield from compare("resnet18_b8", make, partial(torch.randn, 8, 3, 64, 64), 10, sgd, steps=1000)


class Classifier(pl.LightningModule):
    """Any network, with cross-entropy and one logged value."""

    def __init__(self, net: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.make_optimizer(self.parameters())


class Endless:
    """A loader that hands out the same few batches again and again, and costs next to nothing."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[index % len(self.batches)] for index in range(self.count))


class StepTimer(pl.Callback):
    """Takes the time of every `WINDOW` steps, after a share of the fit to warm up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.step_ms = warm_up, list[float]()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the clock when a window is full."""
        if batch_idx % WINDOW == 0:
            synchronize(pl_module.device)
            now = time.perf_counter()
            if batch_idx > self.warm_up:
                self.step_ms.append((now - self._then) / WINDOW * 1e3)
            self._then = now


def compare(
    case: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[], Tensor],
    classes: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    precision: Any = "32-true",
) -> Iterator[Row]:
    """Yield the rows of one network by variant."""
    data = [inputs() for _ in range(8)]
    batches = [(x.pin_memory(), torch.randint(classes, (len(x),)).pin_memory()) for x in data]
    for variant, callbacks in (("plain", []), ("ours", [CUDAGraphStep()])):
        times = fit_step_ms(Classifier(make(), make_optimizer), batches, callbacks, steps, precision)
        yield make_row("cuda_graph_step", case, variant, "step_ms", "ms", times, NOTE)
    bare = bare_loop(make(), batches, make_optimizer)
    yield make_row("cuda_graph_step", case, "bare", "step_ms", "ms", _windows(bare, steps), "a loop, copies included")
    replay = bare_replay(make(), batches[0], make_optimizer)
    yield make_row("cuda_graph_step", case, "floor", "step_ms", "ms", _windows(replay, steps), "replays alone")


def fit_step_ms(
    module: pl.LightningModule, batches: list[Any], callbacks: list[pl.Callback], steps: int, precision: Any = "32-true"
) -> list[float]:
    """Return milliseconds a step by window, in a fit with everything on that a user has on."""
    timer = StepTimer(warm_up=steps // 4)
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            precision=precision,
            logger=CSVLogger(folder),
            default_root_dir=folder,
            callbacks=[*callbacks, timer],
            enable_model_summary=False,
        )
        trainer.fit(module, Endless(batches, steps + 1))
    return timer.step_ms


def bare_loop(net: nn.Module, batches: list[Any], make_optimizer: Callable[[Any], Any]) -> Callable[[], None]:
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


def bare_replay(net: nn.Module, batch: Any, make_optimizer: Callable[[Any], Any]) -> Callable[[], None]:
    """Return the replay of one step captured by hand, optimizer fused: the floor of what a graph can give."""
    net.cuda().train()
    optimizer = make_optimizer(net.parameters())
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False, **({"capturable": True} if "capturable" in group else {}))
    inputs, labels = (tensor.cuda() for tensor in batch)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _windows(step: Callable[[], None], steps: int) -> list[float]:
    def window() -> None:
        for _ in range(WINDOW):
            step()

    return [ms / WINDOW for ms in sample_ms(window, "cuda", warmup=5, repeats=max(10, steps // WINDOW // 2))]
