"""The graph step on two processes: the same weights on both and as without it, and nobody waits in vain."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from graph_fits import Batches, Small, batches
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from rank_processes import run_ranks
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.callback import WARM_UP_OF_DDP
from fasttrain.callbacks.cuda_graph_step.recording import Reexecution

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


def is_replaying() -> bool:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not Reexecution.replay.__code__:
        frame = frame.f_back
    return frame is not None


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
        plain = torch.distributed.broadcast

        def counted(*arguments: Any, **options: Any) -> Any:
            self.broadcasts += 1
            return plain(*arguments, **options)

        torch.distributed.broadcast = counted  # in this rank's forked process; Lightning asks for SIGTERM by it

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
    timeout = options.pop("timeout", timedelta(seconds=30))
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timeout)
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


def assert_same_learned(mine: Any, expected: Any) -> None:
    assert_same(mine["weights"], expected["weights"])
    for index, state in expected["optimizer"].items():
        assert_same(mine["optimizer"][index], state)


LEARNED = ("net.0.weight", "net.4.weight", "net.4.bias", "net.1.weight")
"""Statistics of the batch normalization are each rank's own until the next forward."""


@pytest.mark.parametrize(
    ("accumulate", "count", "epochs", "eager"),
    [(1, 52, 1, WARM_UP_OF_DDP), (3, 22, 2, WARM_UP_OF_DDP + 1)],  # the short window at the end is one more kind
)
def test_two_processes_learn_and_log_the_same(
    tmp_path: Path, accumulate: int, count: int, epochs: int, eager: int
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": epochs}
    ours = fit(tmp_path / "ours", CUDAGraphStep(stand_in=True), Data(count), **options)
    plain = fit(tmp_path / "plain", None, Data(count), **options)
    for mine, expected in zip(ours, plain, strict=True):
        assert_same_learned(mine, expected)
        for key in ("step", "read", "metrics", "rows"):
            assert mine[key] == expected[key], key
        assert mine["eager"] == [eager], mine["notes"]
        assert mine["hits"][0] >= 20
        assert expected["broadcasts"] == epochs * count
        assert mine["broadcasts"] == 0
    assert_same({k: ours[0]["weights"][k] for k in LEARNED}, {k: ours[1]["weights"][k] for k in LEARNED})


@pytest.mark.parametrize("checks", [0, 2])
def test_each_rank_has_shapes_of_its_own(tmp_path: Path, checks: int) -> None:
    """One rank replays, while another meets a shape for the first time, captures it and checks it."""
    data = Data(45, rows=((6, 5, 6, 4), (6, 6, 5, 6)))
    options: dict[str, Any] = {"max_epochs": 1, "timeout": timedelta(seconds=5)}
    ours = fit(tmp_path / "ours", CUDAGraphStep(stand_in=True, checks=checks), data, **options)
    plain = fit(tmp_path / "plain", None, data, **options)
    for mine, expected in zip(ours, plain, strict=True):
        assert_same_learned(mine, expected)
        assert mine["rows"] == expected["rows"]
        assert mine["hits"][0] >= 20


class DiffersOnTheSecond(Logs):
    """Its captured step is not its eager one, on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.global_rank == 1 and is_replaying() else loss


def test_ranks_agree_that_a_replay_is_wrong(tmp_path: Path) -> None:
    graph = CUDAGraphStep(stand_in=True, trusted=("DiffersOnTheSecond.training_step",))
    ours = fit(tmp_path / "ours", graph, Data(30), DiffersOnTheSecond, max_epochs=1)
    plain = fit(tmp_path / "plain", None, Data(30), max_epochs=1)
    for mine, expected in zip(ours, plain, strict=True):
        assert_same_learned(mine, expected)
        assert "a replay is not what the eager step computes" in mine["notes"][0]


def test_ddp_of_one_process_warms_up_as_ddp_does() -> None:
    """As the only rank that trains beside evaluation ranks has it."""

    def work(rank: int) -> Any:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=DDPStrategy(process_group_backend="gloo"), logger=False,
            callbacks=[graph := CUDAGraphStep(stand_in=True)], max_epochs=1, enable_model_summary=False,
            enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(Small(), batches(30))
        return [(tally.eager, tally.hits) for tally in graph.pool.tallies.values()], graph.notes

    tallies, notes = run_ranks(1, work)[0]
    assert [eager for eager, _ in tallies] == [WARM_UP_OF_DDP], notes
    assert tallies[0][1] > 10


def learn(folder: Path, rank: int, ranks: int, epochs: int, resume: str | None = None, save: str | None = None) -> Any:
    """Train on one sequence of batches, dealt to the ranks in turn; one rank takes two a step. Return the weights."""
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.manual_seed(2)
    strategy: Any = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, logger=False, callbacks=[CUDAGraphStep(stand_in=True)],
        max_epochs=epochs, accumulate_grad_batches=2 // ranks, enable_model_summary=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    module, data = Small(), batches(40)
    data.made = data.made[rank::ranks]
    trainer.fit(module, data, ckpt_path=folder / resume if resume is not None else None)
    if save is not None:
        trainer.save_checkpoint(folder / save)
    assert trainer.global_step == 20 * epochs
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def test_two_ranks_learn_what_one_does_with_two_batches_a_step_and_either_goes_on(tmp_path: Path) -> None:
    two = run_ranks(2, lambda rank: learn(tmp_path, rank, 2, 1, save="epoch.ckpt"))
    one = run_ranks(1, lambda rank: learn(tmp_path, rank, 1, 1))
    on_two = run_ranks(2, lambda rank: learn(tmp_path, rank, 2, 2, resume="epoch.ckpt"))
    on_one = run_ranks(1, lambda rank: learn(tmp_path, rank, 1, 2, resume="epoch.ckpt"))
    for name, value in one[0].items():
        assert (two[0][name] == two[1][name]).all(), name
        assert (on_two[0][name] == on_two[1][name]).all(), name
        numpy.testing.assert_allclose(two[0][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        numpy.testing.assert_allclose(on_two[0][name], on_one[0][name], rtol=1e-4, atol=1e-6, err_msg=name)
