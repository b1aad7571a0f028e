"""A step's code is read for what a captured step would freeze, and for what a replay would leave out."""

import datetime
import functools
import inspect
import json
import logging
import random
import sys
import time
from collections import deque
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.cuda_graph_step.frozen_reads import frozen_reads, host_effects

log = logging.getLogger(__name__)
STEPS = 0
USED_BY_EXPRESSIONS = (datetime, json, sys, time, np, clock, rank_zero_info, checkpoint)


class Lit(pl.LightningModule):
    """The usual module; tests change one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)
        self.scale = 1.0
        self.history: list[Tensor] = []
        self.save_hyperparameters({"weight": 0.5})

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss


def line(thing: Any, text: str = "# <-") -> int:
    """Return the number of the line in `thing`'s source that holds `text`."""
    source, first = inspect.getsourcelines(thing)
    (offset,) = [offset for offset, each in enumerate(source) if text in each]
    return first + offset


def step_of(body: Any, base: type[Lit] = Lit, parameters: str = "self, batch, batch_idx", **attributes: Any) -> Any:
    """Return `training_step` of a module that runs in it a function, or an expression."""
    function = eval(f"lambda {parameters}: {body}", globals()) if isinstance(body, str) else body
    module = type("Given", (base,), {"training_step": function})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module.training_step


def reads(body: Any, **given: Any) -> list[str]:
    step = step_of(body, **given)
    return [read.name for read in frozen_reads(step, step.__self__)]


def effects(body: Any, **given: Any) -> list[str]:
    step = step_of(body, **given)
    return [effect.name for effect in host_effects(step, step.__self__)]


def only(found: Any) -> Any:
    """Return the one finding, which is in this file."""
    (finding,) = found
    assert finding.file == __file__
    return finding


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
    assert (read.name, read.line) == ("batch_idx", line(Warm))
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
    assert reads(body) == ["batch_idx"]


def test_it_counts_by_position_whatever_its_name() -> None:
    assert reads("batch * number", parameters="self, batch, number") == ["number"]
    assert reads("args[0] * args[1]", parameters="self, *args") == ["batch_idx"]
    assert reads("batch * 2", parameters="self, batch") == []


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
    assert reads(body) == found


def test_star_arguments_are_passed_on_too() -> None:
    assert reads("multiplies(*args, **kwargs)", parameters="self, *args, **kwargs") == ["by"]
    assert reads("ignores(*args, **kwargs)", parameters="self, *args, **kwargs") == []


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
    assert reads(f"batch * {name}", generator=np.random.default_rng(0), dice=random.Random(0)) == [name]


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
    assert reads(body, stream=count()) == [name]


def test_a_trainer_by_another_name_is_the_same() -> None:
    def body(self: Any, batch: Any, batch_idx: int) -> Any:
        trainer, factor = self.trainer, 2
        if trainer.current_epoch > factor:
            return batch
        return batch * 2

    assert reads(body) == ["self.trainer.current_epoch"]


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
    step = step_of(body, stream=count())
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
    assert reads(body) == []
    assert effects(body) == []


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
    assert effects(body, table={"loss": []}, queue=deque(), folder=Path("folder")) == [name]


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

    assert effects(body, table={}) == [
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
    assert effects(body, **tensors, error=torchmetrics.MeanSquaredError(), errors=errors, last=None) == []


def test_what_a_callback_keeps_is_not() -> None:
    class Keeps(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.loss = loss
            pl_module.seen = 1

    found = host_effects(Keeps().on_before_backward, Keeps())
    assert [effect.name for effect in found] == ["self.loss", "pl_module.seen"]


# Where the walk goes


def speaks(x: Any, *args: Any, **kwargs: Any) -> Any:
    print(x)
    return x


def through(decorated: Any) -> Any:
    @functools.wraps(decorated)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return decorated(self, *args, **kwargs)

    return wrapper


class Talks(nn.Module):
    """A part of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return speaks(x)


class Multiply(torch.autograd.Function):
    """An operation of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return speaks(grad)


class Meter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.total = 0.0

    def __call__(self, x: float) -> None:
        self.total += x


class Ways(Lit):
    """Has many ways to a function that prints."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Talks()
        self.parts = nn.ModuleList([nn.ReLU(), Talks()])
        self.named = nn.ModuleDict({"a": Talks()})
        self.plain = [Talks()]
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Talks()))
        self.meter = Meter()
        self.loss = partial(speaks, 1)
        self.own_function = speaks

    @property
    def loud(self) -> Any:
        return speaks(1)

    @functools.cached_property
    def loud_once(self) -> Any:
        return speaks(1)

    @staticmethod
    def static(x: Any) -> Any:
        return speaks(x)

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return cls.static(x)

    def method(self, x: Any) -> Any:
        return speaks(x)

    @through
    def decorated(self, x: Any) -> Any:
        return self.method(x)

    @torch.no_grad()
    def decorated_by_library(self, x: Any) -> Any:
        return self.method(x)

    @rank_zero_only
    def on_first_rank(self, x: Any) -> Any:
        return self.method(x)


@pytest.mark.parametrize(
    "body",
    [
        "speaks(batch)",
        "self.method(batch)",
        "self.static(batch)",
        "self.of_class(batch)",
        "self.decorated(batch)",
        "self.decorated_by_library(batch)",
        "self.on_first_rank(batch)",
        "self.loss(batch)",
        "self.own_function(batch)",
        "self.loud",
        "self.loud_once",
        "self.part(batch)",
        "self.part.forward(batch)",
        "self.net(batch)",
        "self.named['a'](batch)",
        "self.parts[1](batch)",
        "[part(batch) for part in self.parts]",
        "[part(batch) for part in self.plain]",
        "[part(batch) for part in self.named.values()]",
        "[part(batch) for _, part in enumerate(self.parts)]",
        "checkpoint(self.part, batch)",
        "checkpoint(self.method, batch)",
        "Multiply.apply(batch)",
        "list(map(speaks, batch))",
        "[speaks(x) for x in batch]",
        "(lambda x: speaks(x))(batch)",
    ],
)
def test_the_walk_follows_calls_into_the_users_code(body: str) -> None:
    step = step_of(body, Ways)
    effect = only(host_effects(step, step.__self__))
    assert effect.sentence == (
        f"speaks calls print() (test_frozen_reads.py:{line(speaks, 'print')}), which a replay would not do again; do "
        "it in on_train_batch_end"
    )


def test_an_object_of_the_users_is_entered() -> None:
    assert effects("self.meter(batch)", base=Ways) == ["self.meter.total"]
    assert effects("Meter()(batch)", base=Ways) == [], "a new object is gone after the step"


def test_hooks_of_modules_are_entered() -> None:
    module = Lit()
    seen: list[Any] = []
    module.model.register_forward_hook(lambda part, inputs, output: seen.append(output))
    assert only(host_effects(module.training_step, module)).name == "seen.append()"


def test_recursion_ends() -> None:
    class Around(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.other(batch) + self.global_step

        def other(self, batch: Any) -> Any:
            return self.training_step(batch, 0) if batch else self.other(batch)

    assert only(frozen_reads(Around().training_step, Around())).name == "self.global_step"


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_library_code_is_not_entered(name: str) -> None:
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        model = getattr(models, name)()
    assert reads("self.model(batch[0])", model=model) == []
    assert effects("self.model(batch[0])", model=model) == []


def test_nothing_is_run_by_looking() -> None:
    class Careful(Lit):
        @property
        def explosive(self) -> int:
            raise AssertionError("it was run")

        def __getattr__(self, name: str) -> Any:
            assert name != "made_up", "it was run"
            return super().__getattr__(name)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return batch + self.explosive + self.made_up

    module = Careful()
    assert frozen_reads(module.training_step, module) == []


class Shared(Lit):
    """Uses one function for training and validation."""

    def step(self, batch: Any, batch_idx: int, stage: str = "train", quiet: bool = True) -> Any:
        if stage == "val" and batch_idx < 10:
            print(batch_idx)
        if not quiet:
            self.history.append(batch)
        if stage in ("val", "test"):
            for _ in batch:
                self.scale = 0
        else:
            batch = 2 * batch
        mode = "on" if batch is None else "off"
        if (mode if batch else "on") == "on":
            self.table = []
        if stage == "train" and quiet:
            return batch
        self.late = True
        return batch if stage is None else batch * 2

    def loops(self, batch: Any, first: bool = True) -> Any:
        for _ in batch:
            if first:
                first = False
            else:
                self.scale = 0
        return batch


@pytest.mark.parametrize(
    ("body", "read", "done"),
    [
        ("self.step(batch, batch_idx)", [], ["table"]),
        ("self.step(batch, batch_idx, 'train')", [], ["table"]),
        ("self.step(batch, batch_idx, 'train', quiet=False)", [], ["history.append()", "table", "late"]),
        ("self.step(batch, batch_idx, 'val')", ["batch_idx"], ["print()", "scale", "table", "late"]),
        ("self.step(batch, batch_idx, 'test')", [], ["scale", "table", "late"]),
        ("self.step(batch, batch_idx, self.name, True)", ["batch_idx"], ["print()", "scale", "table", "late"]),
        ("self.step(*batch)", [], ["print()", "history.append()", "scale", "table", "late"]),
        ("self.loops(batch)", [], ["scale"]),
    ],
)
def test_a_branch_that_a_literal_argument_excludes_is_left_out(body: str, read: list[str], done: list[str]) -> None:
    assert sorted(set(reads(body, base=Shared, name="val"))) == read
    assert [name.removeprefix("self.") for name in effects(body, base=Shared, name="val")] == done


def test_blocks_branches_and_handlers_lose_nothing() -> None:
    def body(self: Any, batch: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu"), torch.no_grad():
            for _, x in enumerate(batch):
                try:
                    batch = multiplies(x, batch_idx if self.training else 0)
                except ValueError as error:
                    print(error)
                finally:
                    batch = batch + 1
        while batch.sum() > 3 and not batch.any():
            batch = batch - 1
        return [self.global_step for _ in batch if batch is not None]

    assert reads(body) == ["by", "self.global_step"]
    assert effects(body) == ["print()"]
