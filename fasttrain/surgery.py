"""Replace parts of a model by path, keeping parameter names, and put them back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from fasttrain.errors import OptimizationError


@dataclass(frozen=True)
class Site:
    """One place of a module in a model. A module used twice has one site for each path."""

    path: str
    module: nn.Module


def find_sites(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[Site]:
    """Yield every place whose module is wanted; a shared module is found under each of its paths."""
    for path, module in model.named_modules(remove_duplicate=False):
        if path and wanted(module):
            yield Site(path, module)


def replace(model: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Put `new` at `path` and return what was there. Mutates `model`; training modes are carried over, by submodule.

    Raises:
        OptimizationError: there is nothing at `path`, or the state-dict names or shapes would change, so that a
            checkpoint would no longer load.
    """
    parent_path, _, name = path.rpartition(".")
    try:
        parent = model.get_submodule(parent_path)
        old = model.get_submodule(path)
    except AttributeError:
        old = None
    if old is None or not path:
        raise OptimizationError(f"there is no module at '{path}' in {type(model).__name__}.")
    before, after = _shapes(old), _shapes(new)
    if before != after:
        changed = sorted(set(before.items()) ^ set(after.items()))[0]
        raise OptimizationError(
            f"replacing '{path}' ({type(old).__name__}) by {type(new).__name__} would change the checkpoint: "
            f"'{changed[0]}' of shape {changed[1]} is in one and not in the other."
        )
    modes = {name: module.training for name, module in old.named_modules()}
    for name_inside, module in new.named_modules():
        module.training = modes.get(name_inside, old.training)
    setattr(parent, name, new)
    return old


class Surgery:
    """A set of replacements that can be undone as a whole.

    A module at several paths is replaced by one new module at all of them, so that weights stay shared.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replaced: dict[str, nn.Module] = {}

    def apply(self, wanted: Callable[[nn.Module], bool], make: Callable[[nn.Module], nn.Module]) -> list[str]:
        """Replace every wanted module by what `make` returns for it; return the paths."""
        made: dict[int, nn.Module] = {}
        sites = list(find_sites(self.model, wanted))
        for site in sites:
            if id(site.module) not in made:
                made[id(site.module)] = make(site.module)
            old = replace(self.model, site.path, made[id(site.module)])
            self.replaced.setdefault(site.path, old)
        return [site.path for site in sites]

    def undo(self) -> None:
        """Put every original module back, with the parameters that it now shares or that were trained meanwhile."""
        for path, old in reversed(self.replaced.items()):  # what lies inside of another replacement first
            new = self.model.get_submodule(path)
            old.load_state_dict(new.state_dict())
            replace(self.model, path, old)
        self.replaced.clear()


M = TypeVar("M", bound=nn.Module)


def with_state_of(old: nn.Module, kind: type[M]) -> M:
    """Return a module of another class with the same parameters, buffers, submodules, hooks and attributes.

    The dictionaries that hold them are shared, so that moving one module to a device moves the other. The new class has
    the attributes that its forward needs, or they are set afterwards: no `__init__` is run.
    """
    new: Any = kind.__new__(kind)
    vars(new).update(vars(old))
    return new  # type: ignore[no-any-return]


def joined(path: str, name: str) -> str:
    """Return the path of a child."""
    return f"{path}.{name}" if path else name


def why_not_passed_by(module: nn.Module) -> str | None:
    """Return why a module must be called as it is, where its forward would not be called any more; None if not."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "watched by hooks"
    return "patched in its forward" if "forward" in vars(module) else None


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    # A module's extra state may be anything.
    return {key: tuple(getattr(value, "shape", ())) for key, value in module.state_dict().items()}
