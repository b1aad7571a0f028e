"""Host values that a captured step would freeze, and host effects that a replay would leave out, found by inspection.

    frozen_reads(module.training_step, module)[0].sentence
    "Lit.training_step uses its argument batch_idx (lit.py:12), which changes from step to step while a replay ..."

Nothing is run: the bytecode of the function is read, and that of the user's own functions that it calls. What is
found is certain to be in the code, not to be reached; what isn't found may still happen in a library's code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

import lightning.pytorch as pl

from fasttrain.callbacks.cuda_graph_step.inspection.host_rules import Ref, Role
from fasttrain.callbacks.cuda_graph_step.inspection.reader import UNKNOWN, Value
from fasttrain.callbacks.cuda_graph_step.inspection.user_code import (
    ABSENT,
    UserCode,
    find_attribute,
    plain_function,
    target_of,
)
from fasttrain.callbacks.cuda_graph_step.inspection.walk import Changed, Inspection, value_of

STEP_ARGUMENTS: Final = {
    "on_train_batch_end": (None, None, "batch_idx"),
    "on_train_batch_start": (None, "batch_idx"),
    "optimizer_step": ("epoch", "batch_idx"),
    "optimizer_zero_grad": ("epoch", "batch_idx"),
    "training_step": (None, "batch_idx"),
}
"""Hook -> which of its arguments, by position, are Python numbers that change from step to step."""


@dataclass(frozen=True)
class FrozenRead:
    """A host value that is another one in each step, and where the code reads it."""

    name: str
    file: str
    line: int
    sentence: str
    """Who reads it, where, and what would work; without a full stop."""


@dataclass(frozen=True)
class HostEffect:
    """Something done on the host that a replay would not do again, and where."""

    name: str
    file: str
    line: int
    sentence: str
    """Who does it, where, and what would work; without a full stop."""


def frozen_reads(
    function: Any, owner: object, module: pl.LightningModule | None = None, changed: Changed | None = None
) -> list[FrozenRead]:
    """Return what a function and what it calls of the user's code reads that changes from step to step.

    Args:
        function: a hook: a method of `owner`, or what was set on it.
        owner: a LightningModule or a callback.
        module: the Lightning module, if `owner` is a callback.
        changed: attributes set between the steps, as `changed_between_steps` returns them.
    """
    found = inspect_hook(function, owner, module, changed).findings.values()
    return [FrozenRead(f.rule.name, f.file, f.line, f.sentence) for f in found if f.rule.kind == "read"]


def host_effects(function: Any, owner: object, module: pl.LightningModule | None = None) -> list[HostEffect]:
    """Return what a function and what it calls of the user's code does on the host; arguments as in `frozen_reads`.

    Setting a tensor on a module is no finding: the room carries such a tensor from one replay to the next. Neither are
    `self.log` and torchmetrics, which it serves, nor waiting for the device, which fails a capture.
    """
    found = inspect_hook(function, owner, module).findings.values()
    return [HostEffect(f.rule.name, f.file, f.line, f.sentence) for f in found if f.rule.kind == "effect"]


def changed_between_steps(owners: Iterable[tuple[Any, object]], module: pl.LightningModule) -> Changed:
    """Return the attributes that hooks called between any two steps set, and the function that sets each.

    Args:
        owners: hook and owner, for `on_train_batch_start` and its like.
        module: the Lightning module.
    """
    changed: dict[tuple[int, str], str] = {}
    for function, owner in owners:
        for key, setter in inspect_hook(function, owner, module).stored.items():
            changed.setdefault(key, setter)
    return changed


def inspect_hook(
    function: Any,
    owner: object,
    module: pl.LightningModule | None = None,
    changed: Changed | None = None,
    judged_apart: Iterable[CodeType] = (),
    hook: str = "",
) -> Inspection:
    """Return all that was found on a walk through a hook; arguments as in `frozen_reads` and `Inspection`.

    Args:
        hook: under which name Lightning calls it, if that isn't the function's own.
    """
    target = target_of(function)
    plain = target.function
    code = UserCode.of(owner, *([module] if module is not None else []))
    inspection = Inspection(code, changed, judged_apart)
    if plain is not None:
        given = _given_by_lightning(hook or _hook_of(plain, owner), owner, module)
        leading = [Ref.to("self", each) if type(each) is type(owner) else value_of(each) for each in target.leading]
        keywords = {name: value_of(each) for name, each in target.keywords.items()}
        named = plain.__code__.co_varnames[len(leading) : plain.__code__.co_argcount]
        by_name = {"batch_idx": Ref("batch_idx", ABSENT, Role.STEP), "trainer": Ref("trainer", ABSENT, Role.TRAINER)}
        arguments = given or [by_name.get(name, UNKNOWN) for name in named]
        inspection.enter(plain, [*leading, *arguments], keywords if given else None)
    return inspection


def _hook_of(function: FunctionType, owner: object) -> str:
    """Return the hook of `owner` that this function is, or its own name. A lambda or a decorated one has another."""
    hooks = (*STEP_ARGUMENTS, *(name for name in dir(pl.Callback) if name.startswith("on_")))
    found = (hook for hook in hooks if plain_function(find_attribute(owner, hook).value) is function)
    return next(found, function.__name__)


def _given_by_lightning(hook: str, owner: object, module: pl.LightningModule | None) -> list[Value]:
    """Return the arguments with which Lightning calls a hook, all of them by position; none where it isn't one."""
    numbers = [UNKNOWN if name is None else Ref(name, ABSENT, Role.STEP) for name in STEP_ARGUMENTS.get(hook, ())]
    if not isinstance(owner, pl.Callback) or not hasattr(pl.Callback, hook):
        return numbers
    of_module = Ref("pl_module", ABSENT, Role.MODULE) if module is None else Ref.to("pl_module", module)
    return [Ref("trainer", ABSENT, Role.TRAINER), of_module, *numbers]
