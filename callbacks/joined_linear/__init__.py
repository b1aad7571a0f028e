"""Several linear layers of one input as one product: a part of models, and of the rooms that know it."""

from fasttrain.callbacks.joined_linear.joined import JoinedLinear

__all__ = ["JoinedLinear"]
