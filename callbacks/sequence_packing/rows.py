"""What a packed row holds, made from its sequences, and batches of rows in static shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fasttrain.errors import DataError

IGNORED = -100
"""What a target is where there is none: `ignore_index` of PyTorch's cross-entropy."""
ADDED = (
    "position_ids", "sequence_ids", "sequence_lengths", "sequence_starts", "cu_seqlens", "num_sequences",
)  # fmt: skip
"""What packing adds to a batch."""


@dataclass(frozen=True, eq=False)
class RowFormat:
    """What the values of a sample are, and how large rows are."""

    max_length: int
    max_sequences: int
    length_key: str
    tokens: Mapping[str, float]
    """Values with an entry for each token, and what they are filled up with. Rows hold them one behind another."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """One value a sequence, `next_sentence_label` for instance; rows hold (max_sequences, ...) of them."""
    lists: Mapping[str, float] = field(default_factory=dict)
    """As many entries as the sequence likes, `masked_lm_ids` for instance, the same number in each of these."""
    positions: frozenset[str] = frozenset()
    """Those of `lists` that are places in the sequence: they are moved to where the sequence lies in the row."""
    list_capacity: int = 0
    """Entries of each of `lists` in a row."""
    empty: Mapping[str, Tensor] = field(default_factory=dict)
    """Of each value no entries, (0, ...), in its dtype: what a row without sequences is made from."""

    @cached_property
    def filling(self) -> dict[str, Tensor]:
        """Of each value as many entries of what rows are filled up with as a row has places."""
        sizes = (
            (self.tokens, self.max_length), (self.targets, self.max_sequences), (self.lists, self.list_capacity),
        )  # fmt: skip
        return {
            name: self.empty[name].new_full((size, *self.empty[name].shape[1:]), fill)
            for fills, size in sizes
            for name, fill in fills.items()
        }

    @cached_property
    def places(self) -> Tensor:
        """Return (max_length,) 0, 1, 2 and so on, int64."""
        return torch.arange(self.max_length)

    @cached_property
    def no_places(self) -> Tensor:
        """Return (max_length,) zeros, int64."""
        return torch.zeros_like(self.places)

    @cached_property
    def numbers(self) -> Tensor:
        """Return (max_sequences + 1, max_length) int32: a row of each sequence's number, the last of zeros."""
        numbers = torch.arange(1, self.max_sequences + 2, dtype=torch.int32) % (self.max_sequences + 1)
        return numbers[:, None].expand(-1, self.max_length).contiguous()

    def shortened(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample cut off after `max_length` tokens, without the entries of its lists that lose their place."""
        sample = dict(sample)
        kept = None
        for name in self.positions:
            kept = torch.as_tensor(sample[name]) < self.max_length
        for name in self.tokens:
            sample[name] = sample[name][: self.max_length]
        for name in self.lists if kept is not None else ():
            sample[name] = torch.as_tensor(sample[name])[kept]
        return sample


def format_of(
    sample: Mapping[str, Any],
    *,
    length_key: str,
    max_length: int,
    max_sequences: int,
    lists: Sequence[str] = (),
    positions: Sequence[str] = (),
    list_capacity: int | None = None,
    padding: Mapping[str, float] | None = None,
) -> RowFormat:
    """Return the format of a sample: what has as many entries as `length_key` goes by token, numbers by sequence.

    Args:
        lists: keys of values with another number of entries; `positions` belong to them and need not be repeated.
        positions: keys of lists that hold places in the sequence.
        list_capacity: entries of each list in a row; None is a sixth of the row's tokens, at least 8, which the masking
            of BERT (15 %, at least 1 a sequence) does not exceed.
        padding: what to fill up with, by key; else -100 for names that end in `label`, `labels` or `targets`, and for
            lists that are no positions, and 0 for all others.

    Raises:
        DataError: a value is none of these, or has the name of what packing adds.
    """
    given = dict(padding or {})
    listed = list(dict.fromkeys([*lists, *positions]))
    count = len(sample[length_key])
    tokens: dict[str, float] = {}
    targets: dict[str, float] = {}
    for name in listed:
        if name not in sample:
            raise DataError(f"'{name}' is named as a list, but samples have {', '.join(map(str, sample))}.")
    for name, value in sample.items():
        if name in ADDED:
            raise DataError(f"samples have a '{name}', which packing makes anew for each row; leave it out of them.")
        if name == "attention_mask":
            raise DataError(
                "samples have an 'attention_mask': one entry a token does not keep packed sequences apart, and a model "
                "that is given it would let them see each other. Leave it out of the samples, or name it in `drop`."
            )
        if name in listed:
            continue
        shape = tuple(torch.as_tensor(value).shape) if _is_numeric(value) else None
        fill = given.get(name, IGNORED if name.endswith(("label", "labels", "targets")) else 0)
        if shape is not None and shape[:1] == (count,):
            tokens[name] = fill
        elif shape == ():
            targets[name] = given.get(name, IGNORED)
        else:
            found = "a " + type(value).__name__ if shape is None else f"of shape {list(shape)}"
            raise DataError(
                f"'{name}' is {found}, but the sample has {count} tokens ('{length_key}'): neither one entry a token "
                "nor one number a sequence. Name it in `lists`, in `positions` if its entries are places in the "
                "sequence, or in `drop`."
            )
    empty = {name: torch.as_tensor(sample[name])[:0] for name in (*tokens, *listed)}
    empty |= {name: torch.as_tensor(sample[name])[None][:0] for name in targets}
    fills = {name: given.get(name, 0 if name in positions else IGNORED) for name in listed}
    capacity = list_capacity if list_capacity is not None else max(8, -(-max_length // 6))
    capacity = capacity if fills else 0
    return RowFormat(
        max_length, max_sequences, length_key, tokens, targets, fills, frozenset(positions), capacity, empty
    )


def pack_row(samples: Sequence[Mapping[str, Any]], form: RowFormat) -> dict[str, Tensor]:
    """Return one row: the sequences one behind another, then padding.

    Beside the samples' own values it holds `position_ids` (max_length,), which start again at 0 in each sequence,
    `sequence_ids` (max_length,) int32: 1 for the row's first sequence, 0 for padding, and `sequence_lengths`
    (max_sequences,) int32.

    Raises:
        DataError: the samples do not fit, or are not of the format.
    """
    lengths = [len(sample[form.length_key]) for sample in samples]
    if sum(lengths) > form.max_length or len(samples) > form.max_sequences:
        raise DataError(
            f"sequences of {', '.join(map(str, lengths))} tokens do not fit in a row of {form.max_length} tokens and "
            f"{form.max_sequences} sequences."
        )
    row: dict[str, Tensor] = {}
    used, filling = sum(lengths), form.filling
    for name in form.tokens:
        values = [_value(sample, name) for sample in samples]
        if [len(value) for value in values] != lengths:
            raise DataError(
                f"'{name}' has not one entry for each token of its sequence, as it has in the first sample."
            )
        row[name] = torch.cat([*values, filling[name][used:]])
    for name in form.targets:
        values = [_value(sample, name)[None] for sample in samples]
        row[name] = torch.cat([*values, filling[name][len(samples) :]])
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    for name in form.lists:
        values = [_value(sample, name) for sample in samples]
        if name in form.positions:
            values = [value + start if start else value for value, start in zip(values, starts, strict=True)]
        if (found := sum(map(len, values))) > form.list_capacity:
            raise DataError(
                f"a row has {found} entries of '{name}', but room for {form.list_capacity}; set list_capacity to "
                f"{found} or more."
            )
        row[name] = torch.cat([*values, filling[name][found:]])
    numbers = [form.numbers[number, :length] for number, length in enumerate(lengths)]
    left = form.max_length - used
    row["position_ids"] = torch.cat([*(form.places[:length] for length in lengths), form.no_places[:left]])
    row["sequence_ids"] = torch.cat([*numbers, form.numbers[-1, :left]])
    row["sequence_lengths"] = torch.tensor(lengths + [0] * (form.max_sequences - len(lengths)), dtype=torch.int32)
    return row


def collate_rows(rows: Sequence[Mapping[str, Tensor]], form: RowFormat, *, static: bool = True) -> dict[str, Tensor]:
    """Return a batch of rows.

    Tokens are (rows, max_length, ...). Added are

    - `cu_seqlens`, int32: where each sequence of the flattened batch (rows x max_length) begins, and the end. A row's
      padding is a sequence by itself, so that attention computes every place and no gradient is left unwritten.
      Places that are not needed repeat the row's end: sequences without tokens.
    - `sequence_starts`, int64: place of each sequence's first token in the flattened batch, for pooled outputs; 0 where
      there is no sequence.
    - `num_sequences`, int64 (): sequences in the batch.

    Args:
        static: every batch has the same shapes: cu_seqlens (rows * (max_sequences + 1) + 1,), targets, starts and
            lengths (rows, max_sequences). Otherwise shapes follow the number of sequences N: cu_seqlens
            (N + rows + 1,), targets, starts and lengths (N,), so that a captured step has a graph for each N.
    """
    lengths = torch.stack([row["sequence_lengths"] for row in rows])
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    ends = lengths.cumsum(dim=1, dtype=torch.int64)
    row_starts = torch.arange(len(rows))[:, None] * form.max_length
    there = lengths > 0
    starts = torch.where(there, row_starts + ends - lengths, 0)
    # Behind the row's sequences comes its end as often as there are places left; the first of them closes the padding.
    bounds = torch.where(there, row_starts + ends, row_starts + form.max_length)
    bounds = torch.cat([bounds, row_starts + form.max_length], dim=1)
    if static:
        batch["sequence_starts"] = starts
        flat = bounds.flatten()
    else:
        for name in (*form.targets, "sequence_lengths"):
            batch[name] = batch[name][there]
        batch["sequence_starts"] = starts[there]
        flat = bounds[torch.cat([there, torch.ones(len(rows), 1, dtype=torch.bool)], dim=1)]
    batch["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), flat]).to(torch.int32)
    batch["num_sequences"] = there.sum()
    return batch


def _value(sample: Mapping[str, Any], name: str) -> Tensor:
    try:
        return torch.as_tensor(sample[name])
    except KeyError:
        raise DataError(f"a sample has no '{name}', which the first one has.") from None


def _is_numeric(value: Any) -> bool:
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
