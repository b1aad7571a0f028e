"""A room of its own for tests: a module with a fused form whose numbers are the same, in a model of several."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.measure import Timing
from fasttrain.patches import ModulePatches, PatchCallback, PatchConfig, PatchOptimization, PatchSite


class Scaled(nn.Module):
    """relu(x) * scale, for `width` features."""

    def __init__(self, width: int, power: int = 1) -> None:
        super().__init__()
        self.power = power
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * self.scale**self.power


class FusedScaled(Scaled):
    """The same, in other operations."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) * self.scale**self.power


class ScaledPatches(ModulePatches):
    room = "scaled"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        return [
            PatchSite(path, module, fused_from(module)) for path, module in model.named_modules()
            if type(module) is Scaled
        ]  # fmt: skip

    def why_no_site(self, model: nn.Module) -> str:
        return f"{type(model).__name__} has no Scaled"


def fused_from(module: Scaled) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        fused = FusedScaled(len(module.scale), module.power)
        fused.scale = module.scale
        return fused

    return make


class ScaledOptimization(PatchOptimization[PatchConfig]):
    name: ClassVar[str] = "scaled"
    summary: ClassVar[str] = "for tests"
    config_class: ClassVar[type[Any]] = PatchConfig

    def make_callback(self) -> PatchCallback:
        return PatchCallback(ScaledPatches())


@dataclass(frozen=True)
class TieredConfig(PatchConfig):
    tier: str = "fast"


class TieredOptimization(PatchOptimization[TieredConfig]):
    name: ClassVar[str] = "tiered"
    summary: ClassVar[str] = "for tests: the same sites under another name, with a parameter"
    config_class: ClassVar[type[Any]] = TieredConfig

    def make_callback(self) -> PatchCallback:
        return PatchCallback(ScaledPatches())


class Blocks(pl.LightningModule):
    """Three sites called once (two of them alike), one called twice, one never; one of a width of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.alike = Scaled(8), Scaled(8)
        self.wide = Scaled(16)
        self.shared = Scaled(8)
        self.unused = Scaled(8)
        self.widen = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen.weight.new_zeros(()) + self.alike(self.first(x + self.widen.bias[:8]))
        return self.wide(self.widen(self.shared(x[:4]))).sum() + self.shared(x).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class BlocksData(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8)


def timing(median_ms: float, spread: float = 0.01) -> Timing:
    """Return a Timing whose percentiles are a share of the median away from it."""
    return Timing(median_ms, round(median_ms * (1 - spread), 6), round(median_ms * (1 + spread), 6), 12)
