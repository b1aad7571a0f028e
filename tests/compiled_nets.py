"""Networks of repeated blocks for the tests of compile, and how their regions are compiled and trained."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fasttrain.callbacks.compile import CompiledRegions


class Block(nn.Module):
    """A residual block; `width` is its input's and output's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Broken(Block):
    """Can't be one graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lit(pl.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Net()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2**-6)


def reset_after_each_test() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, *modules: str, **options: Any) -> CompiledRegions:
    regions = CompiledRegions(model, modules, **{"backend": "eager", **options})
    regions.apply()
    return regions


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **defaults, **options})  # type: ignore[arg-type]


def outputs_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output, x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]
