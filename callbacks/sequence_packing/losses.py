"""Losses whose value and gradients do not depend on how sequences were packed, split over ranks or accumulated."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fasttrain.callbacks.sequence_packing.rows import IGNORED


def mean_loss(logits: Tensor, targets: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy over targets: by token for token targets, by sequence for those of sequences.

    Sums in float32, or float64 for float64 logits.

    Args:
        logits: (..., classes).
        targets: (...) classes, -100 where there is none.
        total: number of targets to divide by; the batch's `totals[name]` makes it the mean over the whole step under
            gradient accumulation, `over_ranks(totals[name])` also under DDP. None is the number in this batch.

    A batch without targets has the loss 0, and gradients 0.
    """
    flat = targets.reshape(-1).long()
    logits = logits.reshape(len(flat), -1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    summed = cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum")
    count = (flat != IGNORED).sum() if total is None else total
    return summed / count.clamp(min=torch.finfo(torch.float32).tiny if count.is_floating_point() else 1)


def mean_of_sequences(
    losses: Tensor, there: Tensor, sequence_ids: Tensor, num_sequences: Tensor | None = None
) -> Tensor:
    """Return the mean over sequences of each sequence's mean loss, in which a short one counts as much as a long one.

    Args:
        losses: (rows, max_length) by token.
        there: (rows, max_length) bool, which of them count. A sequence with none has the mean 0.
        sequence_ids: (rows, max_length), 0 for padding.
        num_sequences: to divide by; None is the number of sequences in these rows with a token that counts.
    """
    most = losses.shape[1]
    rows = torch.arange(len(losses), device=losses.device)[:, None]
    sequence = (rows * (most + 1) + sequence_ids).reshape(-1).long()
    there = there & (sequence_ids > 0)
    zeros = losses.new_zeros(len(losses) * (most + 1))
    counts = zeros.index_add(0, sequence, there.reshape(-1).to(losses.dtype))
    sums = zeros.index_add(0, sequence, torch.where(there, losses, 0.0).reshape(-1))
    divisor = (counts > 0).sum() if num_sequences is None else num_sequences
    return (sums / counts.clamp(min=1)).sum() / divisor.clamp(min=1)


def next_tokens(tokens: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return the targets of a causal language model: each place's next token, -100 at a sequence's last and in padding.

    Shifting whole rows would have a sequence's last token predict the next sequence's first.

    Args:
        tokens: (rows, max_length).
        sequence_ids: (rows, max_length), 0 for padding.
    """
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).long()
    same = torch.zeros_like(sequence_ids, dtype=torch.bool)
    same[:, :-1] = (sequence_ids[:, 1:] == sequence_ids[:, :-1]) & (sequence_ids[:, :-1] > 0)
    return torch.where(same, following, IGNORED)


def over_ranks(total: Tensor) -> Tensor:
    """Return a number of targets averaged over the ranks of the run, or the same where there is one process.

    DDP averages gradients over ranks; with each rank's sum of losses divided by this average, that is the gradient of
    the mean over all ranks' targets, however unevenly they lie. Collective: every rank calls it. No host waits for it.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return total
    shared = total.detach().clone()
    torch.distributed.all_reduce(shared)
    return shared / torch.distributed.get_world_size()
