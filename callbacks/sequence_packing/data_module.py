"""`SequencePackingDataModule`: any data module of variable-length sequences, in packed rows."""

from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from fasttrain.callbacks.sequence_packing.histogram import Lengths, histogram_of, length_of, lengths_of
from fasttrain.callbacks.sequence_packing.order import PackedDataset, PackedLoader, PackedOrder
from fasttrain.callbacks.sequence_packing.plan import Method, PackingPlan, make_plan
from fasttrain.callbacks.sequence_packing.rows import RowFormat, format_of
from fasttrain.callbacks.sequence_packing.samples import Samples, why_not_packable
from fasttrain.destination import goes_to_gpu, rank_of
from fasttrain.errors import DataError, OptimizationError
from fasttrain.overriding import overridden

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
EVALUATION_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")
TooLong = Literal["error", "truncate", "skip"]


@dataclass(frozen=True)
class Packed:
    """A data set and the plan for it."""

    loader: "DataLoader[Any]"
    """The user's own."""
    samples: Samples
    lengths: Lengths
    """(samples,) tokens of each."""
    index: NDArray[np.int64] | None
    """The samples that are in the plan; None for all of them."""
    fitted: NDArray[Any]
    """(sequences in the plan,) tokens of each in a row."""
    plan: PackingPlan
    form: RowFormat
    truncated: int
    """Sequences that are cut off at `max_length`."""
    skipped: int
    """Sequences that are left out because they are longer."""


class SequencePackingDataModule(pl.LightningDataModule):
    """Gives the training sequences of another data module in rows that hold several, each sequence once an epoch.

    Batches are dicts of the samples' own values, collated by `rows.collate_rows`, with what attention needs to keep
    sequences apart and what losses are divided by. The user's collate function is not called. Evaluation and prediction
    loaders are the user's own unless `pack_validation` is set.

    Args:
        inner: its training loader has a map-style data set of dicts. If the set has a method `lengths()`, no sample is
            read to plan.
        max_length: tokens in a row.
        length_key: the value of a sample with an entry for each token.
        max_sequences_per_row: most sequences in a row.
        seed: which sequences share a row, and the order of rows, anew each epoch.
        rows_per_batch: rows in a process's batch; None is as many as hold about the sequences of the inner loader's
            batch.
        lists, positions, list_capacity, padding: see `rows.format_of`.
        drop: keys of a sample to leave out.
        too_long: what to do about sequences longer than a row: stop, cut them off, or leave them out; both are counted.
        method: of the plan, see `plan.make_plan`.
        static: every batch has the same shapes; otherwise they follow the number of sequences in it.
        pack_validation: also pack the validation set, in a fixed order, every sequence once over all ranks.
        lengths_cache: .npy file that keeps the lengths of the training set.
        workers: processes that read lengths.
    """

    def __init__(
        self,
        inner: pl.LightningDataModule,
        max_length: int = 512,
        length_key: str = "input_ids",
        max_sequences_per_row: int = 3,
        seed: int = 0,
        *,
        rows_per_batch: int | None = None,
        lists: tuple[str, ...] = (),
        positions: tuple[str, ...] = (),
        list_capacity: int | None = None,
        padding: dict[str, float] | None = None,
        drop: tuple[str, ...] = (),
        too_long: TooLong = "error",
        method: Method = "auto",
        static: bool = True,
        pack_validation: bool = False,
        lengths_cache: str | Path | None = None,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.inner, self.max_length, self.length_key = inner, max_length, length_key
        self.max_sequences_per_row, self.seed, self.rows_per_batch = max_sequences_per_row, seed, rows_per_batch
        self.lists, self.positions, self.list_capacity, self.padding = lists, positions, list_capacity, padding
        self.drop, self.too_long, self.method, self.static = drop, too_long, method, static
        self.pack_validation, self.workers = pack_validation, workers
        self.lengths_cache = Path(lengths_cache).expanduser() if lengths_cache is not None else None
        self._train: Packed | None = None
        self._loader: PackedLoader | None = None
        # What Lightning finds on a data module takes the place of the model's own, and a loader that is there is asked:
        # so this one has those hooks and loaders that the user's has, and no others.
        for hook in TRANSFER_HOOKS:
            if overridden(inner, hook):
                setattr(self, hook, getattr(inner, hook))
        for loader in EVALUATION_LOADERS:
            if not overridden(inner, loader):
                setattr(self, loader, MethodType(getattr(pl.LightningDataModule, loader), self))

    def __getattr__(self, name: str) -> Any:
        """Return what the inner module has, and this has not: `facts`, for instance, or a tokenizer."""
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return getattr(self.inner, name)

    def prepare_data(self) -> None:
        """Let the inner module prepare its data."""
        self._lend_trainer()
        self.inner.prepare_data()

    def setup(self, stage: str) -> None:
        """Set the inner module up."""
        if stage == "fit":
            self._loader = None  # a new fit counts its sequences from zero
        self._lend_trainer()
        self.inner.setup(stage)

    def teardown(self, stage: str) -> None:
        """Let the inner module clean up."""
        self.inner.teardown(stage)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner module's state; the position is the loader's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand it to the inner module."""
        self.inner.load_state_dict(state_dict)

    @property
    def packed(self) -> Packed:
        """The training set and its plan, made when first asked for.

        Raises:
            OptimizationError: the inner module's training loader can't be packed; the message begins a sentence.
            DataError: a sample is not what packing needs.
        """
        if self._train is None:
            self._lend_trainer()
            self._train = self._pack(self.inner.train_dataloader(), self.lengths_cache)
        return self._train

    @property
    def sequences_seen(self) -> int:
        """Sequences that all ranks have been given since training began, for schedules and evaluation by samples."""
        return self._loader.sequences_seen if self._loader is not None else 0

    def rows_a_batch(self, packed: Packed) -> int:
        """Return the number of rows in a process's batch."""
        if self.rows_per_batch is not None:
            return self.rows_per_batch
        return max(1, round((packed.loader.batch_size or 1) / packed.plan.sequences_per_row))

    def train_dataloader(self) -> PackedLoader:
        """Return batches of packed rows, dealt anew each epoch; the loader's position is part of the checkpoint."""
        packed, seen = self.packed, self.sequences_seen
        self._loader = self._packed_loader(packed, shuffle=True, accumulate=self._accumulated())
        self._loader.sequences_seen = seen  # where the Trainer makes loaders anew in the midst of a fit
        return self._loader

    def val_dataloader(self) -> Any:
        """Return the inner module's, or packed rows if `pack_validation` is set."""
        inner = self.inner.val_dataloader()
        return self._packed_loader(self._pack(inner, None), shuffle=False) if self.pack_validation else inner

    def test_dataloader(self) -> Any:
        """Return the inner module's."""
        return self.inner.test_dataloader()

    def predict_dataloader(self) -> Any:
        """Return the inner module's."""
        return self.inner.predict_dataloader()

    def _packed_loader(self, packed: Packed, *, shuffle: bool, accumulate: int = 1) -> PackedLoader:
        rank, world_size = rank_of(self)
        order = PackedOrder(
            packed.plan,
            packed.fitted,
            rows_per_batch=self.rows_a_batch(packed),
            seed=self.seed,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
            index=packed.index,
        )
        rows = PackedDataset(packed.samples, packed.form, packed.lengths)
        theirs = packed.loader
        on_gpu = goes_to_gpu(self)
        options: dict[str, Any] = {"num_workers": theirs.num_workers, "pin_memory": on_gpu}
        if theirs.num_workers:
            options |= {"persistent_workers": theirs.persistent_workers, "prefetch_factor": theirs.prefetch_factor,
                        "worker_init_fn": theirs.worker_init_fn}  # fmt: skip
        return PackedLoader(rows, order, packed.form, static=self.static, accumulate=accumulate, **options)

    def _pack(self, loader: Any, cache: Path | None) -> Packed:
        if reason := why_not_packable(loader):
            raise OptimizationError(reason)
        samples = Samples(loader, frozenset(self.drop))
        lengths = lengths_of(samples, self.length_key, workers=self.workers, cache=cache)
        if not len(lengths):
            raise DataError("the training set is empty: there is no sequence to pack.")
        long = np.asarray(lengths) > self.max_length
        count = int(long.sum())
        if count and self.too_long == "error":
            first = int(np.argmax(long))
            raise DataError(
                f"{count} of {len(lengths)} sequences are longer than a row of {self.max_length} tokens, the first of "
                f"them sample {first} with {lengths[first]}; set too_long to truncate or skip, or a larger max_length."
            )
        index = np.flatnonzero(~long) if count and self.too_long == "skip" else None
        fitted = np.minimum(lengths, self.max_length) if count and self.too_long == "truncate" else lengths
        if index is not None:
            fitted = np.asarray(lengths)[index]
        plan = make_plan(
            histogram_of(fitted, self.max_length),
            max_length=self.max_length,
            max_sequences=self.max_sequences_per_row,
            method=self.method,
        )
        # Of some samples the longest, in which a number of entries is least likely to agree by chance.
        form = self._form_of(samples, int(np.argmax(lengths[:64])))
        truncated = count if self.too_long == "truncate" else 0
        return Packed(loader, samples, lengths, index, fitted, plan, form, truncated, count - truncated)

    def _form_of(self, samples: Samples, index: int) -> RowFormat:
        sample = samples[index]
        length_of(sample, self.length_key, index)
        return format_of(
            sample,
            length_key=self.length_key,
            max_length=self.max_length,
            max_sequences=self.max_sequences_per_row,
            lists=self.lists,
            positions=self.positions,
            list_capacity=self.list_capacity,
            padding=self.padding,
        )

    def _accumulated(self) -> int:
        return int(self.trainer.accumulate_grad_batches) if self.trainer is not None else 1

    def _lend_trainer(self) -> None:
        if self.trainer is not None:
            self.inner.trainer = self.trainer
