"""The reach into Lightning's training loop: these fail when what it stands on changes, and say what to look at again.

`fasttrain.epoch_loop`, `fasttrain.short_path` and `fasttrain.step_results` do what parts of Lightning's loop do. A part
whose code changed may do more now: read it, take over what is new, then put the new fingerprint here.
"""

import ast
import copy
import hashlib
import inspect
import math
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, assert_same_state, batches, fit, same_start
from lightning.pytorch.core.module import LightningModule
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.progress import _OptimizationProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric, _Sync
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.nn.parallel import DistributedDataParallel

from fasttrain.epoch_loop import DelegatedOptimization, Window

OPTIMIZATION = "DelegatedOptimization, which splits it into forward_and_backward, step_optimizer and count"
PATH = "ShortPath.advance, which does the same without what nobody asks for"
READS = "ShortPath.advance, which reads values when this one would show or lose them"
RESULTS = "StepResults, which does the same for what a replay left on the device"

STOOD_ON: list[tuple[Callable[..., Any], str, str]] = [
    (_AutomaticOptimization.run, "6ea2f4734e72", OPTIMIZATION),
    (_AutomaticOptimization._make_closure, "4c4473c04022", OPTIMIZATION),
    (_AutomaticOptimization._make_zero_grad_fn, "061f920ec07e", OPTIMIZATION),
    (_AutomaticOptimization._optimizer_step, "e2afaf8d7907", OPTIMIZATION),
    (_AutomaticOptimization._on_before_zero_grad, "751ef789a69a", OPTIMIZATION),
    (_AutomaticOptimization._optimizer_zero_grad, "dba35cc28a32", OPTIMIZATION),
    (_AutomaticOptimization._training_step, "21538227cca1", OPTIMIZATION),
    (ClosureResult.asdict, "0e6b285ed0c6", OPTIMIZATION),
    (_block_parallel_sync_behavior, "e4860466147b", OPTIMIZATION),
    (_TrainingEpochLoop.advance, "652cf8f592a6", PATH),
    (_TrainingEpochLoop._broadcast_sigterm_tensor, "f2111dcfb613", "sigterm.StopTogether, in whose place it is"),
    (_SignalConnector._sigterm_notifier_fn, "c5412c5e2322", "sigterm.StopTogether, in whose place it is"),
    (_SignalConnector.register_signal_handlers, "40b6c0168bf0", "sigterm.StopTogether, which it is to find"),
    (_TrainingEpochLoop._build_kwargs, "ef10371fff22", PATH),
    (_TrainingEpochLoop._should_accumulate, "31bcdde13183", "DelegatedOptimization.next_window"),
    (_TrainingEpochLoop._num_ready_batches_reached, "f63510695d44", PATH),
    (_TrainingEpochLoop.update_lr_schedulers, "77bb2decba2b", PATH),
    (_TrainingEpochLoop.on_advance_end, "cc589ca888e9", READS),
    (_TrainingEpochLoop._should_check_val_fx, "6a5d9405dc6b", READS),
    (_DataFetcher.__next__, "66c9207654dc", "ShortPath.advance, which asks `done` what is last"),
    (_PrefetchDataFetcher.__next__, "56ed0726b6f4", "ShortPath.advance, which asks `done` what is last"),
    (call._call_callback_hooks, "0bee2b23eee9", PATH),
    (call._call_lightning_module_hook, "0a706bc0e6b0", PATH),
    (Strategy.batch_to_device, "072533b1ef61", "short_path.transfer_is_plain"),
    (DDPStrategy._setup_model, "b4dafbb12123", "trainer.build_ddp_on"),
    (_LoggerConnector.on_batch_start, "a8f50674c358", READS),
    (_LoggerConnector.on_batch_end, "c34078075c27", READS),
    (_LoggerConnector.update_train_step_metrics, "c2edca18347f", READS),
    (_LoggerConnector.should_reset_tensors, "5a71c443e792", "StepResults.before_replay"),
    (_ResultCollection.log, "6acf70906d92", RESULTS),
    (_ResultCollection.metrics, "e038f0c90921", RESULTS),
    (_ResultCollection.reset, "7b1f2cb5f360", RESULTS),
    (_ResultCollection._extract_batch_size, "a15e75b10a2d", RESULTS),
    (_ResultCollection._get_cache, "174d87c8db64", RESULTS),
    (_ResultMetric.update, "7be6893a507b", RESULTS),
    (_ResultMetric.compute, "66e273a9ce95", RESULTS),
    (_ResultMetric.reset, "e7c9b010da09", RESULTS),
    (_Sync._generate_sync_fn, "d2da37f641bd", "step_results.reduce_over_ranks"),
    (LightningModule.log, "5f0ef1d9e6a0", "step_results.numbers_logged_as_tensors and StepResults.log"),
]


class _Plain(ast.NodeTransformer):
    """Takes away what does not change what a function does, and f-strings, whose quotes Python versions choose."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        texts = [part.value if isinstance(part, ast.Constant) else ast.unparse(part.value) for part in node.values]  # type: ignore[attr-defined]
        return ast.Constant("|".join(texts))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def fingerprint(function: Callable[..., Any]) -> str:
    """Return what changes with a function's code, and not with its comments, annotations or docstring."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    # Unparsed and not dumped: a dump differs between versions of Python.
    return hashlib.sha256(ast.unparse(ast.fix_missing_locations(_Plain().visit(tree))).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("function", "expected", "stands"), STOOD_ON, ids=lambda value: getattr(value, "__qualname__", "")
)
def test_what_lightning_does_is_what_it_did(function: Callable[..., Any], expected: str, stands: str) -> None:
    found = fingerprint(function)
    assert found == expected, (
        f"Lightning {pl.__version__} has another {function.__qualname__} than the one that this was written against. "
        f"Look again at {stands}; then its fingerprint is {found}."
    )


def test_progress_is_kept_in_the_fields_that_are_counted() -> None:
    tracker = {"ready": 0, "completed": 0}
    started = {**tracker, "started": 0}
    assert _OptimizationProgress().state_dict() == {
        "optimizer": {
            "step": {"total": tracker, "current": tracker},
            "zero_grad": {"total": started, "current": started},
        }
    }, "look again at DelegatedOptimization.progress_kept and count"


def test_ddp_notes_on_the_host_whether_to_take_over_buffers() -> None:
    noted = inspect.getsource(DistributedDataParallel._post_forward)
    asked = inspect.getsource(DistributedDataParallel.will_sync_module_buffers)
    assert noted.count("self.require_forward_param_sync = ") == 2
    assert "self.require_forward_param_sync" in asked, "look again at DelegatedOptimization._have_ddp_sync_buffers"


def test_a_loop_saves_every_loop_among_its_attributes() -> None:
    """So that the replaced one must not be one."""
    delegated = DelegatedOptimization(pl.Trainer(accelerator="cpu", logger=False), lambda *_: {})
    assert not [value for value in vars(delegated).values() if isinstance(value, _AutomaticOptimization)]


class WithoutLength:
    def __init__(self, made: Batches) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


class Decides(Small):
    """Has one batch more in each epoch, and compares what is foreseen with what Lightning does."""

    def __init__(self, has_length: bool) -> None:
        super().__init__()
        self.has_length, self.zeroed, self.compared = has_length, 0, 0
        self.foreseen: Window | None = None

    def train_dataloader(self) -> Any:
        made = batches(self.trainer.current_epoch + 1)
        return made if self.has_length else WithoutLength(made)

    def on_train_start(self) -> None:
        self.optimization = DelegatedOptimization(self.trainer, self.compare)

    def on_train_end(self) -> None:
        self.optimization.put_back()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        loop: Any = self.trainer.fit_loop
        self.foreseen = self.optimization.next_window(
            loop.epoch_loop.batch_progress.current.ready, loop._data_fetcher.done
        )
        return batch

    def optimizer_zero_grad(self, *arguments: Any) -> None:
        super().optimizer_zero_grad(*arguments)
        self.zeroed += 1

    def compare(self, batch_idx: int, arguments: OrderedDict[str, Any]) -> dict[str, Any]:
        optimization, progress = self.optimization, self.optimization.optim_progress
        window = optimization.window(batch_idx)
        assert window == self.foreseen
        before, zeroed, steps = copy.deepcopy(progress.state_dict()), self.zeroed, self.trainer.global_step
        with optimization.progress_kept():
            outputs = optimization.run_plain(batch_idx, arguments)
            after = copy.deepcopy(progress.state_dict())
            assert window == (
                self.trainer.accumulate_grad_batches,
                self.zeroed > zeroed,
                self.trainer.global_step > steps,
            )
        assert progress.state_dict() == before
        optimization.count(window, stepped=window.steps)
        assert progress.state_dict() == after
        self.compared += 1
        return outputs


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 4}], ids=str)
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_windows_are_lightnings_own(accumulate: int, has_length: bool, options: dict[str, Any]) -> None:
    module = Decides(has_length)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=9,
        enable_model_summary=False, reload_dataloaders_every_n_epochs=1, accumulate_grad_batches=accumulate, **options,
    )  # fmt: skip
    trainer.fit(module)
    counts = [min(epoch, 4) if options else epoch for epoch in range(1, 10)]
    assert module.compared == sum(counts)
    if has_length or not options:  # of a stream that ends before the limit Lightning does not see the last batch
        assert trainer.global_step == sum(math.ceil(count / accumulate) for count in counts)


class InParts(pl.Callback):
    """Does each step in two parts, as one whose optimizer is left outside of the graph."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.optimization = DelegatedOptimization(trainer, self.run)

    def run(self, batch_idx: int, arguments: OrderedDict[str, Any]) -> dict[str, Any]:
        outputs = self.optimization.forward_and_backward(batch_idx, arguments)
        if self.optimization.window(batch_idx).steps:
            self.optimization.step_optimizer(batch_idx, outputs["loss"])
        return outputs

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.optimization.put_back()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_in_two_parts_is_the_whole_step(accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    ours, plain = same_start(Small)
    mine = fit(ours, batches(10), callbacks=[InParts()], **options)
    expected = fit(plain, batches(10), **options)
    assert_same_state(mine, expected)
    assert mine.global_step == expected.global_step
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    loop = mine.fit_loop.epoch_loop
    assert type(loop.automatic_optimization) is _AutomaticOptimization
    assert type(loop._results) is _ResultCollection
