"""Where a model drops out, adds a residual and normalizes, in a way that can be replaced.

Two kinds of places: PyTorch's own encoder layer, and any module whose whole forward, as a symbolic trace shows it, is
norm(dropout(dense(x)) + residual), with or without the dense part. BertSelfOutput and BertOutput of Hugging Face's
models are of that kind, and so are their many relatives, without this room's knowing their names.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import torch
from torch import fx, nn

from fasttrain.callbacks.layer_norm_dropout.modules import Roles, fused_layer, fused_output
from fasttrain.patches import ModulePatches, PatchSite
from fasttrain.surgery import joined, why_not_passed_by
from fasttrain.tracing import ChildrenAreLeaves, nodes_of

# `in_triton` has the same number, and can't be imported where there is no Triton.
LARGEST_HIDDEN = 8192


class LayerNormDropoutPatches(ModulePatches):
    """The room's sites."""

    room = "layer_norm_dropout"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the places that can be fused."""
        return list(_sites(model))

    def why_no_site(self, model: nn.Module) -> str:
        """Return a sentence's worth of why a model has no site."""
        name = type(model).__name__
        norms = sum(isinstance(module, nn.LayerNorm) for module in model.modules())
        if not norms:
            return f"{name} has no nn.LayerNorm to fuse dropout and a residual addition with"
        layers = [module for module in model.modules() if type(module) is nn.TransformerEncoderLayer]
        reasons = Counter(why_not_fused(layer) or "the model itself, which can't be replaced" for layer in layers)
        seen = "".join(f"; {count} nn.TransformerEncoderLayer: {reason}" for reason, count in reasons.items())
        return (
            f"{name} has {norms} nn.LayerNorm, but neither an nn.TransformerEncoderLayer that can be fused nor a "
            f"module whose whole forward is norm(dropout(dense(x)) + residual){seen}"
        )


def why_not_fused(layer: nn.TransformerEncoderLayer) -> str | None:
    """Return why PyTorch's encoder layer can't be fused; None if it can."""
    if layer.norm_first:
        return "norm_first=True, where no normalization follows the addition alone"
    if "forward" in vars(layer):
        return "a forward of its own"
    for norm in (layer.norm1, layer.norm2):
        if not _is_norm(norm):
            return f"{norm}, where an nn.LayerNorm of up to {LARGEST_HIDDEN} elements without hooks is wanted"
    for dropout in (layer.dropout1, layer.dropout2):
        if not _is_dropout(dropout):
            return f"{dropout}, where an nn.Dropout without hooks is wanted"
    return None


def roles_of(module: nn.Module) -> Roles | None:
    """Return which part is what in a module that is norm(dropout(dense(x)) + residual); None for any other."""
    children = [child for child in module._modules.values() if child is not None]
    if isinstance(module, pl.LightningModule) or "forward" in vars(module):
        return None
    if not any(map(_is_norm, children)) or not any(map(_is_dropout, children)):
        return None
    nodes = nodes_of(module, ChildrenAreLeaves())
    return None if nodes is None else _roles_in(module, nodes)


def _sites(model: nn.Module) -> Iterator[PatchSite]:
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            inside = joined(path, name)
            if type(child) is nn.TransformerEncoderLayer:
                if why_not_fused(child) is None:
                    yield PatchSite(inside, child, lambda child=child: fused_layer(child))  # type: ignore[misc]
            elif child is not None and (roles := roles_of(child)) is not None:
                yield PatchSite(inside, child, lambda child=child, roles=roles: fused_output(child, roles))  # type: ignore[misc]


def _roles_in(module: nn.Module, nodes: list[fx.Node]) -> Roles | None:
    """Walk back from the output; nothing may be left over."""
    arguments = [node for node in nodes if node.op == "placeholder"]
    if len(arguments) != 2 or any(node.args for node in arguments) or nodes[-1].op != "output":
        return None
    norm = _child_call(nodes[-1].args[0], module, _is_norm)
    added = norm and norm.args[0]
    if not isinstance(added, fx.Node) or added.target not in (operator.add, torch.add) or len(added.args) != 2:
        return None
    for one, residual in (added.args, added.args[::-1]):
        dropout = _child_call(one, module, _is_dropout)
        if dropout is None or residual not in arguments or added.kwargs:
            continue
        dense = _child_call(dropout.args[0], module, lambda child: True)
        x = dropout.args[0] if dense is None else dense.args[0]
        used = {norm, added, dropout, dense, x, residual, nodes[-1]} - {None}
        if x in arguments and used == set(nodes):
            assert isinstance(x, fx.Node)
            assert isinstance(residual, fx.Node)
            names = tuple(str(node.target) for node in arguments)
            parts = [None if node is None else str(node.target) for node in (dense, dropout, norm)]
            return Roles(names, str(x.target), str(residual.target), *parts)  # type: ignore[arg-type]
    return None


def _child_call(node: object, module: nn.Module, wanted: Callable[[nn.Module], bool]) -> fx.Node | None:
    """Return a node that calls a wanted child with one argument and is used once; None if it isn't that."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.users) != 1:
        return None
    child = module._modules.get(str(node.target))
    called_plainly = len(node.args) == 1 and not node.kwargs
    return node if child is not None and called_plainly and wanted(child) else None


def _is_norm(module: nn.Module) -> bool:
    if type(module) is not nn.LayerNorm or why_not_passed_by(module) is not None:
        return False
    return len(module.normalized_shape) == 1 and module.normalized_shape[0] <= LARGEST_HIDDEN


def _is_dropout(module: nn.Module) -> bool:
    return type(module) is nn.Dropout and why_not_passed_by(module) is None
