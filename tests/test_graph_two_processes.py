"""The graph step on two processes: the same weights on both and as without it, and nobody waits for the other in vain."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, batches
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep

pytestmark = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")


class Logs(Small):
    """Logs values of its rank alone and of all ranks, in every way in which Lightning reads them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("own", loss)
        self.log("step", loss, sync_dist=True, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("first", loss, on_step=True, on_epoch=True, sync_dist=True, rank_zero_only=True)
        return loss


class Data(pl.LightningDataModule):
    """Other batches for each rank.

    Args:
        rows: sizes of the batches, for each rank.
    """

    def __init__(self, count: int, rows: tuple[tuple[int, ...], ...] = ((6,), (6,))) -> None:
        super().__init__()
        self.count, self.rows = count, rows

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        rank = self.trainer.global_rank
        return batches(self.count, self.rows[rank], seed=rank)


class Tells(pl.Callback):
    """Writes down what each rank has at the end; the first rank reads metrics on the way, and alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: list[Any] = []
        self.broadcasts = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        plain = loop._broadcast_sigterm_tensor

        def counted() -> None:
            self.broadcasts += 1
            plain()

        loop._broadcast_sigterm_tensor = counted

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx % 3 == 1:
            self.read.append({key: float(value) for key, value in trainer.callback_metrics.items()})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        graphs = [callback for callback in trainer.callbacks if isinstance(callback, CUDAGraphStep)]
        told = {
            "weights": pl_module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict()["state"],
            "step": trainer.global_step,
            "read": self.read,
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "broadcasts": self.broadcasts,
            "eager": [sum(tally.eager for tally in graph.pool.tallies.values()) for graph in graphs],
            "hits": [graph.pool.hits for graph in graphs],
            "notes": [note for graph in graphs for note in graph.notes],
        }
        torch.save(told, self.folder / f"rank{trainer.global_rank}.pt")


def fit(folder: Path, graph: CUDAGraphStep | None, data: Data, module: Any = Logs, **options: Any) -> list[Any]:
    """Train on two ranks; return what each told, and the rows of the first's logger."""
    folder.mkdir()
    torch.manual_seed(1)
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=15))
    settings: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 5, **options}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=CSVLogger(folder, name="", version=""),
        callbacks=[*([graph] if graph is not None else []), Tells(folder)], enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    trainer.fit(module(), datamodule=data)
    rows = (folder / "metrics.csv").read_text()
    return [{**torch.load(folder / f"rank{rank}.pt", weights_only=False), "rows": rows} for rank in range(2)]


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=0, atol=0, msg=lambda text, k=key: f"{k}: {text}")


LEARNED = ("net.0.weight", "net.4.weight", "net.4.bias", "net.1.weight")
"""Statistics of the batch normalization are each rank's own until the next forward."""


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_processes_learn_and_log_the_same(tmp_path: Path, accumulate: int) -> None:
    data = Data(55)
    plain, ours = (
        fit(tmp_path / name, graph, data, accumulate_grad_batches=accumulate)
        for name, graph in (("plain", None), ("ours", CUDAGraphStep(stand_in=True)))
    )
    for mine, expected in zip(ours, plain, strict=True):
        assert_same(mine["weights"], expected["weights"])
        for index, state in expected["optimizer"].items():
            assert_same(mine["optimizer"][index], state)
        for key in ("step", "read", "metrics", "rows"):
            assert mine[key] == expected[key], key
        assert mine["eager"] == [11], mine["notes"]
        assert mine["hits"][0] >= 90
        assert expected["broadcasts"] == 2 * 55
        assert mine["broadcasts"] == 2 * 2, "at the batches 0 and 50 of each epoch"
    assert_same({k: ours[0]["weights"][k] for k in LEARNED}, {k: ours[1]["weights"][k] for k in LEARNED})
