"""Inspection follows a step into the user's own code, enters no library's, and runs nothing."""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from inspected_steps import Inspected, Lit, line, only
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.conv_bias_relu.sites import ConvBiasReLUPatches
from fasttrain.callbacks.cuda_graph_step.inspection.frozen_reads import frozen_reads, host_effects
from fasttrain.callbacks.cuda_graph_step.inspection.user_code import is_installed
from fasttrain.patches import PatchSurgery

USED_BY_EXPRESSIONS = (checkpoint,)
inspected = Inspected(globals())


def multiplies(batch: Any, by: int) -> Any:
    return batch * by


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
        self.stored = self.method
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

    @functools.lru_cache  # noqa: B019
    def decorated_by_cache(self, x: Any) -> Any:
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
        "self.decorated_by_cache(batch)",
        "self.on_first_rank(batch)",
        "self.stored(batch)",
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
    step = inspected.step(body, Ways)
    effect = only(host_effects(step, step.__self__))
    assert effect.sentence == (
        f"speaks calls print() (test_inspection.py:{line(speaks, 'print')}), which a replay would not do again; do "
        "it in on_train_batch_end"
    )


def test_arguments_given_beforehand_come_first() -> None:
    assert inspected.reads("self.times(batch_idx)", times=partial(multiplies, 2)) == ["by"]
    assert inspected.reads("self.times(batch_idx)", times=partial(multiplies, by=2)) == ["batch"]
    assert inspected.reads("self.times(batch)", times=partial(multiplies, by=2)) == []


def test_a_compiled_module_is_looked_through() -> None:
    compiled = torch.compile(Lit())._orig_mod
    compiled.training_step = torch.compile(type(compiled).training_step.__get__(compiled))
    assert frozen_reads(compiled.training_step, compiled) == []
    step = inspected.step("print(batch) or batch_idx")
    module = step.__self__
    module.training_step = torch.compile(step)
    assert [read.name for read in frozen_reads(module.training_step, module)] == ["batch_idx"]
    assert [effect.name for effect in host_effects(module.training_step, module)] == ["print()"]


def test_an_object_of_the_users_is_entered() -> None:
    assert inspected.effects("self.meter(batch)", base=Ways) == ["self.meter.total"]
    assert inspected.effects("Meter()(batch)", base=Ways) == [], "a new object is gone after the step"


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
    assert inspected.reads("self.model(batch[0])", model=model) == []
    assert inspected.effects("self.model(batch[0])", model=model) == []


def test_a_rooms_modules_are_not_entered() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    PatchSurgery(model, ConvBiasReLUPatches()).apply()
    assert type(model[0]).__module__.startswith("fasttrain.callbacks.")
    assert inspected.reads("self.model(batch[0])", model=model) == []
    assert inspected.effects("self.model(batch[0])", model=model) == []


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
    assert sorted(set(inspected.reads(body, base=Shared, name="val"))) == read
    assert [name.removeprefix("self.") for name in inspected.effects(body, base=Shared, name="val")] == done


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

    assert inspected.reads(body) == ["by", "self.global_step"]
    assert inspected.effects(body) == ["print()"]


def test_a_folder_that_pip_installed_into_is_no_users_code(tmp_path: Path) -> None:
    (tmp_path / "target" / "package").mkdir(parents=True)
    (tmp_path / "target" / "package-1.0.dist-info").mkdir()
    (tmp_path / "mine").mkdir()
    assert is_installed(str(tmp_path / "target" / "package" / "models.py"))
    assert not is_installed(str(tmp_path / "mine" / "models.py"))
