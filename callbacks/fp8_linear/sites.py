"""Where a model has linear layers whose products can be in FP8."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar

from torch import nn

from fasttrain.callbacks.fp8_linear.backend import MULTIPLE_OF
from fasttrain.callbacks.fp8_linear.modules import in_fp8
from fasttrain.callbacks.fp8_linear.scaling import Scaling
from fasttrain.callbacks.gemm_gelu.bert import is_bert_layer
from fasttrain.callbacks.joined_linear import JoinedLinear
from fasttrain.patches import ModulePatches, PatchSite
from fasttrain.surgery import joined, why_not_passed_by

IN_CHUNK = ("intermediate.dense", "output.dense")


class FP8Patches(ModulePatches):
    """Each nn.Linear of fitting widths with a weight of its own, joined ones, and BERT layers' feed-forward blocks.

    Args:
        scaling: of the tensors.
        leave: patterns of paths to be left in 16 bits, as of file names.
    """

    room: ClassVar[str] = "fp8_linear"

    def __init__(self, scaling: Scaling, leave: Sequence[str] = ()) -> None:
        self.scaling, self.leave = scaling, tuple(leave)

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the modules that are not in FP8 yet."""
        return [
            PatchSite(path, module, partial(in_fp8, module, self.scaling))
            for path, module in self._modules(model)
            if not any(fnmatchcase(path, pattern) for pattern in self.leave)
        ]

    def why_no_site(self, model: nn.Module) -> str:
        """Return what the model's linear layers are instead."""
        name = type(model).__name__
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linears:
            return f"{name} has no nn.Linear"
        shared = _shared(model)
        reasons = Counter(why_not(module, shared) or "left out by `leave`" for module in linears)
        return f"{name} has no nn.Linear for FP8: {', '.join(f'{n} {reason}' for reason, n in reasons.most_common())}"

    def _modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        shared = _shared(model)
        others: set[str] = set()
        for path, parent in model.named_modules():
            for name, child in parent._modules.items():
                inside = joined(path, name)
                if child is None or inside in others:
                    continue
                if type(child) is JoinedLinear and _can_be_joined(parent, child, shared):
                    others |= {joined(path, each) for each in child.names}
                    yield inside, child
                elif is_bert_layer(child) and _has_fitting_block(child, shared):
                    others |= {joined(inside, each) for each in IN_CHUNK}
                    yield inside, child
        for path, module in model.named_modules():
            if path and path not in others and why_not(module, shared) is None:
                yield path, module


def why_not(module: nn.Module, shared: set[int]) -> str | None:
    """Return why a module's products can't be in FP8; None if they can."""
    if type(module) is not nn.Linear:
        return f"{type(module).__name__}"
    if module.in_features % MULTIPLE_OF or module.out_features % MULTIPLE_OF:
        return f"of widths that are no multiples of {MULTIPLE_OF}"
    if id(module.weight) in shared:
        return "whose weight is an embedding's or another layer's too"
    return why_not_passed_by(module)


def _shared(model: nn.Module) -> set[int]:
    # An output layer with the embeddings' weight chooses among words, where a rounding is felt most.
    counts = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    return {key for key, count in counts.items() if count > 1}


def _can_be_joined(parent: nn.Module, joint: JoinedLinear, shared: set[int]) -> bool:
    layers = [parent._modules.get(name) for name in joint.names]
    return why_not_passed_by(joint) is None and all(each and why_not(each, shared) is None for each in layers)


def _has_fitting_block(layer: nn.Module, shared: set[int]) -> bool:
    return all(why_not(layer.get_submodule(name), shared) is None for name in IN_CHUNK)
