"""Where a model runs a frozen normalization into a ReLU, and how the fused forms get there and away again.

Three kinds of places: torchvision's residual blocks; neighbours in an nn.Sequential; and two children of any other
module that a symbolic trace of its forward shows to run one into the other, such as the stem of a ResNet.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from torch import fx, nn

from fasttrain.callbacks.frozen_bn.fold import why_not_frozen
from fasttrain.callbacks.frozen_bn.modules import FUSED_BLOCKS, NORMS_OF_BLOCK, fused_block, fused_norm
from fasttrain.patches import ModulePatches, PatchSite, PatchSurgery
from fasttrain.randomness import random_state_kept
from fasttrain.surgery import why_not_passed_by


class FrozenBNPatches(ModulePatches):
    """The sites: residual blocks, and a normalization with the ReLU behind it."""

    room = "frozen_bn"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the places that are not fused yet."""
        return [site for path, parent in model.named_modules() for site in _sites_in(path, parent)]

    def why_no_site(self, model: nn.Module) -> str:
        """Count the model's normalizations by what they lack."""
        reasons = [reason for module in model.modules() if (reason := why_not_frozen(module)) != ""]
        name = type(model).__name__
        if not reasons:
            return f"{name} has no BatchNorm2d or FrozenBatchNorm2d"
        counted = Counter(reason or "frozen, with no ReLU seen to follow" for reason in reasons)
        texts = ", ".join(f"{count} {reason}" for reason, count in counted.most_common())
        return (
            f"{name} has no frozen batch normalization that a ReLU follows in a torchvision residual block, an "
            f"nn.Sequential or a forward that can be traced; its normalizations are: {texts}"
        )


class FrozenBNSurgery(PatchSurgery):
    """Puts the fused forms to every site of a model, and the old modules back. The state dict stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, FrozenBNPatches())


def _sites_in(path: str, parent: nn.Module) -> Iterator[PatchSite]:
    if type(parent) in FUSED_BLOCKS.values():
        return
    for name, child in parent._modules.items():
        if child is not None and _is_block(child):
            yield PatchSite(_joined(path, name), child, partial(fused_block, child))
    if not _is_block(parent):
        for norm, relu in _pairs(parent):
            first, second = parent._modules[norm], parent._modules[relu]
            assert first is not None
            assert second is not None
            plain = nn.Sequential(first, second)
            yield PatchSite(_joined(path, norm), plain, partial(fused_norm, first), (_joined(path, relu),))


def _is_block(module: nn.Module) -> bool:
    if type(module) not in FUSED_BLOCKS or "forward" in vars(module) or not _is_relu(getattr(module, "relu", None)):
        return False
    return all(why_not_frozen(getattr(module, name)) is None for name in NORMS_OF_BLOCK[type(module)])


def _pairs(parent: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a parent's frozen normalizations and of the ReLU that each runs into."""
    children = parent._modules
    norms = [name for name, child in children.items() if child is not None and why_not_frozen(child) is None]
    if not norms or not any(_is_relu(child) for child in children.values()):
        return
    if type(parent).forward is nn.Sequential.forward:
        for norm, relu in pairwise(children):
            if norm in norms and _is_relu(children[relu]):
                yield norm, relu
        return
    yield from _traced_pairs(parent, norms)


def _traced_pairs(parent: nn.Module, norms: list[str]) -> Iterator[tuple[str, str]]:
    if isinstance(parent, pl.LightningModule):
        return  # its forward is not all that runs its children
    try:
        with random_state_kept():
            nodes = list(_ChildrenAreLeaves().trace(_copied_for_tracing(parent)).nodes)
    except Exception:  # a forward that depends on values can't be traced, and may raise anything on trying
        return
    calls = Counter(node.target for node in nodes if node.op == "call_module")
    for node in nodes:
        if node.op != "call_module" or node.target not in norms or len(node.users) != 1:
            continue
        (user,) = node.users
        is_relu = user.op == "call_module" and _is_relu(parent._modules.get(str(user.target)))
        if is_relu and calls[node.target] == calls[user.target] == 1:
            yield str(node.target), str(user.target)


def _copied_for_tracing(module: nn.Module) -> nn.Module:
    """Return a module with the same children, to which a forward may assign as it likes."""
    copied = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(copied)[name] = dict(vars(module)[name])
    return copied


class _ChildrenAreLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _is_relu(module: Any) -> bool:
    return type(module) is nn.ReLU and why_not_passed_by(module) is None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
