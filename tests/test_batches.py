"""Batches of any structure: what is looked into, kept, told apart and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batch_structures import STRUCTURES, Point, Sample, some
from torch import nn

from fasttrain.batches import OpaqueLeaf, flatten, map_tensors, named_tensors, tensors_in


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_are_looked_into_and_kept(make: Callable[[], Any]) -> None:
    batch = make()
    tensors = list(tensors_in(batch))
    leaves, signature = flatten(batch)
    assert len(tensors) == len(leaves) >= 1
    assert all(one is other for one, other in zip(tensors, leaves, strict=True))
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(changed) is type(batch)
    for tensor, new in zip(tensors, tensors_in(changed), strict=True):
        assert torch.equal(new, tensor + 1)
    assert all(one is other for one, other in zip(tensors_in(batch), tensors, strict=True)), "the batch is as it was"
    assert flatten(map_tensors(batch, torch.clone))[1] == signature
    assert hash(signature) == hash(flatten(make())[1])
    assert flatten(make())[1] == signature
    assert len({place for place, _ in named_tensors(batch)}) == len(tensors)


def test_packed_sequences_are_leaves() -> None:
    batch = [nn.utils.rnn.pack_sequence([some(2), some(1)]), some(1)]
    assert len(list(tensors_in(batch))) == 1
    assert map_tensors(batch, torch.neg)[0] is batch[0], "its lengths may not leave the host"


def test_a_copy_keeps_what_else_a_batch_holds() -> None:
    encoding = STRUCTURES["encoding"]()
    other = map_tensors(encoding, torch.clone)
    assert other.encodings == "kept"
    assert other.data is not encoding.data
    assert list(STRUCTURES["nested"]()[1][1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([some(2)], (some(2),)),
        ({"a": some(2)}, {"b": some(2)}),
        ({"a": some(2), "b": some(2)}, {"b": some(2), "a": some(2)}),
        ([some(2)], [some(2).double()]),
        ([some(2, 1)], [some(1, 2)]),
        ([some(2), 1], [some(2), True]),
        ([some(2), 1], [some(2), 1.0]),
        ([some(2), None], [some(2)]),
        (Sample(some(1), [], 3), Sample(some(1), [], 4)),
        (Point(some(1), "a"), Point(some(1), "b")),
        (Point(some(1), "a"), (some(1), "a")),
    ],
)
def test_signatures_differ(one: Any, other: Any) -> None:
    assert flatten(one)[1] != flatten(other)[1]


def test_a_signature_reads_as_shapes() -> None:
    batch = {"ids": torch.zeros(2, 3, dtype=torch.int64), "rest": [some(4), 1]}
    assert str(flatten(batch)[1]) == "int64[2, 3] float32[4]"
    assert [place for place, _ in named_tensors(batch)] == ["ids", "rest.0"]
    assert [place for place, _ in named_tensors([Point(some(1), ""), Sample(some(1), [some(1)])])] == [
        "0.x", "1.image", "1.boxes.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ([1, {"a": object()}], "batch[1]['a'] is a builtins.object"),
        (Sample(some(1), [object()]), "batch.boxes[0] is a builtins.object"),  # type: ignore[list-item]
        ([nn.utils.rnn.pack_sequence([some(2), some(1)])], "batch[0] is a torch.nn.utils.rnn.PackedSequence"),
    ],
)
def test_opaque_leaves_are_named(batch: Any, sentence: str) -> None:
    with pytest.raises(OpaqueLeaf) as caught:
        flatten(batch)
    assert str(caught.value) == sentence
