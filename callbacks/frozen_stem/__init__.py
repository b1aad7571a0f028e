"""The frozen stem of a residual network: convolution of 7 x 7, frozen batch norm, ReLU and max-pooling."""

from fasttrain.callbacks.frozen_stem.optimization import FrozenStemConfig, FrozenStemOptimization, FusedFrozenStem
from fasttrain.callbacks.frozen_stem.sites import FrozenStemSurgery
from fasttrain.callbacks.frozen_stem.stem import FrozenStem, frozen_stem

__all__ = [
    "FrozenStem",
    "FrozenStemConfig",
    "FrozenStemOptimization",
    "FrozenStemSurgery",
    "FusedFrozenStem",
    "frozen_stem",
]
