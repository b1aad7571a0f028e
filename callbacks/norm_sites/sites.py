"""The places: residual blocks, neighbours in an nn.Sequential, and children that a trace shows to follow each other."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fasttrain.followed_by import followed_by, is_relu
from fasttrain.patches import PatchSite
from fasttrain.surgery import joined

NORMS_OF_BLOCK: dict[type[nn.Module], tuple[str, ...]] = {Bottleneck: ("bn1", "bn2", "bn3"), BasicBlock: ("bn1", "bn2")}


@dataclass(frozen=True)
class NormSites:
    """The sites of a room, given which normalizations are its own."""

    is_ours: Callable[[nn.Module], bool]
    """Whether a module is a normalization that the room fuses."""
    fused_block: Callable[[nn.Module], nn.Module]
    """Makes the fused form of a residual block, all of whose normalizations are the room's."""
    fused_norm: Callable[[nn.Module], nn.Module]
    """Makes that of a normalization with the ReLU behind it."""
    fused_blocks: Collection[type[nn.Module]]
    """Classes of what `fused_block` makes, in which nothing is left to do."""

    def of(self, model: nn.Module) -> list[PatchSite]:
        """Return the places that are not fused yet."""
        return [site for path, parent in model.named_modules() for site in self._in(path, parent)]

    def _in(self, path: str, parent: nn.Module) -> Iterator[PatchSite]:
        if type(parent) in self.fused_blocks:
            return
        for name, child in parent._modules.items():
            if child is not None and self._is_block(child):
                yield PatchSite(joined(path, name), child, partial(self.fused_block, child))
        if not self._is_block(parent):
            for norm, relu in followed_by(parent, self.is_ours, is_relu):
                first, second = parent._modules[norm], parent._modules[relu]
                assert first is not None
                assert second is not None
                plain = nn.Sequential(first, second)
                yield PatchSite(joined(path, norm), plain, partial(self.fused_norm, first), (joined(path, relu),))

    def _is_block(self, module: nn.Module) -> bool:
        if type(module) not in NORMS_OF_BLOCK or "forward" in vars(module):
            return False
        if not is_relu(getattr(module, "relu", None)):
            return False
        return all(self.is_ours(getattr(module, name)) for name in NORMS_OF_BLOCK[type(module)])
