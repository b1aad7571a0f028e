"""Whether somebody overrides one of Lightning's hooks."""

import inspect
from functools import cache, partial
from types import MethodType
from typing import Any, Final

import lightning.pytorch as pl

BASES: Final = (pl.LightningModule, pl.Callback, pl.LightningDataModule)


def overridden(owner: object, hook: str) -> bool:
    """Whether an owner's hook is another function than that of Lightning's base class; one set on the instance counts.

    False for a hook that the owner doesn't have, or that was set to None, which Lightning doesn't call.
    """
    function = getattr(owner, hook, None)
    if not callable(function):
        return False
    while isinstance(function, (MethodType, partial)):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    return function not in _base_functions(hook)


@cache
def _base_functions(hook: str) -> tuple[Any, ...]:
    functions = (inspect.getattr_static(base, hook, None) for base in BASES)
    return tuple(function for function in functions if function is not None)
