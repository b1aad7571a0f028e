"""Which functions are the user's own, and what an object's attributes are, found without running any of its code."""

import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import nn

LIBRARIES: Final = frozenset({
    "builtins", "lightning", "lightning_fabric", "lightning_utilities", "numpy", "pytorch_lightning", "torch",
    "torchaudio", "torchmetrics", "torchvision"
})  # fmt: skip
# A room answers for its own kernels and modules: its tests capture them. A model that it patched calls them.
ROOMS: Final = f"{__name__.partition('.callbacks.')[0]}.callbacks."
ABSENT: Final[Any] = object()


@dataclass(frozen=True)
class UserCode:
    """Tells the user's code from libraries': what isn't installed, and what is of one package with the owner.

    Rooms' code is no user's, wherever it lies, unless the owner is a room's.
    """

    packages: frozenset[str]
    with_rooms: bool = False

    @classmethod
    def of(cls, *owners: object) -> "UserCode":
        """Return the judge for objects whose classes may have been installed as a package of the user's."""
        modules = [base.__module__ for owner in owners for base in type(owner).__mro__]
        packages = frozenset(module.partition(".")[0] for module in modules) - LIBRARIES - sys.stdlib_module_names
        return cls(packages, any(module.startswith(ROOMS) for module in modules))

    def has(self, function: FunctionType | type) -> bool:
        """Whether a function or class belongs to the user."""
        module = function.__module__ or ""
        if module.startswith(ROOMS) and not self.with_rooms:
            return False
        package = module.partition(".")[0]
        if package in self.packages:
            return True
        code = getattr(function, "__code__", None)
        return package not in LIBRARIES and (not isinstance(code, CodeType) or not is_installed(code.co_filename))

    def has_forward_of(self, module: nn.Module) -> bool:
        """Whether the forward that a call of `module` runs is the user's."""
        function = plain_function(find_attribute(module, "forward").value)
        return function is not None and self.has(function)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a source file belongs to Python or to an installed package."""
    if file.startswith("<frozen"):
        return True
    path = Path(file)
    if "site-packages" in path.parts or "dist-packages" in path.parts or any(map(file.startswith, _roots())):
        return True
    return any(map(_holds_packages, path.parents))


@functools.cache
def _holds_packages(folder: Path) -> bool:
    """Whether pip has installed packages into a folder, `pip install --target` for instance."""
    return any(folder.glob("*.dist-info"))


@dataclass(frozen=True)
class Attribute:
    """What an attribute is. `bound` where a call hands the owner over as first argument."""

    value: Any = ABSENT
    bound: bool = False
    getter: Any = None
    """The function that a property would run."""


def find_attribute(owner: object, name: str) -> Attribute:
    """Return an attribute without running a property, a descriptor or `__getattr__`."""
    if isinstance(owner, ModuleType):
        return Attribute(vars(owner).get(name, ABSENT))
    if isinstance(owner, nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            if name in vars(owner).get(table, ()):
                return Attribute(vars(owner)[table][name])
    raw = inspect.getattr_static(owner, name, ABSENT)
    if isinstance(raw, (staticmethod, classmethod)):
        return Attribute(raw.__func__, bound=isinstance(raw, classmethod))
    if isinstance(raw, property):
        return Attribute(getter=plain_function(raw.fget))
    if isinstance(raw, functools.cached_property):
        return Attribute(getter=plain_function(raw.func))
    of_instance = raw is not ABSENT and raw is (getattr(owner, "__dict__", None) or {}).get(name, ABSENT)
    callable_of_class = not of_instance and not isinstance(owner, type) and hasattr(type(raw), "__get__")
    return Attribute(raw, bound=callable_of_class)


@dataclass(frozen=True)
class Target:
    """What a call of something comes down to: a Python function, and the arguments that it is given beforehand."""

    function: FunctionType | None
    """None for what isn't written in Python."""
    leading: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def target_of(thing: Any) -> Target:
    """Look behind methods, partials and installed decorators. A decorator of the user's calls what it wraps."""
    leading: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while True:
        if isinstance(thing, MethodType):
            thing, leading = thing.__func__, (thing.__self__, *leading)
        elif isinstance(thing, functools.partial):
            leading, keywords = (*thing.args, *leading), {**thing.keywords, **keywords}
            thing = thing.func
        elif isinstance(thing, functools.partialmethod):
            thing = thing.func
        elif _is_decorated_by_library(thing):
            thing = thing.__wrapped__
        else:
            return Target(thing if isinstance(thing, FunctionType) else None, leading, keywords)


def plain_function(thing: Any) -> FunctionType | None:
    """Return the function of `target_of`."""
    return target_of(thing).function


def free_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a function closes over, as far as it is set."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


@functools.cache
def _roots() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_decorated_by_library(thing: Any) -> bool:
    if isinstance(thing, (type, nn.Module)) or "__wrapped__" not in (getattr(thing, "__dict__", None) or {}):
        return False
    return not isinstance(thing, FunctionType) or is_installed(thing.__code__.co_filename)
