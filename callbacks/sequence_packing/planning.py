"""The plan for a data module, or for a file of lengths, as tables: what `fasttrain plan packing` shows."""

from pathlib import Path

import lightning.pytorch as pl

from fasttrain.callbacks.sequence_packing.lengths_file import histogram_in
from fasttrain.callbacks.sequence_packing.optimization import SequencePackingConfig, SequencePackingOptimization
from fasttrain.callbacks.sequence_packing.table import packing_tables, plan_tables
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Table


def tables_of_file(
    file: Path, max_length: int | None = None, max_sequences: int | None = None, batch_size: int | None = None
) -> list[Table]:
    """Return the tables of a file of lengths, see `lengths_file.histogram_in`.

    Args:
        max_length: tokens in a row; None is the file's longest.
        max_sequences: most sequences in a row; None is the room's default.
        batch_size: of unpacked batches, to compare with padding to the longest of a batch.
    """
    histogram = histogram_in(file, max_length)
    most = SequencePackingConfig.max_sequences_per_row if max_sequences is None else max_sequences
    return packing_tables(histogram, max_length=len(histogram) - 1, max_sequences=most, batch_size=batch_size)


def tables_of_data(
    optimization: SequencePackingOptimization, data: pl.LightningDataModule, batch_size: int | None = None
) -> list[Table]:
    """Return the tables of a data module's training set, packed as the optimization is configured.

    Args:
        batch_size: see `tables_of_file`; None is the training loader's.

    Raises:
        ConfigError: the training loader can't be packed.
    """
    packing = optimization.data_module(data)
    packing.setup("fit")
    try:
        packed = packing.packed
    except OptimizationError as error:
        raise ConfigError(f"this data can't be packed: {str(error).removesuffix('.')}.") from None
    return plan_tables(packed.plan, batch_size or packed.loader.batch_size)
