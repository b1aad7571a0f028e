"""BERT's data: MLPerf's HDF5 rows, any text, or, when none is given, the text that comes with every Python."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor

from fasttrain.callbacks.sequence_packing import collate_rows, format_of, pack_row
from fasttrain.destination import goes_to_gpu, rank_of
from fasttrain.environment import cache_folder, usable_cores
from fasttrain.errors import ConfigError
from fasttrain.order import EpochOrder, ResumableLoader
from fasttrain.recipes.bert.documents import TextFormat, pythons_documents, pythons_name, text_files
from fasttrain.recipes.bert.hdf5 import hdf5_files, write_hdf5
from fasttrain.recipes.bert.kept import made_once
from fasttrain.recipes.bert.masking import Masking
from fasttrain.recipes.bert.sequences import LISTS, POSITIONS, StoredSequences
from fasttrain.recipes.bert.text import documents_in, split, write_pairs
from fasttrain.recipes.bert.unpadding import ExchangedOrder, unpadded
from fasttrain.recipes.bert.wordpiece import CLS, MASK, SEP, Vocabulary

VERSION = 1  # raise it whenever the same configuration would give other sequences
READING_ONLY = (
    "batch_size", "val_batch_size", "num_workers", "cache_folder", "val_sequences", "masks", "masked_share",
    "max_predictions", "unpadding", "exchange_padding",
)  # fmt: skip
"""What changes no file."""


@dataclass(frozen=True)
class DataConfig:
    """The `data` section of a BERT recipe."""

    text: str | None = None
    """Text file, or folder of .txt, .md and .rst files, to train on. With neither this nor hdf5, Python's own text."""
    val_text: str | None = None
    """The same for validation; null keeps documents of `text` for it."""
    text_format: TextFormat = "prose"
    """`prose`: a document a file; `paragraphs`: a document a paragraph, so that lengths are the text's own; `lines`: a
    sentence a line, an empty line between documents, as BERT's reference has it."""
    vocabulary: str | None = None
    """vocab.txt; null trains WordPiece on the training text."""
    vocab_size: int = 30522
    """Words, at most, of a vocabulary that is trained, or of hdf5 files."""
    lower_case: bool = True
    hdf5: str | None = None
    """HDF5 file, or folder of them, with MLPerf's rows of variable length, in place of text."""
    val_hdf5: str | None = None
    max_length: int = 512
    """Tokens of a sequence, at most, and of a row."""
    max_predictions: int = 76
    """Masked tokens of a sequence, at most; MLPerf v2.0's."""
    masked_share: float = 0.15
    masks: int = 10
    """Different masks that a sequence is seen with, one an epoch; as many as the reference has copies of its text."""
    short_share: float = 0.1
    """Share of sequences that are made shorter than they could be."""
    val_share: float = 0.05
    """Share of the text that is kept for validation, in whole documents."""
    val_sequences: int | None = 10_000
    """Validation sequences, at most; MLPerf v2.0's."""
    batch_size: int = 56
    """Sequences a step and process; MLPerf v2.0 on one node: 8 x 56."""
    val_batch_size: int | None = None
    """Sequences an evaluation step and process; null is `batch_size`."""
    seed: int = 0
    """Of the pairs, the masks and the order."""
    unpadding: bool = False
    """Training batches of all tokens one behind another, without padding, where `sequence_packing` is off. Shapes then
    follow the batch, so a captured step would be captured anew for most."""
    exchange_padding: bool = False
    """With `unpadding`, deal each global batch to the processes so that all have about as many tokens."""
    num_workers: int | None = None
    """Loader processes; null is the usable cores less one on a machine with more than 4 of them, else none."""
    cache_folder: str | None = None
    """Where sequences are kept; null is $FASTTRAIN_CACHE or ~/.cache/fasttrain."""

    def __post_init__(self) -> None:
        if self.text and self.hdf5:
            raise ConfigError("data.text and data.hdf5 are both set; give one of them.")
        if bool(self.hdf5) != bool(self.val_hdf5) or (self.val_text and not self.text):
            missing = "text" if self.val_text else "val_hdf5" if self.hdf5 else "hdf5"
            raise ConfigError(f"data.{missing} is not set, but its counterpart is; give both.")
        if self.exchange_padding and not self.unpadding:
            raise ConfigError(
                "data.exchange_padding is set without data.unpadding: padded batches are all of one size; set both."
            )
        for name, least in (("batch_size", 1), ("max_length", 8), ("max_predictions", 1), ("masks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it must be at least {least}.")


class BertData(pl.LightningDataModule):
    """Padded rows of one sequence each, in batches of static shapes; `sequence_packing` makes packed rows of samples.

    A batch is that of `sequence_packing.collate_rows`, for rows with one sequence.
    """

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.config = config
        self.folder: Path | None = None
        """Where the sequences lie, once they are prepared."""
        self._sets: dict[str, StoredSequences] = {}
        self._vocabulary: Vocabulary | None = None

    def prepare_data(self) -> None:
        """Write the sequences, unless an earlier run did."""
        config = self.config
        described = {"version": VERSION, "source": self._source(), **asdict(config)}
        for name in READING_ONLY:
            del described[name]
        self.folder = made_once(cache_folder(config.cache_folder), "bert", described, self._write)

    def setup(self, stage: str) -> None:
        """Open the files.

        Raises:
            ConfigError: there are too few sequences for a batch.
        """
        if self._sets:
            return
        if self.folder is None:
            self.prepare_data()
        assert self.folder is not None
        for name in ("train", "val"):
            most = self.config.val_sequences if name == "val" else None
            self._sets[name] = StoredSequences(self.folder / name, self._masking(), most)
        if not len(self._sets["val"]):
            raise ConfigError("there is no validation sequence; give more text, or a larger data.val_share.")

    def facts(self) -> dict[str, Any]:
        """Return the size of the vocabulary, which the model takes over unless told otherwise."""
        self.setup("fit")
        return {"vocab_size": self.vocab_size}

    def sizes(self) -> dict[str, int]:
        """Return the number of sequences of `train` and `val`."""
        self.setup("fit")
        return {name: len(found) for name, found in self._sets.items()}

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The words; None for HDF5 files without one."""
        if self._vocabulary is None and self.folder is not None and (self.folder / "vocab.txt").exists():
            self._vocabulary = Vocabulary.of_file(self.folder / "vocab.txt", self.config.lower_case)
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(self.vocabulary.words) if self.vocabulary else self.config.vocab_size

    def sequences(self, name: Literal["train", "val"]) -> StoredSequences:
        """Return the training or validation set."""
        self.setup("fit")
        return self._sets[name]

    def train_dataloader(self) -> ResumableLoader:
        """Return batches in a new order each epoch; a last partial batch is left out, shapes being static."""
        size, batch_size = len(self._sets["train"]), self.config.batch_size
        rank, world_size = rank_of(self)
        if size // world_size < batch_size:
            raise ConfigError(
                f"data.batch_size is {batch_size}, but each of {world_size} process(es) has only "
                f"{size // world_size} training sequences; lower it, or give more text."
            )
        options: Any = {
            "shuffle": True, "seed": self.config.seed, "rank": rank, "world_size": world_size, "even": True
        }  # fmt: skip
        if self.config.exchange_padding:
            order: EpochOrder = ExchangedOrder(self._sets["train"].lengths(), batch_size, **options)
        else:
            order = EpochOrder(size, **options)
        return self._loader("train", order, batch_size, drop_last=True)

    def val_dataloader(self) -> ResumableLoader:
        """Return every validation sequence once, none twice, whatever the number of processes."""
        rank, world_size = rank_of(self)
        order = EpochOrder(len(self._sets["val"]), shuffle=False, seed=0, rank=rank, world_size=world_size)
        return self._loader("val", order, self.config.val_batch_size or self.config.batch_size, drop_last=False)

    def _loader(self, name: str, order: EpochOrder, batch_size: int, drop_last: bool) -> ResumableLoader:
        cores = usable_cores()
        workers = self.config.num_workers
        if workers is None:
            workers = 0 if cores <= 4 else min(16, cores - 1)
        return ResumableLoader(
            self._sets[name],
            order,
            batch_size=batch_size,
            drop_last=drop_last,
            num_workers=workers,
            collate_fn=self._collate(name),
            pin_memory=goes_to_gpu(self),
            persistent_workers=workers > 0,
        )

    def _collate(self, name: str) -> Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]:
        if name == "train" and self.config.unpadding:
            return unpadded
        return partial(padded, max_length=self.config.max_length, most=self.config.max_predictions)

    def _masking(self) -> Masking | None:
        if self.vocabulary is None:
            return None
        config, number = self.config, self.vocabulary.number
        return Masking(
            mask_id=number[MASK],
            special=(number[CLS], number[SEP]),
            vocab_size=len(self.vocabulary.words),
            share=config.masked_share,
            most=config.max_predictions,
            masks=config.masks,
            seed=config.seed,
        )

    def _source(self) -> list[Any]:
        """Return what tells the source's files from others: names, sizes and times, or Python's version."""
        config = self.config
        if not config.text and not config.hdf5:
            return [pythons_name()]
        find = hdf5_files if config.hdf5 else text_files
        paths = [config.hdf5, config.val_hdf5] if config.hdf5 else [config.text, config.val_text]
        files = [file for path in paths if path for file in find(path)]
        if config.vocabulary:
            files.append(Path(config.vocabulary).expanduser())
        return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file in files if (stat := _stat(file))]

    def _write(self, folder: Path) -> None:
        config = self.config
        given = Vocabulary.of_file(config.vocabulary, config.lower_case) if config.vocabulary else None
        if given is not None:
            given.write(folder / "vocab.txt")
        if config.hdf5 and config.val_hdf5:
            size = len(given.words) if given else config.vocab_size
            for name, path in (("train", config.hdf5), ("val", config.val_hdf5)):
                write_hdf5(folder / name, hdf5_files(path), size, config.max_length)
            return
        found = documents_in(text_files(config.text), config.text_format) if config.text else pythons_documents()
        if config.val_text:
            train, val = list(found), list(documents_in(text_files(config.val_text), config.text_format))
        else:
            train, val = split(found, config.val_share, config.seed)
        sentences = (sentence for document in train for sentence in document)
        vocabulary = given or Vocabulary.trained(sentences, config.vocab_size, config.lower_case)
        vocabulary.write(folder / "vocab.txt")
        for seed, (name, documents) in enumerate((("train", train), ("val", val)), start=2 * config.seed):
            write_pairs(folder / name, documents, vocabulary, config.max_length, config.short_share, seed)
        counts = {"documents": [len(train), len(val)], "words": len(vocabulary.words)}
        (folder / "counts.json").write_text(json.dumps(counts))


def padded(samples: list[dict[str, Tensor]], max_length: int, most: int) -> dict[str, Tensor]:
    """Return samples as a batch of padded rows, a sequence in each.

    Args:
        max_length: tokens of a row.
        most: masked tokens that each row has room for.
    """
    form = format_of(
        samples[0], length_key="input_ids", max_length=max_length, max_sequences=1, lists=LISTS, positions=POSITIONS,
        list_capacity=most,
    )  # fmt: skip
    return collate_rows([pack_row([sample], form) for sample in samples], form)


def _stat(file: Path) -> Any:
    return file.stat() if file.exists() else None
