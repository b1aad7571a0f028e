"""Sequence packing: several sequences in a row of fixed length, kept apart, in place of padding."""

from fasttrain.callbacks.sequence_packing.attention import (
    AttentionBackend,
    AttentionMask,
    attention_backend,
    block_diagonal,
    block_diagonal_rows,
    mask_for,
    mask_of_rows,
    packed_attention,
)
from fasttrain.callbacks.sequence_packing.data_module import SequencePackingDataModule
from fasttrain.callbacks.sequence_packing.histogram import histogram_of, lengths_of
from fasttrain.callbacks.sequence_packing.losses import mean_loss, mean_of_sequences, next_tokens, over_ranks
from fasttrain.callbacks.sequence_packing.optimization import SequencePackingConfig, SequencePackingOptimization
from fasttrain.callbacks.sequence_packing.plan import PackingPlan, deal, make_plan
from fasttrain.callbacks.sequence_packing.rows import IGNORED, RowFormat, collate_rows, format_of, pack_row
from fasttrain.callbacks.sequence_packing.stream import pack_stream
from fasttrain.callbacks.sequence_packing.table import packing_tables

__all__ = [
    "IGNORED",
    "AttentionBackend",
    "AttentionMask",
    "PackingPlan",
    "RowFormat",
    "SequencePackingConfig",
    "SequencePackingDataModule",
    "SequencePackingOptimization",
    "attention_backend",
    "block_diagonal",
    "block_diagonal_rows",
    "collate_rows",
    "deal",
    "format_of",
    "histogram_of",
    "lengths_of",
    "make_plan",
    "mask_for",
    "mask_of_rows",
    "mean_loss",
    "mean_of_sequences",
    "next_tokens",
    "over_ranks",
    "pack_row",
    "pack_stream",
    "packed_attention",
    "packing_tables",
]
