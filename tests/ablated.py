"""A small project and three optimizations whose effects are known, for `test_ablation`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.optimization import Applies, Attachment, Change, Context, Grade, Optimization, Refuses, Stage, Verdict

RECIPE = """
recipe: slow
module: {class: ablated.SlowStep}
data: {class: ablated.Numbers, batch_size: 4}
trainer: {max_epochs: 1, accelerator: cpu}
optimizations: {quick: {}, wrong: {}, never: {}}
"""


class SlowStep(pl.LightningModule):
    """A step that sleeps, unless somebody cures it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.seconds = 0.04
        self.factor = 1.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return a loss of about one."""
        time.sleep(self.seconds)
        return (self.layer(batch[0]) * self.factor - 1).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Numbers(pl.LightningDataModule):
    """Six batches an epoch, always the same."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader."""
        numbers = torch.randn(6 * self.batch_size, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(numbers), self.batch_size)


@dataclass(frozen=True)
class NoConfig:
    """Nothing to choose."""


class _Toy(Optimization[NoConfig]):
    config_class: ClassVar[type[Any]] = NoConfig
    stage = Stage.MODEL
    grade: ClassVar[Grade] = "same numbers"

    def check(self, context: Context) -> Verdict:
        return Applies()

    def attach(self, context: Context) -> Attachment:
        self.act(context.module)
        return Attachment()

    def act(self, module: Any) -> None:
        raise NotImplementedError

    def applied(self) -> Sequence[Change]:
        return [Change("module", "changed")]


class Quick(_Toy):
    """Cuts three quarters of the step's sleep."""

    name, summary = "quick", "sleeps a quarter as long"

    def act(self, module: Any) -> None:
        """Shorten it."""
        module.seconds /= 4


class Wrong(_Toy):
    """Changes the numbers, and says that it does not; beside Quick it breaks."""

    name, summary = "wrong", "other numbers"

    def act(self, module: Any) -> None:
        """Change the loss, or fail."""
        if module.seconds < 0.04:
            raise RuntimeError("no room for two")
        module.factor = 1.3


class Never(_Toy):
    """Applies nowhere."""

    name, summary = "never", "nothing"

    def check(self, context: Context) -> Verdict:
        """Refuse."""
        return Refuses("it never applies")


CATALOGUE = {room.name: room for room in (Quick, Wrong, Never)}
