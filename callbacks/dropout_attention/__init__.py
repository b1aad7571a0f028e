"""Attention within packed sequences, with dropout, as Triton kernels: a part of `sequence_packing`."""

from fasttrain.callbacks.dropout_attention.attention import can_take, dropout_attention
from fasttrain.callbacks.dropout_attention.blocks import Blocks, make_blocks

__all__ = ["Blocks", "can_take", "dropout_attention", "make_blocks"]
