"""Where a model runs a batch normalization that trains into a ReLU.

Three kinds of places: torchvision's residual blocks; neighbours in an nn.Sequential; and two children of any other
module that a symbolic trace of its forward shows to run one into the other, such as the stem of a ResNet. A model may
have frozen normalizations too; those are left to frozen_bn.
"""

from collections import Counter
from functools import partial

from torch import nn

from fasttrain.callbacks.bn_relu.modules import FUSED_BLOCKS, fused_block, fused_norm, fused_stem, is_plain_norm
from fasttrain.callbacks.norm_sites import NormSites
from fasttrain.followed_by import followed_by, is_relu, is_stem_pool
from fasttrain.patches import ModulePatches, PatchSite, PatchSurgery
from fasttrain.surgery import joined, why_not_passed_by


class BNReLUPatches(ModulePatches):
    """The sites: residual blocks, and a normalization with the ReLU behind it.

    Args:
        pool: take the max-pooling behind these two, too, as a ResNet's stem has it.
    """

    room = "bn_relu"

    def __init__(self, pool: bool = False) -> None:
        self.pool = pool

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the places that are not fused yet."""
        found = _SITES.of(model)
        return [_with_pool(model, site) for site in found] if self.pool else found

    def why_no_site(self, model: nn.Module) -> str:
        """Count the model's normalizations by what they lack."""
        reasons = [reason for module in model.modules() if (reason := why_not_trained(module)) != ""]
        name = type(model).__name__
        if not reasons:
            return f"{name} has no BatchNorm2d that could be fused with a ReLU"
        counted = Counter(reason or "in training, with no ReLU seen to follow" for reason in reasons)
        texts = ", ".join(f"{count} {reason}" for reason, count in counted.most_common())
        return (
            f"{name} has no batch normalization in training that a ReLU follows in a torchvision residual block, an "
            f"nn.Sequential or a forward that can be traced; its normalizations are: {texts}"
        )


class BNReLUSurgery(PatchSurgery):
    """Puts the fused forms to every site of a model, and the old modules back. The state dict stays as it is."""

    def __init__(self, model: nn.Module, pool: bool = False) -> None:
        super().__init__(model, BNReLUPatches(pool))


def why_not_trained(module: nn.Module) -> str | None:
    """Return what a normalization is that is not fused, None for one that can be, '' for a module that is none."""
    if isinstance(module, nn.SyncBatchNorm):
        return "SyncBatchNorm, whose statistics are of all processes"
    if not isinstance(module, nn.BatchNorm2d) or type(module).forward is not nn.BatchNorm2d.forward:
        return ""
    if not module.training:
        return "in evaluation mode"
    return why_not_passed_by(module)


def _with_pool(model: nn.Module, site: PatchSite) -> PatchSite:
    """Return a site of a normalization and a ReLU with the max-pooling of a stem, if one follows."""
    if len(site.passed_by) != 1:
        return site
    path, _, relu = site.passed_by[0].rpartition(".")
    parent = model.get_submodule(path)
    pool = dict(followed_by(parent, is_relu, is_stem_pool)).get(relu)
    if pool is None:
        return site
    norm = model.get_submodule(site.path)
    plain = nn.Sequential(norm, parent.get_submodule(relu), parent.get_submodule(pool))
    return PatchSite(site.path, plain, partial(fused_stem, norm), (*site.passed_by, joined(path, pool)))


def _is_site(module: nn.Module) -> bool:
    return is_plain_norm(module) and module.training


_SITES = NormSites(_is_site, fused_block, fused_norm, FUSED_BLOCKS.values())
