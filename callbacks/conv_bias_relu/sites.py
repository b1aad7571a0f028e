"""Where a model has a convolution with a bias, and whether a ReLU follows it."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from torch import nn

from fasttrain.callbacks.conv_bias_relu.modules import ConvBias, ConvBiasReLU, fused_from, geometry_of
from fasttrain.callbacks.conv_bias_relu.tiers import Tier
from fasttrain.followed_by import followed_by, is_relu
from fasttrain.patches import ModulePatches, PatchSite
from fasttrain.surgery import joined, why_not_passed_by


class ConvBiasReLUPatches(ModulePatches):
    """The sites: Conv2d with bias and the ReLU behind it, and Conv2d with bias alone."""

    room = "conv_bias_relu"

    def __init__(self, tier: Tier = "auto") -> None:
        self.tier: Tier = tier
        """Who computes, at every site."""

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the convolutions that are not fused yet.

        One that stands at several places is fused if a ReLU follows it at all of them, or at none.
        """
        places = [place for path, parent in model.named_modules() for place in _places_in(path, parent)]
        forms: dict[int, set[bool]] = {}
        for _, conv, relu in places:
            forms.setdefault(id(conv), set()).add(relu is not None)
        return [_site(path, conv, relu, self.tier) for path, conv, relu in places if len(forms[id(conv)]) == 1]

    def why_no_site(self, model: nn.Module) -> str:
        """Count the model's convolutions by what they lack."""
        convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        name = type(model).__name__
        if not convs:
            return f"{name} has no Conv2d whose bias could be fused"
        counted = Counter(why_not_fused(conv) or "followed by a ReLU at one of its places only" for conv in convs)
        texts = ", ".join(f"{count} {reason}" for reason, count in counted.most_common())
        return f"{name} has no Conv2d with a bias that can be fused; its convolutions are: {texts}"


def why_not_fused(conv: nn.Module) -> str | None:
    """Return what a convolution is that can't be fused; None for one that can, '' for a module that is none."""
    if not isinstance(conv, nn.Conv2d):
        return ""
    if isinstance(conv, (ConvBiasReLU, ConvBias)):
        return "fused already"
    if type(conv) is not nn.Conv2d:
        return f"of the class {type(conv).__name__}, which may compute otherwise"
    if conv.bias is None:
        return "without bias"
    if conv.padding_mode != "zeros":
        return f"with padding_mode='{conv.padding_mode}'"
    if geometry_of(conv) is None:
        return "with padding='same' and a kernel of even size, which pads one side more"
    return why_not_passed_by(conv)


_Place = tuple[str, nn.Conv2d, tuple[str, nn.Module] | None]


def _places_in(path: str, parent: nn.Module) -> Iterator[_Place]:
    """Yield path and module of each convolution among a module's children, and of the ReLU that it runs into alone."""
    children = parent._modules
    relus = dict(followed_by(parent, _is_conv, is_relu))
    for name, child in children.items():
        if isinstance(child, nn.Conv2d) and why_not_fused(child) is None:
            relu = relus.get(name)
            followed = None if relu is None else (joined(path, relu), parent.get_submodule(relu))
            yield joined(path, name), child, followed


def _site(path: str, conv: nn.Conv2d, relu: tuple[str, nn.Module] | None, tier: Tier) -> PatchSite:
    if relu is None:
        return PatchSite(path, conv, partial(fused_from, conv, ConvBias, tier))
    return PatchSite(path, nn.Sequential(conv, relu[1]), partial(fused_from, conv, ConvBiasReLU, tier), (relu[0],))


def _is_conv(module: nn.Module) -> bool:
    return why_not_fused(module) is None
