"""The plan for as many sequences as BERT's Wikipedia has, the making of rows, and attention within them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fasttrain.bench import Case
from fasttrain.callbacks.sequence_packing.attention import mask_of_rows, packed_attention
from fasttrain.callbacks.sequence_packing.bench_attention import attention_b56
from fasttrain.callbacks.sequence_packing.histogram import histogram_of
from fasttrain.callbacks.sequence_packing.plan import deal, make_plan
from fasttrain.callbacks.sequence_packing.rows import collate_rows, format_of, pack_row
from fasttrain.measure import Row, captured, make_row, sample_ms

LENGTH, SEQUENCES = 512, 16_279_552  # MLPerf's BERT: tokens of a row, and sequences of its training set
Three = tuple[Tensor, Tensor, Tensor]
ROWS, HEADS, HEAD_SIZE = 24, 16, 64  # BERT-large; 24 packed rows hold about 48 sequences


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case(
            "sequence_packing", "plan_16m", f"the plan for {SEQUENCES:,} sequences, and an epoch dealt to it", plan_16m
        ),
        Case("sequence_packing", "rows_b24", "24 rows of 512 from BERT's sequences, by one process", rows_b24),
        Case(
            "sequence_packing", "attention_b24", "attention of BERT-large in 24 rows of 512, bf16", attention_b24, True
        ),
        Case("sequence_packing", "attention_b56", "the same in 56 rows, with dropout", attention_b56, True),
    ]


def generated_lengths(count: int, seed: int = 0) -> NDArray[np.uint16]:
    """Return lengths like those of BERT's Wikipedia: even in their logarithm, a quarter of them cut off at 512."""
    random = np.random.default_rng(seed)
    lengths = 34 * np.exp(3.55 * random.random(count) + 0.35 * random.standard_normal(count))
    found: NDArray[np.uint16] = lengths.clip(5, LENGTH).astype(np.uint16)
    return found


def plan_16m() -> Iterator[Row]:
    """Yield seconds and efficiency."""
    lengths = generated_lengths(SEQUENCES)
    histogram = histogram_of(lengths, LENGTH)
    for variant, method in (("ours", "mixture"), ("best_fit", "best_fit")):
        plan = make_plan(histogram, max_length=LENGTH, method=method)  # type: ignore[arg-type]
        seconds = [_seconds(lambda m=method: make_plan(histogram, max_length=LENGTH, method=m)) for _ in range(3)]  # type: ignore[misc]
        note = f"{plan.rows:,} rows, generated lengths, fill {plan.padded_fill:.1%} unpacked"
        yield make_row("sequence_packing", "plan_16m", variant, "plan_seconds", "s", seconds, note)
        yield make_row("sequence_packing", "plan_16m", variant, "efficiency", "%", [100 * plan.efficiency], note)
        if variant == "ours":
            dealt = [_seconds(lambda p=plan, e=e: deal(p, lengths, seed=0, epoch=e)) for e in range(3)]  # type: ignore[misc]
            yield make_row("sequence_packing", "plan_16m", variant, "deal_seconds", "s", dealt, "an epoch's rows")


def rows_b24() -> Iterator[Row]:
    """Yield milliseconds of a batch, and what that is in sequences a second."""
    random = np.random.default_rng(0)
    samples = [
        {"input_ids": torch.zeros(int(n), dtype=torch.int64), "token_type_ids": torch.zeros(int(n), dtype=torch.int64),
         "labels": torch.full((int(n),), -100), "next_sentence_label": torch.tensor(0)}
        for n in generated_lengths(480)
    ]  # fmt: skip
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    form = format_of(
        max(samples, key=lambda s: len(s["input_ids"])), length_key="input_ids", max_length=LENGTH, max_sequences=3
    )
    members = deal(make_plan(histogram_of(lengths, LENGTH), max_length=LENGTH, method="best_fit"), lengths, seed=0)
    chosen = members[random.permutation(len(members))[:ROWS]].tolist()

    def batch() -> Any:
        return collate_rows([pack_row([samples[i] for i in row if i >= 0], form) for row in chosen], form)

    times = sample_ms(batch, "cpu", repeats=20)
    count = int(batch()["num_sequences"])
    yield make_row("sequence_packing", "rows_b24", "ours", "batch_ms", "ms", times, f"{count} sequences")
    rates = [count / ms * 1e3 for ms in times]
    yield make_row("sequence_packing", "rows_b24", "ours", "sequences_per_second", "1/s", rates, "one process")


def attention_b24() -> Iterator[Row]:
    """Yield milliseconds of forward and backward, replayed as a CUDA graph, for the same sequences."""
    lengths = generated_lengths(2 * ROWS)
    form = format_of({"ids": [1, 2]}, length_key="ids", max_length=LENGTH, max_sequences=3)
    members = deal(make_plan(histogram_of(lengths, LENGTH), max_length=LENGTH, method="best_fit"), lengths, seed=0)
    samples = [{"ids": torch.ones(int(n), dtype=torch.int64)} for n in lengths]
    rows = [pack_row([samples[i] for i in row if i >= 0], form) for row in members.tolist()]
    batch = {name: value.cuda() for name, value in collate_rows(rows, form).items()}
    packed = _three(len(rows) * LENGTH, HEADS, HEAD_SIZE)
    by_row = _three(len(rows), HEADS, LENGTH, HEAD_SIZE)
    padded = _three(len(lengths), HEADS, LENGTH, HEAD_SIZE)
    offsets, mask = batch["cu_seqlens"], mask_of_rows(batch["sequence_ids"])
    there = torch.arange(LENGTH, device="cuda") < torch.as_tensor(lengths.astype(np.int64), device="cuda")[:, None]
    variants: dict[str, tuple[Callable[[], Tensor], Three]] = {
        "ours": (lambda: packed_attention(*packed, offsets, LENGTH), packed),
        "eager": (lambda: scaled_dot_product_attention(*by_row, attn_mask=mask), by_row),
        "plain": (lambda: scaled_dot_product_attention(*padded, attn_mask=there[:, None, None]), padded),
    }
    notes = {
        "ours": f"{len(lengths)} sequences in {len(rows)} rows, offsets of fixed capacity",
        "eager": "the same rows with a dense mask",
        "plain": "a row for each sequence, padding masked",
    }
    for variant, (attend, inputs) in variants.items():
        upstream = torch.randn_like(attend())

        def step(attend: Any = attend, inputs: Any = inputs, upstream: Any = upstream) -> None:
            torch.autograd.grad(attend(), inputs, upstream)

        times = sample_ms(captured(step), "cuda", warmup=5, repeats=30)
        note = f"bf16, replays of a CUDA graph; {notes[variant]}"
        yield make_row("sequence_packing", "attention_b24", variant, "fwd_bwd_ms", "ms", times, note)


def _three(*shape: int) -> Three:
    query, key, value = torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
