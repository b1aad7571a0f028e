"""Where a model runs a normalization into a ReLU: a part of the rooms that fuse the two."""

from fasttrain.callbacks.norm_sites.sites import NORMS_OF_BLOCK, NormSites

__all__ = ["NORMS_OF_BLOCK", "NormSites"]
