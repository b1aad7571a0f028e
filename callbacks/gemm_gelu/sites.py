"""Where a model has feed-forward blocks: in an nn.Sequential, and in a BERT layer of the transformers library."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from torch import nn

from fasttrain.callbacks.gemm_gelu.bert import fused_layer, is_bert_layer
from fasttrain.callbacks.gemm_gelu.modules import FusedSequential, block_length, fused_sequential
from fasttrain.patches import ModulePatches, PatchSite
from fasttrain.surgery import joined, why_not_passed_by


class FeedForwardPatches(ModulePatches):
    """Each nn.Sequential that holds Linear, GELU, Linear, and each BERT layer."""

    room: ClassVar[str] = "gemm_gelu"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the modules that hold a block, and are not the model itself."""
        return list(_sites(model))

    def why_no_site(self, model: nn.Module) -> str:
        """Return what the model's GELUs are instead."""
        name = type(model).__name__
        reasons = Counter(reason for module in model.modules() for reason in _reasons(module))
        if not reasons:
            return f"{name} has no nn.GELU in an nn.Sequential"
        texts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return (
            f"{name} has no nn.Sequential, itself apart, in which nn.Linear, nn.GELU and nn.Linear follow one another; "
            f"its nn.GELUs are: {texts}"
        )


def _sites(model: nn.Module) -> Iterator[PatchSite]:
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is None:
                continue
            of_child = joined(path, name)
            if _holds_block(child):
                assert isinstance(child, nn.Sequential)
                yield PatchSite(of_child, child, partial(fused_sequential, child))
            elif is_bert_layer(child):
                yield PatchSite(of_child, child, partial(fused_layer, child))


def _holds_block(module: nn.Module) -> bool:
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        return False
    children = list(module._modules.values())
    return any(block_length(children, at) for at in range(len(children)))


def _reasons(parent: nn.Module) -> Iterator[str]:
    """Yield for each GELU among a parent's children what keeps it from being fused."""
    children = list(parent._modules.values())
    for at, child in enumerate(children):
        if not isinstance(child, nn.GELU):
            continue
        if isinstance(parent, FusedSequential):
            yield "fused already"
        elif type(parent).forward is not nn.Sequential.forward:
            yield f"a child of {type(parent).__name__}, whose forward is its own"
        else:
            yield _why_not_here(children, at)


def _why_not_here(children: list[nn.Module | None], at: int) -> str:
    before = children[at - 1] if at else None
    behind = children[at + 1] if at + 1 < len(children) else None
    for neighbour in (before, children[at], behind):
        if neighbour is not None and (reason := why_not_passed_by(neighbour)):
            return f"beside or in a module {reason}"
    if isinstance(behind, nn.Dropout) and behind.p > 0:
        return f"followed by dropout of {behind.p:g}, which the fused block doesn't have"
    if type(before) is not nn.Linear:
        return f"behind {'nothing' if before is None else type(before).__name__}"
    if behind is None or type(behind) is not nn.Linear:
        return f"before {'nothing' if behind is None else type(behind).__name__}"
    return "in the model itself, which can't be replaced: put it into a module, or use FusedSequential"
