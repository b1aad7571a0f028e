"""The walk through a hook and what it calls of the user's own code, applying the rules of `host_rules`.

Nothing of the user's is run. Library code is not entered; a library's container of the user's modules is.
"""

import builtins
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fasttrain.callbacks.cuda_graph_step.inspection.bytecode import walk
from fasttrain.callbacks.cuda_graph_step.inspection.host_rules import (
    OPTIMIZER_VALUES,
    Ref,
    Role,
    Rule,
    attribute_rule,
    call_rule,
    changed_by_rule,
    is_plain,
    may_be_carried,
    parts,
    role_of,
    step_value,
    store_rule,
)
from fasttrain.callbacks.cuda_graph_step.inspection.reader import UNKNOWN, Constant, Entries, Items, Reader, Value, bind
from fasttrain.callbacks.cuda_graph_step.inspection.user_code import (
    ABSENT,
    UserCode,
    find_attribute,
    free_variables,
    plain_function,
    target_of,
)

GREATEST_DEPTH: Final = 24
MOST_FUNCTIONS: Final = 4000
MODULE_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
INDEXED: Final = (list, tuple, dict, nn.ModuleList, nn.ModuleDict, nn.Sequential)
YIELDING_PARTS: Final = frozenset({"children", "items", "named_children", "values"})
HOOKS_WITH_NUMBERS: Final = frozenset({"optimizer_step", "optimizer_zero_grad", "training_step"})
GRADIENTS: Final = frozenset({"clip_gradients", "grad", "main_grad"})

Changed = Mapping[tuple[int, str], str]
"""(id of an object, attribute) -> the hook between the steps that sets it."""


@dataclass(frozen=True)
class Finding:
    """One place that a rule speaks against."""

    rule: Rule
    function: str
    file: str
    line: int

    @property
    def sentence(self) -> str:
        """What is wrong, where, and what would work; without a full stop."""
        return f"{self.function} {self.rule.what} ({Path(self.file).name}:{self.line}){self.rule.rest}"


class Inspection:
    """What was found on a walk through one hook.

    Args:
        code: tells which functions are the user's.
        changed: plain attributes that are set between the steps.
        judged_apart: code of hooks that are inspected by themselves, which are not entered.
    """

    def __init__(self, code: UserCode, changed: Changed | None = None, judged_apart: Iterable[CodeType] = ()) -> None:
        self.code, self.changed, self.judged_apart = code, changed or {}, frozenset(judged_apart)
        self.findings: dict[tuple[str, str, int], Finding] = {}
        self.stored: dict[tuple[int, str], str] = {}
        """(id of an object, attribute) -> the function that sets it."""
        self.reached: set[CodeType] = set()
        """Of `judged_apart`, what is called."""
        self.reads_gradients = False
        self._seen: set[Any] = set()
        self._depth = 0

    def enter(self, function: FunctionType, args: Sequence[Value], kwargs: Mapping[str, Value] | None = None) -> None:
        """Walk through a function that is called with these arguments, once for each kind of them."""
        code = function.__code__
        given = {**(literal_defaults(function) if kwargs is not None else {}), **bind(code, args, kwargs)}
        if code in self.judged_apart and not any(_is_step_value(value) for value in given.values()):
            self.reached.add(code)
            return
        kind = (code, *((name, _identity(value)) for name, value in given.items()))
        if kind in self._seen or self._depth >= GREATEST_DEPTH or len(self._seen) >= MOST_FUNCTIONS:
            return
        self._seen.add(kind)
        for name, value in given.items():
            if isinstance(value, Ref) and value.role is Role.STEP:
                given[name] = Ref(name, ABSENT, Role.STEP)
        free = {name: Ref.to(name, thing) for name, thing in free_variables(function)}
        self._depth += 1
        variables = free | given
        walk(code, variables, _Frame(self, function.__globals__, code, short_name(code), variables))
        self._depth -= 1

    def enter_module(self, ref: Ref, args: Sequence[Value] = (), kwargs: Mapping[str, Value] | None = None) -> bool:
        """Walk through what a call of `ref`, an nn.Module, runs of the user's; return whether `args` went there."""
        module = ref.thing
        for table in MODULE_HOOKS:
            for hook in vars(module).get(table, {}).values():
                target = target_of(hook)
                if target.function is not None and self.code.has(target.function):
                    self.enter(target.function, [value_of(each) for each in target.leading])
        if isinstance(module, Metric):
            return False  # the room carries metrics over
        if self.code.has_forward_of(module):
            found = find_attribute(module, "forward")
            function = plain_function(found.value)
            assert function is not None
            self.enter(function, [ref, *args] if found.bound else args, kwargs)
            return True
        for name, child in module._modules.items():
            if child is not None and (id(module), id(child)) not in self._seen:
                self._seen.add((id(module), id(child)))
                self.enter_module(Ref.to(f"{ref.path}.{name}", child))
        return False

    def found(self, rule: Rule, frame: "_Frame") -> None:
        """Keep what speaks against the line that `frame` is at."""
        file = frame.code.co_filename
        self.findings.setdefault((rule.what, file, frame.line), Finding(rule, frame.function, file, frame.line))


class _Frame(Reader):
    """One function's walk. Comprehensions and inner functions go by the name of the function around them."""

    def __init__(
        self,
        inspection: Inspection,
        names: Mapping[str, Any],
        code: CodeType,
        function: str,
        variables: Mapping[str, Value],
    ) -> None:
        self.inspection, self.names, self.code, self.function = inspection, names, code, function
        self.variables = variables

    def load_global(self, name: str) -> Value:
        thing = self.names.get(name, vars(builtins).get(name, ABSENT))
        return UNKNOWN if thing is ABSENT else Ref.to(name, thing)

    def imported(self, name: str) -> Value:
        return Ref.to(name, sys.modules[name]) if name in sys.modules else UNKNOWN

    def attribute(self, owner: Value, name: str) -> Value:
        self.inspection.reads_gradients |= name in GRADIENTS
        if not isinstance(owner, Ref):
            return self._told_or(UNKNOWN, attribute_rule(None, name, name))
        if owner.role in (Role.STEP, Role.TOLD):
            self.use(owner)
            return owner if owner.role is Role.TOLD else UNKNOWN
        if owner.role is Role.PARENT:
            return self._of_parent(owner, name)
        path = f"{owner.path}.{name}"
        if rule := attribute_rule(owner, path, name):
            return self._told_or(UNKNOWN, rule)
        if (role := role_of(owner, name)) is not None:
            return Ref(path, ABSENT, role, owner)
        return self._of_object(owner, path, name)

    def item(self, owner: Value, key: Value) -> Value:
        if not isinstance(owner, Ref) or isinstance(owner.thing, Tensor):
            return UNKNOWN
        if owner.role is not Role.OBJECT:
            return owner
        path = f"{owner.path}[{key.value!r}]" if isinstance(key, Constant) else f"{owner.path}[...]"
        if type(owner.thing) in INDEXED and isinstance(key, Constant):
            try:
                return Ref.to(path, owner.thing[key.value])
            except (LookupError, TypeError):
                return Ref(path)
        self.use(owner)
        return Ref(path) if owner.thing is ABSENT or type(owner.thing) in (list, dict) else UNKNOWN

    def call(self, callee: Value, args: Sequence[Value], kwargs: Mapping[str, Value] | None) -> Value:
        every = [*args, *(kwargs or {}).values()]
        if not isinstance(callee, Ref):
            self._use_all(every)
            return UNKNOWN
        if rule := call_rule(callee, args[0] if args else None):
            self._use_all(every)
            return self._told_or(UNKNOWN, rule)
        if callee.thing is super:
            return self._parent(args)
        accesses = any(callee.thing is each for each in (getattr, setattr, delattr))
        if accesses and len(args) > 1 and isinstance(args[1], Constant):
            return self._by_name(callee.thing, args)
        if not self._enter(callee, args, kwargs):
            self._use_all(every)
        return UNKNOWN

    def in_place(self, target: Value) -> Value:
        return target if isinstance(target, Ref) and isinstance(target.thing, Tensor) else UNKNOWN

    def use(self, value: Value) -> None:
        if not isinstance(value, Ref):
            return
        if value.role is Role.STEP:
            self.inspection.found(step_value(value), self)
        elif value.role is not Role.OBJECT:
            return
        elif isinstance(value.thing, nn.Module):
            self.inspection.enter_module(value)
        elif isinstance(value.thing, (FunctionType, MethodType)):
            self._enter(value, (), None)
        else:
            for part in parts(value.thing):
                if isinstance(part, nn.Module):
                    self.inspection.enter_module(Ref.to(f"{value.path}[...]", part))

    def store_attribute(self, owner: Value, name: str, value: Value) -> None:
        if not isinstance(owner, Ref) or owner.role in (Role.STEP, Role.TOLD):
            return
        self.inspection.stored.setdefault((id(owner.thing), name), self.function)
        same = isinstance(value, Ref) and isinstance(value.thing, Tensor) and value.path == f"{owner.path}.{name}"
        if not same and not may_be_carried(owner, name, value):
            self.inspection.found(store_rule(f"{owner.path}.{name}"), self)

    def store_item(self, owner: Value, key: Value) -> None:
        name = key.value if isinstance(key, Constant) else None
        if isinstance(owner, Ref) and owner.role is Role.OBJECT and not isinstance(owner.thing, Tensor):
            self.inspection.found(store_rule(f"{owner.path}[{'...' if name is None else repr(name)}]"), self)
        elif owner is UNKNOWN and name in OPTIMIZER_VALUES:
            self.inspection.found(store_rule(f"an optimizer's {name!r}"), self)

    def store_global(self, name: str) -> None:
        self.inspection.found(store_rule(f"the global {name}"), self)

    def nested(self, code: CodeType, variables: Mapping[str, Value]) -> None:
        visible = {name: variables[name] for name in code.co_freevars if name in variables}
        walk(code, visible, _Frame(self.inspection, self.names, code, self.function, visible))

    def _told_or(self, value: Value, rule: Rule | None) -> Value:
        if rule is None:
            return value
        self.inspection.found(rule, self)
        return Ref(rule.name, ABSENT, Role.TOLD)

    def _use_all(self, values: Iterable[Value]) -> None:
        for value in values:
            if isinstance(value, Items):
                self._use_all(value.values)
            elif isinstance(value, Entries):
                self._use_all(value.values.values())
            else:
                self.use(value)

    def _of_object(self, owner: Ref, path: str, name: str) -> Value:
        if owner.thing is ABSENT:
            return Ref(path, owner=owner)
        found = find_attribute(owner.thing, name)
        if found.getter is not None:
            if self.inspection.code.has(found.getter):
                self.inspection.enter(found.getter, [owner])
            return UNKNOWN
        hook = self.inspection.changed.get((id(owner.thing), name))
        if hook is not None and is_plain(found.value):
            self.inspection.found(changed_by_rule(path, hook), self)
        if found.value is ABSENT and not isinstance(owner.thing, nn.Module) and owner.path != "self":
            return UNKNOWN
        return Ref.to(path, found.value, owner, found.bound)

    def _parent(self, args: Sequence[Value]) -> Value:
        """Return `super()`, whose thing is the class after which to look, and the owner."""
        if not args and self.code.co_argcount:
            args = [self.variables.get("__class__", UNKNOWN), self.variables.get(self.code.co_varnames[0], UNKNOWN)]
        return Ref("super()", tuple(args) if len(args) == 2 else ABSENT, Role.PARENT)

    def _of_parent(self, parent: Ref, name: str) -> Value:
        if parent.thing is ABSENT:
            return UNKNOWN
        cls, owner = parent.thing
        if not isinstance(cls, Ref) or not isinstance(owner, Ref) or not isinstance(cls.thing, type):
            return UNKNOWN
        order = type(owner.thing).__mro__
        after = order[order.index(cls.thing) + 1 :] if cls.thing in order else ()
        for base in after:
            if name in vars(base):
                return Ref(f"super().{name}", vars(base)[name], Role.OBJECT, owner, bound=True)
        return UNKNOWN

    def _by_name(self, accessor: Any, args: Sequence[Value]) -> Value:
        owner, name = args[0], str(args[1].value)
        if accessor is getattr:
            return self.attribute(owner, name)
        self.store_attribute(owner, name, args[2] if len(args) > 2 else UNKNOWN)
        return UNKNOWN

    def _enter(self, callee: Ref, args: Sequence[Value], kwargs: Mapping[str, Value] | None) -> bool:
        """Enter what a call runs, if it is the user's; return whether the arguments went there."""
        thing = callee.thing
        if isinstance(thing, nn.Module):
            return self.inspection.enter_module(callee, args, kwargs)
        if callee.name == "apply" and _is_autograd_function(callee.owner):
            return self._enter_autograd_function(callee.owner, args)
        target = target_of(thing)
        function = target.function
        if isinstance(thing, type):
            function = plain_function(find_attribute(thing, "__init__").value)
            args = [UNKNOWN, *args]
        elif function is not None:
            args = [callee.owner, *args] if callee.bound else args
            args = [*map(value_of, target.leading), *args]
            given = {name: value_of(each) for name, each in target.keywords.items()}
            kwargs = None if kwargs is None else {**given, **kwargs}
        elif callable(thing):
            function = plain_function(find_attribute(type(thing), "__call__").value)
            args = [callee, *args]
        if callee.owner is not None and callee.name in YIELDING_PARTS:
            self.use(callee.owner)
        if function is None:
            return False
        if not self.inspection.code.has(function):
            self.inspection.reads_gradients |= _mentions_gradients(function.__code__)
            return _is_base_hook(function)
        self.inspection.enter(function, args, kwargs)
        return True

    def _enter_autograd_function(self, owner: Ref | None, args: Sequence[Value]) -> bool:
        assert owner is not None
        for name in ("forward", "setup_context", "backward"):
            function = plain_function(find_attribute(owner.thing, name).value)
            if function is not None and self.inspection.code.has(function):
                self.inspection.enter(function, [UNKNOWN, *args] if name == "forward" else [])
        return False


def literal_defaults(function: FunctionType) -> dict[str, Value]:
    """Return the parameters whose default is a literal, and that."""
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    every = {**dict(zip(positional, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: Constant(value) for name, value in every.items() if is_plain(value)}


def short_name(code: CodeType) -> str:
    """Return a function's name as its class's user knows it."""
    return code.co_qualname.rpartition("<locals>.")[2]


def value_of(thing: Any) -> Value:
    """Return the value of an object that comes with a function, under its class's name."""
    return Constant(thing) if is_plain(thing) else Ref.to(type(thing).__name__, thing)


def _identity(value: Value) -> Any:
    """Return what tells a kind of argument from another: a reference's target, or a literal."""
    if isinstance(value, Ref):
        return value.path, id(value.thing)
    return (type(value.value), value.value) if isinstance(value, Constant) and is_plain(value.value) else None


def _is_step_value(value: Value) -> bool:
    if isinstance(value, Items):
        return any(_is_step_value(item) for item in value.values)
    if isinstance(value, Entries):
        return any(_is_step_value(item) for item in value.values.values())
    return isinstance(value, Ref) and value.role is Role.STEP


def _is_autograd_function(owner: Ref | None) -> bool:
    return owner is not None and isinstance(owner.thing, type) and issubclass(owner.thing, torch.autograd.Function)


def _is_base_hook(function: FunctionType) -> bool:
    """Whether it is a hook of Lightning's base classes, none of which uses the numbers that it is given."""
    return function.__name__ in HOOKS_WITH_NUMBERS and function.__module__ == pl.LightningModule.__module__


def _mentions_gradients(code: CodeType) -> bool:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not GRADIENTS.isdisjoint(code.co_names) or any(map(_mentions_gradients, nested))
