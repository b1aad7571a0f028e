"""What a walk through bytecode deals in: values, and the `Reader` that gives them their meaning."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final

Value = Any
UNKNOWN: Final[Value] = object()


@dataclass(frozen=True)
class Constant:
    """A literal of the code, or an argument that is one in this call."""

    value: Any


@dataclass(frozen=True)
class Items:
    """A tuple or list made in the code, or `*args`."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class Entries:
    """A dict made in the code from literal keys, or `**kwargs`."""

    values: Mapping[str, Value] = field(default_factory=dict)


class Reader(ABC):
    """Gives values their meaning. `line` is the current line of the walk, set before each call."""

    line = 0

    @abstractmethod
    def load_global(self, name: str) -> Value:
        """Return the value of a global or built-in name."""

    @abstractmethod
    def imported(self, name: str) -> Value:
        """Return the value of a module imported inside of the function."""

    @abstractmethod
    def attribute(self, owner: Value, name: str) -> Value:
        """Return the value of `owner.name`."""

    @abstractmethod
    def item(self, owner: Value, key: Value) -> Value:
        """Return the value of `owner[key]`."""

    @abstractmethod
    def call(self, callee: Value, args: Sequence[Value], kwargs: Mapping[str, Value] | None) -> Value:
        """Return the value of a call; `kwargs` is None where the names aren't known."""

    @abstractmethod
    def in_place(self, target: Value) -> Value:
        """Return the value of `target += ...`."""

    @abstractmethod
    def use(self, value: Value) -> None:
        """A value is used for something other than the above."""

    @abstractmethod
    def store_attribute(self, owner: Value, name: str, value: Value) -> None:
        """`owner.name = value`, or its deletion."""

    @abstractmethod
    def store_item(self, owner: Value, key: Value) -> None:
        """`owner[...] = value`, or its deletion."""

    @abstractmethod
    def store_global(self, name: str) -> None:
        """`global name; name = ...`."""

    @abstractmethod
    def nested(self, code: CodeType, variables: Mapping[str, Value]) -> None:
        """A function or comprehension is defined; `variables` are those it can see."""


def bind(code: CodeType, args: Sequence[Value], kwargs: Mapping[str, Value] | None = None) -> dict[str, Value]:
    """Return parameter name -> value for a call of `code`; what isn't given stays out."""
    names = code.co_varnames
    named = code.co_argcount + code.co_kwonlyargcount
    bound = dict(zip(names[: code.co_argcount], args, strict=False))
    more = dict(kwargs or {})
    bound.update({name: more.pop(name) for name in names[:named] if name in more})
    if code.co_flags & 4:
        bound[names[named]] = Items(tuple(args[code.co_argcount :]))
    if code.co_flags & 8 and kwargs is not None:
        bound[names[named + bool(code.co_flags & 4)]] = Entries(more)
    return bound
