"""The bench case for two GPUs, as far as a CPU can tell: ranks train together, and what fails is told."""

import os
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from fasttrain.callbacks.cuda_graph_step import bench_ranks
from fasttrain.callbacks.cuda_graph_step.bench import make_mlp
from fasttrain.callbacks.cuda_graph_step.bench_fit import Classifier
from fasttrain.callbacks.cuda_graph_step.bench_ranks import RankWork, measure, on_ranks, two_gpus
from fasttrain.recipes.bert import bench as bert


def work() -> RankWork:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 128), torch.randint(10, (4,))) for _ in range(2)]
    module = Classifier(make_mlp(), partial(torch.optim.SGD, lr=0.01))
    return RankWork(module, batches, 4, "an MLP, batch 4", warm_up=15, windows=2, window=5)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
@pytest.mark.parametrize(
    ("variant", "how"), [("two_gpus_graph", "whole step in a CUDA graph"), ("two_gpus_eager", "eager")]
)
def test_two_ranks_train_together(variant: str, how: str) -> None:
    def of_rank(rank: int) -> Any:
        os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank), NODE_RANK="0")
        return measure(f"{__name__}:work", variant)

    for told in run_ranks(2, of_rank):
        assert told["why"] is None
        assert len(told["rates"]) == 2
        assert min(told["rates"]) > 0
        assert told["note"].startswith(f"an MLP, batch 4; {how}, DDP over NCCL; ")


def interpreter(folder: Path, script: str) -> str:
    """Return a program that is started in Python's place, with Python's arguments."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_ranks_are_started_with_their_place_and_their_answers_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = '{\\"target\\": \\"$3\\", \\"variant\\": \\"$4\\", \\"place\\": \\"$MASTER_ADDR $LOCAL_RANK\\"}'
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, f'echo "{answer}" > "$5"'))
    told = on_ranks("module:function", "two_gpus_eager", 2)
    assert told == [
        {"target": "module:function", "variant": "two_gpus_eager", "place": f"127.0.0.1 {rank}"} for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("script", "codes"), [("echo planted; exit 3", r"\[3\]"), ("echo planted; exec sleep 30", r"\[-1\]")]
)
def test_a_rank_that_fails_or_hangs_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, codes: str
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    monkeypatch.setattr(bench_ranks, "SECONDS", 2.0)
    with pytest.raises(RuntimeError, match=rf"(?s)module:function, one_gpu: exit codes {codes}; last words:.*planted"):
        on_ranks("module:function", "one_gpu", 1)


def test_a_row_is_the_slower_ranks_and_what_fell_back_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(target: str, variant: str, ranks: int) -> list[dict[str, Any]]:
        why = "it fell back" if variant == "two_gpus_graph" else None
        return [{"rates": [10.0 + rank, 20.0 - rank], "why": why, "note": variant} for rank in range(ranks)]

    monkeypatch.setattr(bench_ranks, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2)))
    monkeypatch.setattr(bench_ranks, "on_ranks", told)
    rows = {row.variant: row for row in two_gpus("bert", "module:function")}
    assert {name: row.value for name, row in rows.items()} == {"one_gpu": 15.0, "two_gpus_eager": 14.5}
    assert {(row.case, row.metric) for row in rows.values()} == {("two_gpus", "samples_per_second_per_gpu")}
    assert "bert: two_gpus has no row for two_gpus_graph: it fell back" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_without_two_gpus_there_is_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(two_gpus("bert", "module:function")) == []
    assert "bert: two_gpus needs two GPUs" in capsys.readouterr().out


def test_berts_work_is_full_rows() -> None:
    work = bert.rank_work(2, max_positions=64, hidden_size=32, num_layers=1, num_heads=2)
    assert len(work.batches) == 2
    batch = work.batches[0]
    assert tuple(batch["input_ids"].shape) == (2, 64)
    assert int(batch["num_sequences"]) == work.samples == 2
    assert batch["sequence_lengths"].sum() == 2 * 64


def test_a_free_port_is_free() -> None:
    with socket.create_server(("127.0.0.1", int(bench_ranks._free_port()))):
        pass
