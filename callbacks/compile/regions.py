"""Which modules of a model are compiled: those named, or the blocks it repeats, or else its children."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchmetrics import Metric

from fasttrain.errors import OptimizationError, nearest
from fasttrain.surgery import joined

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Region:
    """A module that is compiled by itself. One that is at several paths is named by the first."""

    path: str
    module: nn.Module


def find_regions(model: nn.Module, wanted: Sequence[str] = ()) -> list[Region]:
    """Return the outermost of the wanted modules, or, with none named, those that are worth it.

    Repeated blocks come first: members of a ModuleList, ModuleDict or Sequential that has another of their class, with
    parameters and submodules. They compile once for all that look alike. Of a Sequential of blocks, such as a stage of
    a ResNet, it is the blocks. A model without any is compiled by children. What is compiled already, by whomever, is
    left out.

    Raises:
        OptimizationError: a name that the model has neither as a path nor as a class; a module that can't be called.
    """
    found = _outermost(_named(model, wanted) if wanted else _repeated(model))
    if not found and not wanted:
        found = _outermost(_children("", model))
    return [region for region in found if not _is_compiled(region.module)]


def why_no_region(model: nn.Module) -> str:
    """Return a sentence's worth of why a model has no region."""
    return f"{type(model).__name__} has no submodule with parameters and a forward that is not compiled yet"


def _named(model: nn.Module, wanted: Iterable[str]) -> Iterator[Region]:
    modules = dict(model.named_modules())
    modules.pop("")
    every_path = dict(model.named_modules(remove_duplicate=False))
    every_path.pop("")
    for name in wanted:
        if name in every_path:
            found = [Region(name, every_path[name])]
        else:
            found = [Region(path, module) for path, module in modules.items() if type(module).__name__ == name]
        if not found:
            known = {*every_path, *(type(module).__name__ for module in modules.values())}
            raise OptimizationError(
                f"{type(model).__name__} has no module '{name}', neither by path nor by class; {nearest(name, known)}"
            )
        for region in found:
            if not _is_callable(region.module):
                raise OptimizationError(
                    f"'{region.path}' is a {type(region.module).__name__}, which is not called itself; name its "
                    "members, or their class"
                )
            yield region


def _repeated(model: nn.Module) -> Iterator[Region]:
    for path, container in model.named_modules():
        for name, child in _repeats(container):
            if type(child) is not nn.Sequential or not _repeats(child):
                yield Region(joined(path, name), child)


def _repeats(container: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(container, CONTAINERS):
        return []
    classes = Counter(type(child) for child in set(container.children()))
    blocks = (item for item in container.named_children() if any(True for _ in item[1].children()))
    return [(name, child) for name, child in blocks if classes[type(child)] > 1 and _is_worth_it(child)]


def _children(path: str, parent: nn.Module) -> Iterator[Region]:
    for name, child in parent.named_children():
        if _is_worth_it(child):
            yield Region(joined(path, name), child)
        elif not _is_callable(child):
            yield from _children(joined(path, name), child)


def _outermost(regions: Iterable[Region]) -> list[Region]:
    """Return each module once, without those that lie in another one's."""
    chosen: dict[int, Region] = {}
    for region in regions:
        chosen.setdefault(id(region.module), region)
    inside = {id(part) for region in chosen.values() for part in region.module.modules() if part is not region.module}
    return [region for key, region in chosen.items() if key not in inside]


def _is_worth_it(module: nn.Module) -> bool:
    has_parameters = any(True for _ in module.parameters())
    return has_parameters and not isinstance(module, (Metric, torch.jit.ScriptModule)) and _is_callable(module)


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
