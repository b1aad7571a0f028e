"""A step's code is read for what a captured step would freeze, and for what a replay would leave out."""

import datetime
import json
import logging
import random
import sys
import time
from collections import deque
from itertools import count
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from inspected_steps import Inspected, Lit, line, only
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.cuda_graph_step.inspection.frozen_reads import frozen_reads, host_effects

log = logging.getLogger(__name__)
STEPS = 0
USED_BY_EXPRESSIONS = (datetime, json, sys, time, np, clock, rank_zero_info, checkpoint)
inspected = Inspected(globals())


# The argument that counts batches


def test_the_usual_step_is_clean() -> None:
    module = Lit()
    assert frozen_reads(module.training_step, module) == []
    assert host_effects(module.training_step, module) == []


def test_a_use_of_batch_idx_is_named_with_its_line_and_a_cure() -> None:
    class Warm(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * min(1.0, batch_idx / 100)  # <-

    read = only(frozen_reads(Warm().training_step, Warm()))
    assert (read.name, read.file, read.line) == ("batch_idx", __file__, line(Warm))
    assert read.sentence == (
        f"Warm.training_step uses its argument batch_idx (test_frozen_reads.py:{line(Warm)}), which changes from step "
        "to step while a replay keeps the captured value; fill a tensor in place in on_train_batch_start and read that"
    )


@pytest.mark.parametrize(
    "body",
    [
        "{'loss': batch, 'index': batch_idx}",
        "f'{batch_idx:03d}'",
        "batch if batch_idx else 0",
        "batch[batch_idx]",
        "self.model(batch)[: batch_idx + 1]",
        "[x + batch_idx for x in batch]",
        "(lambda x: x + batch_idx)(batch)",
        "(lambda x, shift=batch_idx: x + shift)(batch)",
        "self.log('index', batch_idx)",
        "self.model(batch, batch_idx)",
        "torch.full((2,), float(batch_idx))",
        "checkpoint(self.model, batch, batch_idx if self.training else 0)",
    ],
)
def test_every_use_of_batch_idx_counts(body: str) -> None:
    assert inspected.reads(body) == ["batch_idx"]


def test_it_counts_by_position_whatever_its_name() -> None:
    assert inspected.reads("batch * number", parameters="self, batch, number") == ["number"]
    assert inspected.reads("args[0] * args[1]", parameters="self, *args") == ["batch_idx"]
    assert inspected.reads("batch * 2", parameters="self, batch") == []


def ignores(batch: Any, batch_idx: int, stage: str = "") -> Any:
    return batch


def multiplies(batch: Any, by: int, stage: str = "") -> Any:
    return batch * by


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("ignores(batch, batch_idx)", []),
        ("ignores(batch, stage='train', batch_idx=batch_idx)", []),
        ("ignores(*(batch, batch_idx), **{'stage': 'train'})", []),
        ("multiplies(batch, batch_idx)", ["by"]),
        ("multiplies(batch, stage='train', by=batch_idx)", ["by"]),
        ("multiplies(*[batch, batch_idx], **{'stage': 'train'})", ["by"]),
        ("multiplies(*[batch, 2], **{'stage': str(batch_idx)})", ["batch_idx"]),
        ("batch if batch_idx is None else batch * 2", []),
        ("Lit.training_step(self, batch, batch_idx)", []),
        ("super(Lit, self).training_step(batch, batch_idx)", []),
    ],
)
def test_passed_on_it_counts_only_where_it_is_used(body: str, found: list[str]) -> None:
    assert inspected.reads(body) == found


def test_star_arguments_are_passed_on_too() -> None:
    assert inspected.reads("multiplies(*args, **kwargs)", parameters="self, *args, **kwargs") == ["by"]
    assert inspected.reads("ignores(*args, **kwargs)", parameters="self, *args, **kwargs") == []


def test_passed_to_super_it_counts_only_if_the_parent_uses_it() -> None:
    class Parent(Lit):
        def training_step(self, batch: Any, index: int) -> Any:
            return batch * index  # <-

    class Child(Parent):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, index=batch_idx)

    class Other(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx=batch_idx)

    read = only(frozen_reads(Child().training_step, Child()))
    assert (read.name, read.line) == ("index", line(Parent))
    assert read.sentence.startswith("Parent.training_step uses its argument index (")
    assert frozen_reads(Other().training_step, Other()) == []


def test_lightnings_own_hooks_make_no_use_of_what_they_are_given() -> None:
    class Hooks(Lit):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            pl.LightningModule.optimizer_zero_grad(self, epoch, batch_idx, optimizer)

    class Late(Lit):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if epoch > 3:
                optimizer.step(closure=optimizer_closure)

    assert frozen_reads(Hooks().optimizer_step, Hooks()) == []
    assert frozen_reads(Hooks().optimizer_zero_grad, Hooks()) == []
    assert [read.name for read in frozen_reads(Late().optimizer_step, Late())] == ["epoch"]


# What else changes from step to step


@pytest.mark.parametrize(
    "name",
    [
        "self.global_step",
        "self.current_epoch",
        "self.trainer.global_step",
        "self.trainer.current_epoch",
        "self.trainer.is_last_batch",
        "self.trainer.callback_metrics",
        "self.trainer.fit_loop.epoch_loop.batch_idx",
        "self.trainer.fit_loop.epoch_loop._batches_that_stepped",
        "time.time()",
        "time.perf_counter_ns()",
        "clock()",
        "datetime.datetime.now()",
        "random.random()",
        "np.random.rand()",
        "np.random.default_rng()",
        "self.generator.random()",
        "self.dice.random()",
        "torch.cuda.memory_allocated()",
    ],
)
def test_what_changes_from_step_to_step_is_found(name: str) -> None:
    assert inspected.reads(f"batch * {name}", generator=np.random.default_rng(0), dice=random.Random(0)) == [name]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("getattr(self, 'global_step')", "self.global_step"),
        ("next(self.stream)", "self.stream"),
        ("self.lr_schedulers().get_last_lr()[0]", "get_last_lr"),
        ("random.choice([1, 2])", "random.choice()"),
        ("[batch for trainer in [self.trainer] if self.trainer.should_stop]", "self.trainer.should_stop"),
    ],
)
def test_less_direct_reads_are_found(body: str, name: str) -> None:
    assert inspected.reads(body, stream=count()) == [name]


def test_a_trainer_by_another_name_is_the_same() -> None:
    def body(self: Any, batch: Any, batch_idx: int) -> Any:
        trainer, factor = self.trainer, 2
        if trainer.current_epoch > factor:
            return batch
        return batch * 2

    assert inspected.reads(body) == ["self.trainer.current_epoch"]


@pytest.mark.parametrize(
    ("body", "start", "end"),
    [
        ("time.time()", "reads the clock by time.time() (", "measure from on_train_batch_start to on_train_batch_end"),
        ("random.random()", "draws on the host by random.random() (", "self.device)) or in the loader"),
        ("next(self.stream)", "takes the next item of self.stream (", "let the training loader return it"),
        (
            "self.global_step",
            "reads self.global_step (",
            "fill a tensor in place in on_train_batch_start and read that",
        ),
    ],
)
def test_each_kind_has_its_words(body: str, start: str, end: str) -> None:
    step = inspected.step(body, stream=count())
    (read,) = frozen_reads(step, step.__self__)
    assert read.sentence.split(" ", 1)[1].startswith(start)
    assert read.sentence.endswith(end)


@pytest.mark.parametrize(
    "body",
    [
        "batch.to(self.device, self.dtype)",
        "batch * self.trainer.world_size * self.trainer.num_training_batches",
        "batch * self.trainer.max_epochs * self.trainer.estimated_stepping_batches",
        "batch * self.trainer.accumulate_grad_batches + self.trainer.fit_loop.max_batches",
        "batch * self.hparams.weight + self.hparams['weight']",
        "batch if self.trainer.is_global_zero and self.training and self.global_rank == 0 else 0",
        "batch * self.scale + torch.rand(2, device=self.device)",
        "next(self.parameters()).device",
        "next(iter(batch))",
        "self.optimizers().param_groups[0]['lr']",
        "multiplies(batch, 2) + len(json.dumps({})) + sys.maxsize",
        "datetime.timedelta(1)",
        "self.log('loss', batch) or self.log_dict({'loss': batch})",
    ],
)
def test_what_stays_the_same_is_no_finding(body: str) -> None:
    assert inspected.reads(body) == []
    assert inspected.effects(body) == []


# Effects on the host


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("print(batch)", "print()"),
        ("self.print(batch)", "self.print()"),
        ("log.info('x')", "log.info()"),
        ("logging.warning('x')", "logging.warning()"),
        ("rank_zero_info('x')", "rank_zero_info()"),
        ("open('file').read()", "open()"),
        ("sys.stdout.write('x')", "sys.stdout.write()"),
        ("torch.save(batch, 'file')", "torch.save()"),
        ("json.dump({}, batch)", "json.dump()"),
        ("np.save('file', batch)", "np.save()"),
        ("self.folder.mkdir()", "self.folder.mkdir()"),
        ("self.history.append(batch)", "self.history.append()"),
        ("self.table['loss'].append(batch)", "self.table['loss'].append()"),
        ("self.table[batch].append(batch)", "self.table[...].append()"),
        ("self.table.update(loss=batch)", "self.table.update()"),
        ("self.queue.popleft()", "self.queue.popleft()"),
        ("self.made_later.append(batch)", "self.made_later.append()"),
        ("setattr(self, 'scale', 2.0)", "self.scale"),
        ("self.logger.experiment.add_scalar('x', 1)", "self.logger.experiment"),
        ("self.logger.log_metrics({'x': batch})", "self.logger.log_metrics"),
        ("[each.log_metrics({}) for each in self.loggers]", "log_metrics"),
        ("self.trainer.logger.experiment", "self.trainer.logger.experiment"),
        ("self.trainer.save_checkpoint('file')", "self.trainer.save_checkpoint()"),
    ],
)
def test_what_a_replay_would_not_do_again_is_found(body: str, name: str) -> None:
    assert inspected.effects(body, table={"loss": []}, queue=deque(), folder=Path("folder")) == [name]


def test_what_is_set_on_the_host_is_named_with_its_line() -> None:
    class Counts(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.scale += 1  # <-
            return super().training_step(batch, batch_idx)

    effect = only(host_effects(Counts().training_step, Counts()))
    assert (effect.name, effect.line) == ("self.scale", line(Counts))
    assert effect.sentence == (
        f"Counts.training_step sets self.scale (test_frozen_reads.py:{line(Counts)}), which a replay would not do "
        "again; keep it in a tensor that changes in place (register_buffer), or set it in on_train_batch_end"
    )


def test_more_ways_to_set() -> None:
    def body(self: Any, batch: Any, batch_idx: int) -> Any:
        global STEPS
        STEPS = 1
        self.scale = 2.0
        self.flag = True
        self.table["step"] = batch
        self.trainer.should_stop = True
        self.model.extra = []
        del self.history[0]
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1
        local: dict[str, Any] = {}
        local["loss"] = batch
        batch.mark = 1
        return batch

    assert inspected.effects(body, table={}) == [
        "the global STEPS", "self.scale", "self.flag", "self.table['step']", "self.trainer.should_stop",
        "self.model.extra", "self.history[0]", "an optimizer's 'lr'",
    ]  # fmt: skip


def test_tensors_on_the_module_and_metrics_are_served_by_the_room() -> None:
    def body(self: Any, batch: Any, batch_idx: int) -> Any:
        self.mean *= 0.9
        self.mean += batch.mean()
        self.average = 0.9 * self.average + 0.1 * batch.mean()
        self.table[0] = batch.mean()
        self.last = batch.mean()
        self.model.weight.grad = None
        self.model.weight.requires_grad_(True)
        self.error(batch, batch)
        self.error.update(batch, batch)
        self.errors["a"].update(batch, batch)
        self.log("error", self.error)
        return batch

    errors = nn.ModuleDict({"a": torchmetrics.MeanSquaredError()})
    tensors = {"average": torch.zeros(()), "mean": torch.zeros(()), "table": torch.zeros(3)}
    assert inspected.effects(body, **tensors, error=torchmetrics.MeanSquaredError(), errors=errors, last=None) == []


def test_what_a_callback_keeps_is_not() -> None:
    class Keeps(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.loss = loss
            pl_module.seen = 1

    found = host_effects(Keeps().on_before_backward, Keeps())
    assert [effect.name for effect in found] == ["self.loss", "pl_module.seen"]
