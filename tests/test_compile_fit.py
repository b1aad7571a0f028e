"""compile as a callback in Lightning's fits: the same weights, checkpoints both ways, and what it refuses to begin."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from compiled_nets import Block, Lit, Net, reset_after_each_test, trainer
from graph_fits import batches
from torch import Tensor, nn

from fasttrain.callbacks.compile import RegionalCompile
from fasttrain.callbacks.compile.cache import VARIABLES
from fasttrain.callbacks.compile.callback import MOST_ROWS
from fasttrain.callbacks.compile.tally import COLUMNS
from fasttrain.callbacks.cuda_graph_step import CUDAGraphStep
from fasttrain.errors import OptimizationError

_nothing_is_compiled_yet = pytest.fixture(autouse=True)(reset_after_each_test)


def fitted(*callbacks: pl.Callback, seed: int = 0, **options: Any) -> Lit:
    pl.seed_everything(seed)
    module = Lit()
    trainer(*callbacks, **options).fit(module, batches(4), batches(1, rows=(3,)))  # type: ignore[arg-type]
    return module


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, value), wanted in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(value, wanted, msg=name)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_with_and_without(precision: Any) -> None:
    before = dict(os.environ)
    callback = RegionalCompile(backend="aot_eager")
    assert_equal_weights(fitted(callback, precision=precision), fitted(precision=precision))
    assert [change.path for change in callback.changes] == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]
    assert {name: os.environ.get(name) for name in VARIABLES} == {name: before.get(name) for name in VARIABLES}
    table = callback.table()
    assert table.columns == COLUMNS
    assert [row[0] for row in table.rows] == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "all"]
    assert table.rows[0][1] == 4 + 2, "four steps, one validation and its rehearsal"
    assert table.rows[0][2:5] == (2, 0, 0), "one graph for training, one for evaluation"
    assert table.rows[-1][1] == 18


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    for first, second in ((RegionalCompile(backend="eager"), None), (None, RegionalCompile(backend="eager"))):
        one = trainer(*[first] if first else [], **options)
        one.fit(Lit(), batches(2))  # type: ignore[arg-type]
        path = tmp_path / "last.ckpt"
        one.save_checkpoint(path)
        other = Lit()
        again = trainer(*[second] if second else [], **{**options, "max_epochs": 2})
        again.fit(other, batches(2), ckpt_path=str(path))  # type: ignore[arg-type]
        assert again.global_step == 4


def test_with_a_captured_step() -> None:
    callback, step = RegionalCompile(backend="aot_eager"), CUDAGraphStep(stand_in=True, on_failure="error")
    assert_equal_weights(fitted(callback, step, max_epochs=3), fitted(max_epochs=3))
    assert step.changes
    assert sum(tally.hits for tally in step.pool.tallies.values()) > 0
    assert [tally.counts.graphs for tally in callback.tallies] == [2, 0, 0], "nothing is compiled at the capture"


def test_undo_after_a_fit_and_a_second_stage() -> None:
    callback = RegionalCompile(backend="eager")
    module = fitted(callback)
    trainer(callback).validate(module, batches(1), verbose=False)  # type: ignore[arg-type]
    assert len(callback.tallies) == 3
    callback.undo()
    assert all(block._compiled_call_impl is None for block in module.net.blocks)  # type: ignore[union-attr]


class Fails(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ValueError("mine")


def test_after_an_error_the_cache_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    with pytest.raises(ValueError, match="mine"):
        trainer(RegionalCompile(backend="eager")).fit(Fails(), batches(1))  # type: ignore[arg-type]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_the_callback_takes_the_modules_that_are_named() -> None:
    callback = RegionalCompile(backend="eager", modules=("net.stem",))
    fitted(callback)
    assert [change.path for change in callback.changes] == ["net.stem"]
    says = "compile: Lit has no module 'nett', neither by path nor by class; did you mean 'net'?"
    with pytest.raises(OptimizationError) as raised:
        fitted(RegionalCompile(backend="eager", modules=("nett",)))
    assert str(raised.value) == says


class NoChildren(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.weight).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nothing_to_compile_is_an_error() -> None:
    with pytest.raises(OptimizationError, match=r"^compile: NoChildren has no submodule with parameters.*; leave it o"):
        trainer(RegionalCompile(backend="eager")).fit(NoChildren(), batches(1))  # type: ignore[arg-type]


def test_a_table_of_many_regions_is_cut() -> None:
    callback = RegionalCompile(backend="eager")
    module = Lit(Net(*(Block() for _ in range(MOST_ROWS + 5))))
    trainer(callback).fit(module, batches(1))  # type: ignore[arg-type]
    rows = callback.table().rows
    assert len(rows) == MOST_ROWS + 2
    assert [row[0] for row in rows[-2:]] == ["5 further regions", "all"]
    assert [row[1] for row in rows[-2:]] == [5, MOST_ROWS + 5]
