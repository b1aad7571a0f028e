"""When sequence packing applies, and the plan's door to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl

from fasttrain.callbacks.sequence_packing.data_module import SequencePackingDataModule
from fasttrain.callbacks.sequence_packing.table import longest_of
from fasttrain.callbacks.sequence_packing.trial import try_step
from fasttrain.errors import FasttrainError, OptimizationError
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Refuses, Stage, Verdict
from fasttrain.randomness import random_state_kept

SAYS_SO = "fasttrain_packed_rows"
"""A module with this attribute true keeps apart the sequences of a row, by `cu_seqlens` or `sequence_ids`."""
TOLERANCE = 1e-3  # float32, sums in another order; a leak changes gradients by several percent


@dataclass(frozen=True)
class SequencePackingConfig:
    """How sequences are packed."""

    max_length: int = 512
    """Tokens in a row."""
    length_key: str = "input_ids"
    """The value of a sample with an entry for each token."""
    max_sequences_per_row: int = 3
    """Most sequences in a row; MLPerf v2.0's own."""
    seed: int = 0
    """Of which sequences share a row, and of the rows' order."""
    rows_per_batch: int | None = None
    """Rows in a process's batch; null is as many as hold about the sequences of an unpacked batch."""
    lists: list[str] = field(default_factory=list)
    """Values with another number of entries than there are tokens, `masked_lm_ids` for instance."""
    positions: list[str] = field(default_factory=list)
    """Those of them that are places in the sequence, `masked_lm_positions` for instance."""
    list_capacity: int | None = None
    """Entries of each list in a row; null is a sixth of the tokens."""
    padding: dict[str, float] = field(default_factory=dict)
    """What to fill values up with; targets with -100 and others with 0 unless said here."""
    drop: list[str] = field(default_factory=list)
    """Values to leave out, `attention_mask` for instance."""
    too_long: Literal["error", "truncate", "skip"] = "error"
    """What to do about sequences longer than a row; those cut off or left out are counted."""
    method: Literal["auto", "mixture", "best_fit"] = "auto"
    """Of the plan: least squares over patterns, best-fit-decreasing, or the better of them."""
    static: bool = True
    """Every batch has the same shapes; otherwise they follow its number of sequences."""
    pack_validation: bool = False
    """Pack the validation set, too."""
    lengths_cache: str | None = None
    """File (.npy) that keeps the training set's lengths."""
    workers: int = 0
    """Processes that read lengths."""
    trial: bool = True
    """Try the module's step on packed rows and on the same sequences unpacked: it must give the same gradients."""
    least_gain: float = 0.05
    """By what share there must be fewer rows than sequences."""


class SequencePackingOptimization(Optimization[SequencePackingConfig]):
    """Puts the packing data module in the place of the recipe's own."""

    name: ClassVar[str] = "sequence_packing"
    summary: ClassVar[str] = "several sequences in a row of fixed length, kept apart, in place of padding"
    config_class: ClassVar[type[Any]] = SequencePackingConfig
    stage: ClassVar[Stage] = Stage.DATA
    grade = "same numbers"

    def __init__(self, config: SequencePackingConfig) -> None:
        super().__init__(config)
        self.data: SequencePackingDataModule | None = None

    def check(self, context: Context) -> Verdict:
        """Plan the packing; refuse where it gains nothing, or the module lets sequences see each other."""
        name = type(context.module).__name__
        if not getattr(context.module, SAYS_SO, False):
            return Refuses(
                f"{name} does not say that it keeps the sequences of a row apart; have its attention go by the batch's "
                f"cu_seqlens or sequence_ids, and its losses by `totals`, then set `{SAYS_SO} = True` on it"
            )
        data = self.data_module(context.data)
        try:
            with random_state_kept():
                data.setup("fit")
                packed = data.packed
        except FasttrainError as error:
            return Refuses(str(error).removesuffix("."))
        except Exception as error:  # a user's data module may ask its Trainer, which is not there yet
            return Refuses(
                f"{type(context.data).__name__} gives no training loader to plan with before there is a Trainer "
                f"({type(error).__name__}: {error})"
            )
        plan = packed.plan
        if plan.sequences_per_row < 1 + self.config.least_gain:
            return Refuses(
                f"{plan.sequences:,} sequences fill {plan.padded_fill:.1%} of rows of {plan.max_length} tokens by "
                f"themselves, and packed take {plan.rows:,} rows; there is nothing to gain"
            )
        if self.config.trial and (reason := self._tried(context, data)):
            return Refuses(reason)
        self.data = data
        longest = longest_of(plan.histogram, packed.loader.batch_size or 1)
        return Applies(
            f"{plan.sequences:,} sequences in {plan.rows:,} rows of {plan.max_length} ({plan.method}), "
            f"{plan.efficiency:.2%} of it tokens, padded {plan.padded_fill:.1%}; {data.rows_a_batch(packed)} rows a "
            f"batch; expected speed-up {plan.sequences_per_row:.2f} over padding to {plan.max_length}, "
            f"{plan.sequences_per_row * longest / plan.max_length:.2f} over padding to a batch's longest"
        )

    def attach(self, context: Context) -> Attachment:
        """Hand over the data module."""
        return Attachment(data=self.data)

    def applied(self) -> Sequence[Change]:
        """Return the rows, and what was cut off or left out."""
        if self.data is None:
            return []
        packed = self.data.packed
        changes = [Change("data.train_dataloader", f"rows of {packed.plan.max_length} tokens", packed.plan.rows)]
        for count, what in ((packed.truncated, "sequences cut off"), (packed.skipped, "sequences left out")):
            if count:
                changes.append(Change("data.train_dataloader", what, count))
        return changes

    def data_module(self, inner: pl.LightningDataModule) -> SequencePackingDataModule:
        """Return a data module packed as configured."""
        c = self.config
        return SequencePackingDataModule(
            inner, c.max_length, c.length_key, c.max_sequences_per_row, c.seed,
            rows_per_batch=c.rows_per_batch, lists=tuple(c.lists), positions=tuple(c.positions),
            list_capacity=c.list_capacity, padding=dict(c.padding), drop=tuple(c.drop), too_long=c.too_long,
            method=c.method, static=c.static, pack_validation=c.pack_validation, lengths_cache=c.lengths_cache,
            workers=c.workers,
        )  # fmt: skip

    def _tried(self, context: Context, data: SequencePackingDataModule) -> str:
        name = type(context.module).__name__
        try:
            with random_state_kept():
                found = try_step(context.module, data.train_dataloader(), context.hardware.device)
        except (FasttrainError, OptimizationError) as error:
            return str(error).removesuffix(".")
        except Exception as error:  # a user's step may ask its Trainer for something
            return (
                f"the step of {name} could not be tried on packed rows outside of a Trainer ({type(error).__name__}: "
                f"{error}); set trial: false to trust it"
            )
        if found.agrees(TOLERANCE):
            return ""
        return (
            f"{name} does not treat packed sequences as it treats each in a row of its own: loss "
            f"{found.packed_loss:.6g} against {found.loss:.6g}, gradients {found.gradient_difference:.2g} apart; look "
            "at attention (cu_seqlens), positions (position_ids) and what losses are divided by (totals)"
        )
