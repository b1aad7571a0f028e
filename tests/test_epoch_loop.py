"""The reach into Lightning's training loop: these fail when what it stands on changes, and say what to look at again.

`fasttrain.epoch_loop`, `fasttrain.short_path` and `fasttrain.step_results` do what parts of Lightning's loop do. A part
whose code changed may do more now: read it, take over what is new, then put the new fingerprint here.
"""

import ast
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
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric, _Sync
from torch.nn.parallel import DistributedDataParallel

from fasttrain.epoch_loop import DelegatedOptimization, Window

OPTIMIZATION = "DelegatedOptimization, which splits it into forward_and_backward, step_optimizer and count"
PATH = "ShortPath.advance, which does the same without what nobody asks for"
READS = "ShortPath.advance, which reads values when this one would show or lose them"
RESULTS = "StepResults, which does the same for what a replay left on the device"

STOOD_ON: dict[str, tuple[Callable[..., Any], str, str]] = {
    name: (function, fingerprint, stands)
    for function, name, fingerprint, stands in [
        (_AutomaticOptimization.run, "run", "6ea2f4734e72", OPTIMIZATION),
        (_AutomaticOptimization._make_closure, "_make_closure", "4c4473c04022", OPTIMIZATION),
        (_AutomaticOptimization._make_zero_grad_fn, "_make_zero_grad_fn", "061f920ec07e", OPTIMIZATION),
        (_AutomaticOptimization._optimizer_step, "_optimizer_step", "e2afaf8d7907", OPTIMIZATION),
        (_AutomaticOptimization._on_before_zero_grad, "_on_before_zero_grad", "751ef789a69a", OPTIMIZATION),
        (_AutomaticOptimization._optimizer_zero_grad, "_optimizer_zero_grad", "dba35cc28a32", OPTIMIZATION),
        (_AutomaticOptimization._training_step, "_training_step", "21538227cca1", OPTIMIZATION),
        (ClosureResult.asdict, "ClosureResult.asdict", "0e6b285ed0c6", OPTIMIZATION),
        (_block_parallel_sync_behavior, "_block_parallel_sync_behavior", "e4860466147b", OPTIMIZATION),
        (_TrainingEpochLoop.advance, "advance", "652cf8f592a6", PATH),
        (_TrainingEpochLoop._broadcast_sigterm_tensor, "_broadcast_sigterm_tensor", "f2111dcfb613", PATH),
        (_TrainingEpochLoop._build_kwargs, "_build_kwargs", "ef10371fff22", PATH),
        (
            _TrainingEpochLoop._should_accumulate,
            "_should_accumulate",
            "31bcdde13183",
            "DelegatedOptimization.next_window",
        ),
        (_TrainingEpochLoop._num_ready_batches_reached, "_num_ready_batches_reached", "f63510695d44", PATH),
        (_TrainingEpochLoop.update_lr_schedulers, "update_lr_schedulers", "77bb2decba2b", PATH),
        (_TrainingEpochLoop.on_advance_end, "on_advance_end", "cc589ca888e9", READS),
        (_TrainingEpochLoop._should_check_val_fx, "_should_check_val_fx", "6a5d9405dc6b", READS),
        (
            _DataFetcher.__next__,
            "_DataFetcher.__next__",
            "66c9207654dc",
            "ShortPath.advance, which asks `done` what is last",
        ),
        (
            _PrefetchDataFetcher.__next__,
            "_PrefetchDataFetcher.__next__",
            "56ed0726b6f4",
            "ShortPath.advance, which asks `done`",
        ),
        (call._call_callback_hooks, "_call_callback_hooks", "e0802a5ebf2f", PATH),
        (call._call_lightning_module_hook, "_call_lightning_module_hook", "dad6084b6f05", PATH),
        (Strategy.batch_to_device, "Strategy.batch_to_device", "072533b1ef61", "short_path.transfer_is_plain"),
        (_LoggerConnector.on_batch_start, "on_batch_start", "a8f50674c358", READS),
        (_LoggerConnector.on_batch_end, "on_batch_end", "c34078075c27", READS),
        (_LoggerConnector.update_train_step_metrics, "update_train_step_metrics", "c2edca18347f", READS),
        (_LoggerConnector.should_reset_tensors, "should_reset_tensors", "5a71c443e792", "StepResults.before_replay"),
        (_ResultCollection.log, "_ResultCollection.log", "edd8a4a31345", RESULTS),
        (_ResultCollection.metrics, "_ResultCollection.metrics", "e038f0c90921", RESULTS),
        (_ResultCollection.reset, "_ResultCollection.reset", "7b1f2cb5f360", RESULTS),
        (_ResultCollection._extract_batch_size, "_extract_batch_size", "a15e75b10a2d", RESULTS),
        (_ResultCollection._get_cache, "_get_cache", "3657a01791c2", RESULTS),
        (_ResultMetric.update, "_ResultMetric.update", "c165edbaa9ca", RESULTS),
        (_ResultMetric.compute, "_ResultMetric.compute", "66e273a9ce95", RESULTS),
        (_ResultMetric.reset, "_ResultMetric.reset", "e7c9b010da09", RESULTS),
        (_Sync._generate_sync_fn, "_Sync._generate_sync_fn", "d2da37f641bd", "step_results.reduce_over_ranks"),
        (
            LightningModule.log,
            "LightningModule.log",
            "fcf988e57d98",
            "step_results.numbers_logged_as_tensors and StepResults.log",
        ),
    ]
}


def fingerprint(function: Callable[..., Any]) -> str:
    """Return what changes with a function's code, and not with its comments, annotations or docstring."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
                if argument is not None:
                    argument.annotation = None
    # Unparsed and not dumped: a dump differs between versions of Python.
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", STOOD_ON)
def test_what_lightning_does_is_what_it_did(name: str) -> None:
    function, expected, stands = STOOD_ON[name]
    found = fingerprint(function)
    assert found == expected, (
        f"Lightning {pl.__version__} has another {function.__qualname__} than the one that this was written against. "
        f"Look again at {stands}; then its fingerprint is {found}."
    )
