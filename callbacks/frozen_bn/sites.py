"""Where a model runs a frozen normalization into a ReLU, and how the fused forms get there and away again.

Three kinds of places: torchvision's residual blocks; neighbours in an nn.Sequential; and two children of any other
module that a symbolic trace of its forward shows to run one into the other, such as the stem of a ResNet.
"""

from collections import Counter

from torch import nn

from fasttrain.callbacks.folded_norm import why_not_frozen
from fasttrain.callbacks.frozen_bn.modules import FUSED_BLOCKS, fused_block, fused_norm
from fasttrain.callbacks.norm_sites import NormSites
from fasttrain.patches import ModulePatches, PatchSite, PatchSurgery


class FrozenBNPatches(ModulePatches):
    """The sites: residual blocks, and a normalization with the ReLU behind it."""

    room = "frozen_bn"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the places that are not fused yet."""
        return _SITES.of(model)

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


def _is_frozen(module: nn.Module) -> bool:
    return why_not_frozen(module) is None


_SITES = NormSites(_is_frozen, fused_block, fused_norm, FUSED_BLOCKS.values())
