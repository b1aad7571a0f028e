"""Attention by Triton kernels, in the interpreter, against the obvious version given the same dropout mask."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fasttrain.callbacks.dropout_attention import dropout_attention, make_blocks
from fasttrain.callbacks.dropout_attention.attention import HEAD_SIZES
from fasttrain.callbacks.dropout_attention.blocks import blocks_of, capacity
from fasttrain.callbacks.dropout_attention.forward_kernel import INTERPRETED
from fasttrain.callbacks.dropout_attention.mask import Words, draw_words, keep_mask
from fasttrain.callbacks.dropout_attention.reference import TOLERANCE, attention
from fasttrain.callbacks.dropout_attention.tiling import TILING, Tile, Tiling
from fasttrain.callbacks.joined_linear.columns import split_columns
from fasttrain.callbacks.sequence_packing import mask_for, packed_attention
from fasttrain.errors import OptimizationError
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.model import BertModel

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED.value, reason="Triton's kernels run on a CPU with TRITON_INTERPRET=1 alone"
)
SMALL = Tiling(Tile(32, 16), Tile(16, 32), Tile(16, 32))


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(lengths: list[int], heads: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(sum(lengths), heads, size).to(dtype).requires_grad_() for _ in range(3)]


def ours(parts: list[Tensor], lengths: list[int], **options: Any) -> Tensor:
    tiling = options.pop("tiling", SMALL)
    blocks = make_blocks(offsets(lengths), sum(lengths), tiling)
    return dropout_attention(*parts, blocks, tiling=tiling, **options)


def compare(parts: list[Tensor], lengths: list[int], words: Words | None, dropout: float, **options: Any) -> None:
    """Result and gradients are those of the reference in float64."""
    exact = [part.detach().double().requires_grad_() for part in parts]
    keep = keep_mask(words, dropout) if words else None
    reference = {name: value for name, value in options.items() if name != "tiling"}
    wanted = attention(*exact, lengths, dropout=dropout, keep=keep, **reference)
    found = ours(parts, lengths, words=words, dropout=dropout, **options)
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, parts, upstream)
    wanted_gradients = torch.autograd.grad(wanted, exact, upstream.double())
    for a, b in zip((found, *gradients), (wanted, *wanted_gradients), strict=True):
        assert a.dtype == parts[0].dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCE[a.dtype] * float(1 + b.detach().abs().max()))


@needs_interpreter
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 40]), min_size=1, max_size=4).filter(any),
    causal=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
)
def test_result_and_gradients_of_any_lengths(lengths: list[int], causal: bool, dropout: float) -> None:
    words = draw_words(2, sum(lengths), "cpu") if dropout else None
    compare(inputs(lengths, 2, 16), lengths, words, dropout, causal=causal, scale=0.3)


@needs_interpreter
@pytest.mark.parametrize("size", HEAD_SIZES)
def test_head_sizes_in_16_bits(size: int) -> None:
    lengths = [5, 0, 37]
    compare(inputs(lengths, 1, size, torch.float16), lengths, draw_words(1, 42, "cpu"), 0.1)


@needs_interpreter
def test_tiles_as_on_a_gpu() -> None:
    lengths = [130, 3]
    compare(inputs(lengths, 1, 32), lengths, draw_words(1, 133, "cpu"), 0.1, tiling=TILING)
    compare(inputs(lengths, 1, 32), lengths, draw_words(1, 133, "cpu"), 0.1, tiling=Tiling(*[Tile(32, 32, 8)] * 3))


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
def test_sequences_do_not_see_each_other_even_where_they_are_nan() -> None:
    lengths, middle = [20, 18, 21], slice(20, 38)
    words, parts = draw_words(2, 59, "cpu"), inputs(lengths, 2, 16)
    poisoned = [part.detach().clone() for part in parts]
    for part in poisoned:
        part[:20], part[38:] = torch.nan, torch.inf
    upstream = torch.randn(59, 2, 16)
    poisoned_upstream = upstream.clone()
    poisoned_upstream[:20] = torch.nan
    results = []
    for tensors, up in ((parts, upstream), ([part.requires_grad_() for part in poisoned], poisoned_upstream)):
        found = ours(tensors, lengths, words=words, dropout=0.2)
        results.append([found, *torch.autograd.grad(found, tensors, up)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[middle], b[middle])


@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # in rows that are not written
def test_very_negative_logits_stay_finite() -> None:
    """Where a row's logarithm of sums is far below 0, keys behind the end of the sequence must not count."""
    lengths = [3, 4]
    query, key, value = inputs(lengths, 1, 16)
    key = (-10 * query).detach().requires_grad_()
    compare([query, key, value], lengths, None, 0.0, scale=1.0)


@needs_interpreter
def test_views_of_one_product_get_one_gradient() -> None:
    product = torch.randn(12, 3 * 2 * 16, requires_grad=True)
    parts = [part.unflatten(-1, (2, 16)) for part in split_columns(product, [32] * 3)]
    words = draw_words(2, 12, "cpu")
    found = ours(parts, [12], words=words, dropout=0.1)
    seen: list[Tensor] = []
    parts[0].register_hook(lambda gradient: seen.append(gradient))
    upstream = torch.randn_like(found)
    (gradient,) = torch.autograd.grad(found, product, upstream)
    assert gradient.data_ptr() == seen[0].data_ptr(), "nothing was copied"
    apart = [part.detach().contiguous().requires_grad_() for part in parts]
    again = torch.autograd.grad(ours(apart, [12], words=words, dropout=0.1), apart, upstream)
    assert torch.equal(gradient, torch.cat([each.flatten(1) for each in again], dim=1))


@needs_interpreter
def test_any_strides() -> None:
    base = [torch.randn(2, 12, 16), torch.randn(2, 16, 12), torch.randn(24, 2, 16)]
    parts = [base[0].transpose(0, 1), base[1].permute(2, 0, 1), base[2][::2]]
    dense = [part.contiguous() for part in parts]
    words = draw_words(2, 12, "cpu")
    found = [ours(each, [5, 7], words=words, dropout=0.1) for each in (parts, dense)]
    assert torch.equal(*found)


@needs_interpreter
def test_the_generator_decides_about_the_mask() -> None:
    parts = inputs([20], 1, 16)
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(ours(parts, [20], dropout=0.5))
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], ours(parts, [20], dropout=0.5))
    torch.manual_seed(1)
    again = checkpoint(lambda *tensors: ours(list(tensors), [20], dropout=0.5), *parts, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(found[2].sum(), parts), torch.autograd.grad(again.sum(), parts), strict=True):
        assert torch.equal(a, b), "what is computed again is what was computed"


@needs_interpreter
def test_it_is_a_backend_of_packed_attention() -> None:
    lengths = [4, 0, 12, 9, 7]
    parts = inputs(lengths, 2, 16)
    cu = offsets(lengths)
    mask = mask_for("triton", cu, 2, 16, torch.float32)
    wanted = packed_attention(*parts, cu, 12, rows=2, backend="dense")
    for shared in (None, mask):
        found = packed_attention(*parts, cu, 12, rows=2, backend="triton", mask=shared)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    causal = packed_attention(*parts, cu, 12, rows=2, backend="dense", causal=True)
    found = packed_attention(*parts, cu, 12, rows=2, backend="triton", causal=True)
    torch.testing.assert_close(found, causal, rtol=0, atol=1e-5)


@needs_interpreter
def test_a_bert_of_packed_rows_trains_the_same() -> None:
    words = torch.randint(0, 64, (2, 16))
    cu, places = torch.tensor([0, 10, 16, 16, 32], dtype=torch.int32), torch.arange(16).repeat(2, 1)
    found = []
    for backend in ("dense", "triton"):
        torch.manual_seed(0)
        model = BertModel(
            BertConfig(
                vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, max_positions=16,
                attention=backend, hidden_dropout=0.0, attention_dropout=0.0,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        hidden = model(words, torch.zeros_like(words), places, cu)
        parameters = list(model.encoder.parameters())
        found.append([hidden, *torch.autograd.grad(hidden.square().mean(), parameters)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), size=st.sampled_from([1, 16, 32]),
)  # fmt: skip
def test_blocks_hold_each_token_once(lengths: list[int], size: int) -> None:
    cu, tokens = offsets(lengths), sum(lengths)
    blocks = blocks_of(cu, tokens, size)
    assert blocks.shape == (capacity(len(lengths), tokens, size), 3)
    found, starts = [], set(cu.tolist())
    for begin, length, first in blocks.tolist():
        if length:
            assert begin in starts
            assert begin + length in starts
            assert first % size == 0
        found += range(begin + first, begin + min(length, first + size))
    assert sorted(found) == list(range(tokens))
    assert blocks[:, 1].tolist() == sorted(blocks[:, 1].tolist(), reverse=True), "long sequences first"


@needs_interpreter
def test_what_it_does_not_take() -> None:
    parts, cu = inputs([6], 1, 16), offsets([6])
    blocks = make_blocks(cu, 6)
    for options, message in (
        ({"dropout": 1.0}, "from 0 to less than 1; it is 1.0"),
        ({"dropout": -0.1}, "it is -0.1"),
        ({"scale": 0.0}, "the scale is positive"),
    ):
        with pytest.raises(OptimizationError, match=message):
            dropout_attention(*parts, blocks, **options)  # type: ignore[arg-type]
    with pytest.raises(OptimizationError, match=r"head size of 16, 32, 64, 128; this is torch.float32 of \(6, 1, 24\)"):
        dropout_attention(*[torch.zeros(6, 1, 24)] * 3, blocks)
    with pytest.raises(OptimizationError, match=r"this is torch.float64 of"):
        dropout_attention(*[part.double() for part in parts], blocks)
    with pytest.raises(OptimizationError, match=r"have one shape, dtype and device.*the value torch.float32 of \(5, 1"):
        dropout_attention(parts[0], parts[1], parts[2][:5], blocks)
    found = dropout_attention(*parts, blocks)
    with pytest.raises(OptimizationError, match="have no second derivative"):
        torch.autograd.grad(found.sum(), parts, create_graph=True)


@pytest.mark.skipif(INTERPRETED.value, reason="interpreted, kernels run on a CPU")
def test_a_cpu_has_no_kernels() -> None:
    parts = inputs([6], 1, 16)
    with pytest.raises(OptimizationError, match=r"for NVIDIA GPUs; these tensors are on cpu.*backend='dense'"):
        dropout_attention(*parts, make_blocks(offsets([6]), 6))
