"""Small fits with and without the graph step, for its tests on the CPU (by the stand-in) and on a GPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum and decay; a power of two as learning rate is the same in every precision."""
    return torch.optim.SGD(parameters, lr=2**-6, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=2**-9, weight_decay=0.01)


class Small(pl.LightningModule):
    """An MLP on random data with batch normalization, that logs a value per step and one per epoch."""

    def __init__(
        self,
        make: OptimizerMaker = sgd,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.make, self.schedule = make, schedule
        # A bias before batch normalization has no gradient but rounding, which Adam would blow up.
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


class Batches:
    """A loader of batches that are there already: a list would be several loaders to Lightning."""

    def __init__(self, made: Sequence[Any]) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


def batches(count: int, rows: Sequence[int] = (6,), seed: int = 0) -> Batches:
    """Return batches of the given sizes in turn."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [rows[index % len(rows)] for index in range(count)]
    return Batches(
        [(torch.randn(n, 8, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]
    )


class Kept(pl.Callback):
    """Keeps what a fit shows to the outside after every batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.metrics.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        self.steps.append(trainer.global_step)
        self.rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))


def fit(
    module: pl.LightningModule,
    loader: Any,
    graph: CUDAGraphStep | None = None,
    *,
    seed: int = 0,
    callbacks: Sequence[pl.Callback] = (),
    validation: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> pl.Trainer:
    """Fit a module and return the trainer; quiet, on one CPU unless `options` say otherwise."""
    pl.seed_everything(seed, verbose=False)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(**{**defaults, **options}, callbacks=[*([graph] if graph is not None else []), *callbacks])
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return trainer


def same_start(make: Callable[[], pl.LightningModule], seed: int = 1) -> tuple[pl.LightningModule, pl.LightningModule]:
    """Return two modules with equal weights."""
    modules = []
    for _ in range(2):
        torch.manual_seed(seed)
        modules.append(make())
    return modules[0], modules[1]


def assert_same_state(ours: pl.Trainer, plain: pl.Trainer, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare weights, buffers and optimizer state; bit for bit unless a tolerance is given."""
    expected = plain.lightning_module.state_dict()
    for name, value in ours.lightning_module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
    ours_state, plain_state = (t.optimizers[0].state_dict()["state"] for t in (ours, plain))
    assert ours_state.keys() == plain_state.keys()
    for index, values in plain_state.items():
        assert values.keys() == ours_state[index].keys()
        for key, value in values.items():
            torch.testing.assert_close(
                torch.as_tensor(ours_state[index][key]).cpu(), torch.as_tensor(value).cpu(), rtol=rtol, atol=atol
            )
