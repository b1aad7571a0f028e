"""What code names, and which of it a captured step freezes or a replay leaves out: tables, and functions on them.

Lightning's own names are those of 2.6.
"""

import builtins
import datetime
import io
import random
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import PurePath
from types import ModuleType
from typing import Any, Final, Literal

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from fasttrain.callbacks.cuda_graph_step.inspection.reader import UNKNOWN
from fasttrain.callbacks.cuda_graph_step.inspection.user_code import ABSENT


class Role(Enum):
    """What a value is to Lightning."""

    OBJECT = auto()
    MODULE = auto()
    """The Lightning module."""
    TRAINER = auto()
    LOOP = auto()
    """The trainer's fit loop, or a part of it."""
    LOGGER = auto()
    STEP = auto()
    """A Python number that is another one in each step, as `batch_idx` is."""
    PARENT = auto()
    """`super()`."""
    TOLD = auto()
    """Comes from something that has been reported."""


@dataclass(frozen=True, eq=False)
class Ref:
    """A value that outlives the step, by the path on which the code reaches it: `self.history.append`."""

    path: str
    thing: Any = ABSENT
    """The object, if it is there when the code is looked at."""
    role: Role = Role.OBJECT
    owner: "Ref | None" = None
    """What it is an attribute of."""
    bound: bool = False
    """Whether a call hands `owner` over as first argument."""

    @classmethod
    def to(cls, path: str, thing: Any, owner: "Ref | None" = None, bound: bool = False) -> "Ref":
        """Return the reference to an object in the role that its type gives it."""
        for kind, role in ((pl.LightningModule, Role.MODULE), (pl.Trainer, Role.TRAINER), (Logger, Role.LOGGER)):
            if isinstance(thing, kind):
                return cls(path, thing, role, owner, bound)
        return cls(path, thing, Role.OBJECT, owner, bound)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Rule:
    """Why something can't be captured: a sentence's parts, between which file and line go."""

    kind: Literal["read", "effect"]
    name: str
    what: str
    rest: str


CHANGING_IN_MODULE: Final = frozenset({"global_step", "current_epoch"})
CHANGING_IN_TRAINER: Final = CHANGING_IN_MODULE | {
    "callback_metrics", "is_last_batch", "logged_metrics", "progress_bar_metrics", "received_sigterm", "should_stop"
}  # fmt: skip
CONSTANT_IN_LOOP: Final = frozenset({"max_batches", "max_epochs", "max_steps", "min_epochs", "min_steps", "trainer"})
LOOPS: Final = frozenset({"automatic_optimization", "epoch_loop", "fit_loop"})
CHANGING_ANYWHERE: Final = CHANGING_IN_MODULE | {"_last_lr", "get_last_lr", "last_epoch"}
LOGGING_ANYWHERE: Final = frozenset({
    "add_figure", "add_histogram", "add_image", "add_images", "add_scalar", "add_scalars", "add_text",
    "experiment", "log_hyperparams", "log_image", "log_metrics", "log_table", "log_text", "write_bytes",
    "write_text"
})  # fmt: skip
CONTAINERS: Final = (MutableMapping, MutableSequence, MutableSet)
FILLING: Final = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "put",
    "put_nowait", "remove", "reverse", "setdefault", "sort", "update"
})  # fmt: skip
HOST_PACKAGES: Final = frozenset({
    "logging", "loguru", "matplotlib", "mlflow", "requests", "shutil", "subprocess", "tqdm", "wandb"
})  # fmt: skip
HOST_FUNCTIONS: Final = {
    "builtins": frozenset({"input", "open", "print"}),
    "io": frozenset({"open"}),
    "_io": frozenset({"open"}),
    "json": frozenset({"dump"}),
    "_pickle": frozenset({"dump"}),
    "pickle": frozenset({"dump"}),
    "numpy": frozenset({"save", "savetxt", "savez", "savez_compressed"}),
    "torch.serialization": frozenset({"save"}),
    "time": frozenset({"sleep"}),
    "os": frozenset({"makedirs", "removedirs", "renames"}),
    "posix": frozenset({"mkdir", "remove", "rename", "replace", "rmdir", "unlink"}),
    "lightning_utilities.core.rank_zero": frozenset({"rank_zero_debug", "rank_zero_info"}),
}
PATH_WRITES: Final = frozenset({"mkdir", "open", "rename", "replace", "rmdir", "touch", "unlink"})
OPTIMIZER_VALUES: Final = frozenset({"betas", "eps", "lr", "momentum", "weight_decay"})
RANDOM_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)

_KEPT = "while a replay keeps the captured value"
_NOT_AGAIN = "which a replay would not do again"


def step_value(ref: Ref) -> Rule:
    """Return the rule against using a host value that is another one in each step."""
    return Rule("read", ref.path, f"uses its argument {ref.path}", _changes(ref.path))


def attribute_rule(owner: Ref | None, path: str, name: str) -> Rule | None:
    """Return what speaks against reading `owner.name`; `owner` is None where it isn't known."""
    role = Role.OBJECT if owner is None else owner.role
    changing = {Role.MODULE: CHANGING_IN_MODULE, Role.TRAINER: CHANGING_IN_TRAINER}.get(role, frozenset[str]())
    if owner is None or owner.thing is ABSENT:
        changing |= CHANGING_ANYWHERE
    if name in changing or (role is Role.LOOP and name not in LOOPS | CONSTANT_IN_LOOP):
        return Rule("read", path, f"reads {path}", _changes(path))
    if role is Role.LOGGER:
        logs = name == "experiment" or name.startswith("log")
    else:
        logs = name in LOGGING_ANYWHERE and (owner is None or owner.thing is ABSENT)
    if logs:
        return Rule("effect", path, f"uses {path}", f", {_NOT_AGAIN}; use self.log, or do it in on_train_batch_end")
    return None


def changed_by_rule(path: str, hook: str) -> Rule:
    """Return the rule against reading a plain attribute that a hook between the steps sets."""
    rest = f", which {hook} sets, {_KEPT}; keep it in a tensor that changes in place"
    return Rule("read", path, f"reads {path}", rest)


def store_rule(path: str) -> Rule:
    """Return the rule against setting what outlives the step."""
    cure = "keep it in a tensor that changes in place (register_buffer), or set it in on_train_batch_end"
    return Rule("effect", path, f"sets {path}", f", {_NOT_AGAIN}; {cure}")


def call_rule(callee: Ref, first: Any) -> Rule | None:
    """Return what speaks against calling `callee`; `first` is its first argument's value."""
    name = f"{callee.path}()"
    if callee.thing is builtins.next:
        if not isinstance(first, Ref) or not (first.thing is ABSENT or hasattr(first.thing, "__next__")):
            return None
        rest = ", and a replay would see the captured one again; let the training loader return it"
        return Rule("read", first.path, f"takes the next item of {first.path}", rest)
    if _reads_clock(callee):
        rest = ", and a replay would not; measure from on_train_batch_start to on_train_batch_end"
        return Rule("read", name, f"reads the clock by {name}", rest)
    if _draws(callee):
        cure = "draw on the device (torch.rand(..., device=self.device)) or in the loader"
        return Rule("read", name, f"draws on the host by {name}", f", which a replay would repeat; {cure}")
    if (_home(callee) or "").startswith(("torch.cuda.memory", "psutil")):
        return Rule("read", name, f"reads {name}", f", which changes {_KEPT}; read it in on_train_batch_end")
    if _fills(callee) or _writes(callee):
        return Rule("effect", name, f"calls {name}", f", {_NOT_AGAIN}; do it in on_train_batch_end")
    return None


def role_of(owner: Ref, name: str) -> Role | None:
    """Return the role of what Lightning's own attribute `owner.name` is, if it has one."""
    match owner.role, name:
        case (Role.MODULE, "trainer") | (Role.LOOP, "trainer"):
            return Role.TRAINER
        case (Role.MODULE | Role.TRAINER, "logger" | "loggers"):
            return Role.LOGGER
        case Role.TRAINER, "lightning_module" | "model":
            return Role.MODULE
        case Role.TRAINER | Role.LOOP, _ if name in LOOPS:
            return Role.LOOP
    # A callback that keeps the trainer usually does so in `setup`, after which its code may be looked at or not.
    return Role.TRAINER if name in ("trainer", "_trainer") and owner.thing is not ABSENT else None


def is_plain(thing: Any) -> bool:
    """Whether a value is a number, a flag, a text or None: what Python code branches on and kernels take by value."""
    return thing is None or isinstance(thing, (bool, int, float, str))


def may_be_carried(owner: Ref, name: str, value: Any) -> bool:
    """Whether `owner.name = value` may set a tensor that the room itself hands on from one replay to the next.

    `value` is UNKNOWN or a Ref where the code computes it.
    """
    if isinstance(owner.thing, Tensor):
        return name != "data"
    tables = vars(owner.thing) if isinstance(owner.thing, nn.Module) else None
    computed = value is UNKNOWN or (isinstance(value, Ref) and not is_plain(value.thing))
    if tables is None or not computed:
        return False
    places = (tables.get("_buffers", {}), tables.get("_parameters", {}), tables)
    current = next((place[name] for place in places if name in place), None)
    return current is None or isinstance(current, Tensor)


def parts(thing: Any) -> Iterator[Any]:
    """Yield the items of a plain list, tuple or dict."""
    if type(thing) in (list, tuple):
        yield from thing
    elif type(thing) is dict:
        yield from thing.values()


def _changes(path: str) -> str:
    of_epoch = path.endswith("epoch")
    unit, hook = ("epoch", "on_train_epoch_start") if of_epoch else ("step", "on_train_batch_start")
    return f", which changes from {unit} to {unit} {_KEPT}; fill a tensor in place in {hook} and read that"


def _reads_clock(callee: Ref) -> bool:
    holder = callee.owner.thing if callee.owner is not None else None
    if isinstance(holder, type) and issubclass(holder, datetime.date):
        return callee.name in ("now", "today", "utcnow")
    return _home(callee) == "time" and getattr(callee.thing, "__name__", "") != "sleep"


def _draws(callee: Ref) -> bool:
    holder = callee.owner.thing if callee.owner is not None else None
    if isinstance(holder, RANDOM_GENERATORS) or isinstance(getattr(callee.thing, "__self__", None), RANDOM_GENERATORS):
        return True
    home = _home(callee) or ""
    return home in ("random", "secrets", "uuid") or home.startswith("numpy.random")


def _fills(callee: Ref) -> bool:
    """Whether a container that outlives the step is changed by one of its methods."""
    holder = callee.owner
    if holder is None or callee.name not in FILLING or holder.role is not Role.OBJECT:
        return False
    return holder.thing is ABSENT or isinstance(holder.thing, CONTAINERS) or type(holder.thing).__module__ == "queue"


def _writes(callee: Ref) -> bool:
    holder = callee.owner
    if holder is not None and holder.role in (Role.MODULE, Role.TRAINER):
        return callee.name in ("print", "save_checkpoint")
    if holder is not None and isinstance(holder.thing, (io.IOBase, PurePath)):
        return isinstance(holder.thing, io.IOBase) or callee.name in PATH_WRITES
    home = _home(callee) or ""
    if home.partition(".")[0] in HOST_PACKAGES:
        return not (home == "logging" and callee.name in ("getLogger", "isEnabledFor"))
    return getattr(callee.thing, "__name__", "") in HOST_FUNCTIONS.get(home, ())


def _home(callee: Ref) -> str | None:
    """Return the module in which a function, or the class of the object it is a method of, is defined."""
    thing = callee.thing
    if isinstance(thing, (nn.Module, Tensor, ModuleType)) or thing is ABSENT:
        return None
    if callee.owner is not None and callee.bound and callee.owner.thing is not ABSENT:
        return type(callee.owner.thing).__module__
    home = getattr(thing, "__module__", None)
    return home if isinstance(home, str) and (callable(thing) or isinstance(thing, type)) else None
