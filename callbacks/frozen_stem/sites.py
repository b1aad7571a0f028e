"""Where a model has a frozen stem: four children of one module that run one into the next."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.folded_norm import Folded, why_not_frozen
from fasttrain.callbacks.frozen_stem.stem import ROOM, FrozenStem
from fasttrain.followed_by import followed_by, is_relu, is_stem_pool
from fasttrain.patches import ModulePatches, PatchSite, PatchSurgery
from fasttrain.surgery import joined, why_not_passed_by, with_state_of


class FrozenStemPatches(ModulePatches):
    """Convolutions of 7 x 7 that don't train, with a frozen normalization, a ReLU and a max-pooling behind them."""

    room = ROOM

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the stems that are not fused yet."""
        return list(chain.from_iterable(_in(path, parent) for path, parent in model.named_modules()))

    def why_no_site(self, model: nn.Module) -> str:
        """Say what the model's convolutions of 7 x 7 lack, or that it has none."""
        name = type(model).__name__
        stems = [(path, module) for path, module in model.named_modules() if _has_the_shape(module)]
        if not stems:
            return f"{name} has no convolution of 7 x 7 and stride 2 over three channels, with which such a stem begins"
        path, conv = stems[0]
        if conv.weight.requires_grad:
            return f"{name} has no frozen stem: the weight of '{path}' trains"
        return (
            f"{name} has no frozen stem: it is not seen that a FrozenBatchNorm2d, a ReLU and a max-pooling of 3 x 3 "
            f"and stride 2 follow '{path}'"
        )


class FrozenStemSurgery(PatchSurgery):
    """Puts a FrozenStem to every site of a model, and the old modules back. The state dict stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, FrozenStemPatches())


def _in(path: str, parent: nn.Module) -> Iterator[PatchSite]:
    if not any(_is_frozen_conv(child) for child in parent._modules.values()):
        return
    norm_of = dict(followed_by(parent, _is_frozen_conv, _is_frozen_norm))
    relu_of = dict(followed_by(parent, _is_frozen_norm, is_relu))
    pool_of = dict(followed_by(parent, is_relu, is_stem_pool))
    for conv, norm in norm_of.items():
        names = [conv, norm, relu_of.get(norm, ""), pool_of.get(relu_of.get(norm, ""), "")]
        if all(names):
            parts: list[Any] = [parent._modules[name] for name in names]
            fused = partial(_fused, parts[0], parts[1])
            yield PatchSite(
                joined(path, conv), nn.Sequential(*parts), fused, tuple(joined(path, name) for name in names[1:])
            )


def _fused(conv: nn.Module, norm: nn.Module) -> FrozenStem:
    fused = with_state_of(conv, FrozenStem)
    fused._folded = Folded(norm, ROOM)
    return fused


def _has_the_shape(module: Any) -> bool:
    return (
        type(module) is nn.Conv2d
        and (module.in_channels, module.kernel_size, module.stride, module.padding) == (3, (7, 7), (2, 2), (3, 3))
        and (module.groups, module.dilation, module.padding_mode, module.bias) == (1, (1, 1), "zeros", None)
    )


def _is_frozen_conv(module: Any) -> bool:
    return _has_the_shape(module) and not module.weight.requires_grad and why_not_passed_by(module) is None


def _is_frozen_norm(module: nn.Module) -> bool:
    # One in eval mode might be put into training later, and nobody here would learn of it.
    return isinstance(module, FrozenBatchNorm2d) and why_not_frozen(module) is None
