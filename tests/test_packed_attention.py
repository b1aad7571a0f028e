"""Attention of packed rows is that of each sequence by itself, and its masks agree."""

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_sequences import MOST, packed_batch, sequences
from torch import Tensor

from fasttrain.callbacks.sequence_packing import (
    attention,
    block_diagonal,
    block_diagonal_rows,
    mask_for,
    mask_of_rows,
    packed_attention,
)
from fasttrain.callbacks.sequence_packing.reference import attention_reference
from fasttrain.errors import MissingDependencyError


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), causal=st.booleans())
def test_attention_equals_sequence_by_sequence(lengths: list[int], causal: bool) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    made = [torch.randn(sum(lengths), 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    there = [length for length in lengths if length]
    for scale in (None, 0.3):
        found = packed_attention(*made, offsets, max(lengths), causal=causal, scale=scale)
        wanted = attention_reference(*made, there, causal=causal, scale=scale)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        upstream = torch.randn_like(wanted)
        for a, b in zip(
            torch.autograd.grad(found, made, upstream), torch.autograd.grad(wanted, made, upstream), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_that_is_not_installed() -> None:
    part, offsets = torch.zeros(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(MissingDependencyError, match=r"needs the package flash-attn; `pip install fl"):
        packed_attention(part, part, part, offsets, 2, backend="flash_attn")


def test_torchs_kernel_is_asked_as_its_version_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def newer(query: Tensor, *_: Any, scale: Any = None, window_size: Any = (-1, -1)) -> Tensor:
        asked.append({"query": query, "scale": scale, "window": window_size})
        return query

    def older(query: Tensor, *_: Any, is_causal: bool = False) -> Tensor:
        asked.append({"query": query, "causal": is_causal})
        return query

    part, offsets = torch.ones(2, 1, 4), torch.tensor([0, 2], dtype=torch.int32)
    for function in (newer, older):
        monkeypatch.setattr(attention, "varlen", SimpleNamespace(varlen_attn=function))
        monkeypatch.setattr(attention, "VARLEN_OPTIONS", frozenset(inspect.signature(function).parameters))
        packed_attention(part, part, part, offsets, 2, causal=True, scale=1.0, backend="varlen")
    assert (asked[0]["scale"], asked[0]["window"]) == (1.0, (-1, 0))
    assert asked[1]["causal"]
    assert asked[1]["query"].tolist() == (2 * part).tolist(), "the scale it knows is 1 / sqrt(4)"


@pytest.mark.parametrize("causal", [False, True])
def test_masks_by_offsets_and_by_rows_are_the_same(causal: bool) -> None:
    batch = packed_batch(sequences([5, 7, 4, 9, 3, 16, 2]))
    rows = len(batch["input_ids"])
    by_row = mask_of_rows(batch["sequence_ids"], causal=causal)
    whole = block_diagonal(batch["cu_seqlens"], rows * MOST, causal=causal).view(rows, MOST, rows, MOST)
    for row in range(rows):
        assert torch.equal(whole[row, :, row], by_row[row, 0])
        assert not whole[row, :, torch.arange(rows) != row].any()


def test_a_backend_s_mask_is_bool_or_a_bias() -> None:
    offsets = torch.tensor([0, 2, 4, 8], dtype=torch.int32)
    allowed = mask_for("dense", offsets, 2, 4, torch.float32)
    assert allowed is not None
    assert torch.equal(allowed, block_diagonal_rows(offsets, 2, 4))
    bias = mask_for("cudnn", offsets, 2, 4, torch.bfloat16)
    assert bias is not None
    assert bias.dtype == torch.bfloat16
    assert torch.equal(bias == 0, allowed)
    assert bool((bias[~allowed] == -torch.inf).all())
    assert mask_for("varlen", offsets, 2, 4, torch.bfloat16) is None
