"""What a packed row and a batch of rows hold."""

from typing import Any

import numpy as np
import pytest
import torch
from packed_sequences import MOST, bert_format, sequence, sequences

from fasttrain.callbacks.sequence_packing import (
    collate_rows,
    format_of,
    pack_row,
    pack_stream,
)
from fasttrain.callbacks.sequence_packing.rows import IGNORED
from fasttrain.errors import DataError


def test_what_a_row_holds() -> None:
    one, other = sequence(5, 1), sequence(7, 2)
    row = pack_row([one, other], bert_format([one, other]))
    assert row["input_ids"].tolist() == [*one["input_ids"].tolist(), *other["input_ids"].tolist(), 0, 0, 0, 0]
    assert row["labels"][12:].tolist() == [IGNORED] * 4
    assert row["position_ids"].tolist() == [*range(5), *range(7), 0, 0, 0, 0]
    assert row["sequence_ids"].tolist() == [1] * 5 + [2] * 7 + [0] * 4
    assert row["sequence_lengths"].tolist() == [5, 7, 0]
    assert row["next_sentence_label"].tolist() == [
        int(one["next_sentence_label"]),
        int(other["next_sentence_label"]),
        -100,
    ]
    places = [*one["masked_lm_positions"].tolist(), *(other["masked_lm_positions"] + 5).tolist()]
    assert row["masked_lm_positions"].tolist() == places + [0] * (12 - len(places))
    assert (
        row["input_ids"][row["masked_lm_positions"][: len(places)]].tolist()
        == row["masked_lm_ids"][: len(places)].tolist()
    )
    assert row["masked_lm_ids"][len(places) :].eq(IGNORED).all()


def test_offsets_have_room_for_every_batch_and_the_same_shape() -> None:
    samples = sequences([5, 7, 16, 4, 3, 2])
    form = bert_format(samples)
    rows = [pack_row([samples[i] for i in row], form) for row in ([0, 1], [2], [3, 4, 5], [])]
    batch = collate_rows(rows, form)
    assert batch["cu_seqlens"].tolist() == [0, 5, 12, 16, 16, 32, 32, 32, 32, 36, 39, 41, 48, 64, 64, 64, 64]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["sequence_starts"].tolist() == [[0, 5, 0], [16, 0, 0], [32, 36, 39], [0, 0, 0]]
    assert batch["num_sequences"] == 6
    by_count = collate_rows(rows, form, static=False)
    assert by_count["cu_seqlens"].tolist() == [0, 5, 12, 16, 32, 32, 36, 39, 41, 48, 64]
    assert by_count["sequence_starts"].tolist() == [0, 5, 16, 32, 36, 39]
    assert by_count["sequence_lengths"].tolist() == [5, 7, 16, 4, 3, 2]
    assert by_count["next_sentence_label"].tolist() == [int(s["next_sentence_label"]) for s in samples]


def test_values_may_be_lists_numbers_arrays_and_vectors_by_token() -> None:
    samples = [{"ids": [1, 2, 3], "features": np.ones((3, 2), np.float32), "weight": 0.5, "class_label": 4}]
    form = format_of(samples[0], length_key="ids", max_length=5, max_sequences=2, padding={"weight": 0.0})
    row = pack_row(samples, form)
    assert row["features"].tolist() == [[1, 1]] * 3 + [[0, 0]] * 2
    assert row["weight"].tolist() == [0.5, 0.0]
    assert row["class_label"].tolist() == [4, IGNORED]
    empty = pack_row([], form)
    assert {name: (v.shape, v.dtype) for name, v in empty.items()} == {
        name: (v.shape, v.dtype) for name, v in row.items()
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"position_ids": [0, 1]},
            r"^samples have a 'position_ids', which packing makes anew for each row; leave it out",
        ),
        ({"attention_mask": [1, 1]}, r"^samples have an 'attention_mask': one entry a token does not keep packed seq"),
        (
            {"text": "a b"},
            r"^'text' is a str, but the sample has 2 tokens \('input_ids'\): neither one entry a token nor",
        ),
        (
            {"spans": [1, 2, 3]},
            r"^'spans' is of shape \[3\], but the sample has 2 tokens .* Name it in `lists`, in `pos",
        ),
    ],
)
def test_values_that_fit_in_no_row(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        format_of({"input_ids": [1, 2], **extra}, length_key="input_ids", max_length=8, max_sequences=3)


def test_rows_that_samples_do_not_fit_in() -> None:
    samples = sequences([9, 8])
    form = bert_format(samples, list_capacity=1)
    with pytest.raises(
        DataError, match=r"^sequences of 9, 8 tokens do not fit in a row of 16 tokens and 3 sequences\.$"
    ):
        pack_row(samples, form)
    many = {**sequence(9, 0), "masked_lm_positions": torch.arange(3), "masked_lm_ids": torch.arange(3)}
    with pytest.raises(
        DataError, match=r"^a row has 3 entries of 'masked_lm_ids', but room for 1; set list_capacity to 3"
    ):
        pack_row([many], form)
    with pytest.raises(
        DataError, match=r"^'labels' has not one entry for each token of its sequence, as it has in the"
    ):
        pack_row([{**many, "labels": torch.zeros(4)}], form)
    del many["labels"]
    with pytest.raises(DataError, match=r"^a sample has no 'labels', which the first one has\.$"):
        pack_row([many], form)
    with pytest.raises(DataError, match=r"^'spans' is named as a list, but samples have input_ids, "):
        bert_format(samples, lists=("spans",))


def test_a_shortened_sample_keeps_the_targets_that_still_have_a_place() -> None:
    sample = {
        **sequence(20, 0),
        "masked_lm_positions": torch.tensor([2, 15, 16]),
        "masked_lm_ids": torch.tensor([7, 8, 9]),
    }
    cut = bert_format([sample]).shortened(sample)
    assert len(cut["input_ids"]) == len(cut["labels"]) == MOST
    assert cut["masked_lm_positions"].tolist() == [2, 15]
    assert cut["masked_lm_ids"].tolist() == [7, 8]


def test_a_stream_is_packed_within_its_window() -> None:
    samples = sequences([1 + (7 * i) % MOST for i in range(50)])
    rows = list(pack_stream(iter(samples), bert_format(samples), window=20, seed=1))
    found = [length for row in rows for length in row["sequence_lengths"].tolist() if length]
    assert sorted(found) == sorted(len(sample["input_ids"]) for sample in samples)
    assert len(rows) < 40
