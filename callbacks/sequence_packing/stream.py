"""Packed rows from a stream of samples whose number is not known: best fit within a window."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fasttrain.callbacks.sequence_packing.histogram import histogram_of, length_of
from fasttrain.callbacks.sequence_packing.plan import deal, make_plan
from fasttrain.callbacks.sequence_packing.rows import RowFormat, pack_row


def pack_stream(
    samples: Iterable[Mapping[str, Any]], form: RowFormat, *, window: int = 4096, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield rows that hold every sample of a stream once, in an order set by the seed within each window.

    Args:
        samples: in any number; `window` of them are held in memory at a time.
        form: see `rows.format_of`.
        window: samples that are packed together; more of them fit together better.
    """
    held: list[Mapping[str, Any]] = []
    number = 0
    for sample in samples:
        held.append(sample)
        if len(held) == window:
            yield from _rows(held, form, seed, number)
            held, number = [], number + 1
    if held:
        yield from _rows(held, form, seed, number)


def _rows(held: list[Mapping[str, Any]], form: RowFormat, seed: int, number: int) -> Iterator[dict[str, Tensor]]:
    lengths = np.array([length_of(sample, form.length_key, index) for index, sample in enumerate(held)])
    histogram = histogram_of(lengths, form.max_length)
    plan = make_plan(histogram, max_length=form.max_length, max_sequences=form.max_sequences, method="best_fit")
    for row in deal(plan, lengths, seed=seed, epoch=number).tolist():
        yield pack_row([held[index] for index in row if index >= 0], form)
