"""From text, or MLPerf's files, to sequences: pairs, masks, what is kept in files, and what is wrong with them."""

import pickle
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttrain.errors import ConfigError, DataError
from fasttrain.order import SampleKey
from fasttrain.recipes.bert.data import BertData, DataConfig
from fasttrain.recipes.bert.documents import documents_of, pythons_documents, sentences
from fasttrain.recipes.bert.masking import Masking
from fasttrain.recipes.bert.pairs import pairs_of
from fasttrain.recipes.bert.sequences import StoredSequences, writing
from fasttrain.recipes.bert.wordpiece import Vocabulary

tokenizers = pytest.importorskip("tokenizers")
SHARED_BOOKS = Path(__file__).parent.parent.parent / "shared" / "data" / "text_classic_books.tar.xz"


def write_text(folder: Path, documents: int = 12) -> Path:
    """Write stories whose sentences name their document and place."""
    folder.mkdir()
    for number in range(documents):
        lines = [f"Story {number} has a line {line} about a cat and a dog." for line in range(4 + number)]
        (folder / f"{number:02}.txt").write_text(" ".join(lines[:3]) + "\n\n" + "\n".join(lines[3:]))
    return folder


def data_of(text: Path, **options: Any) -> BertData:
    values: dict[str, Any] = {"vocab_size": 80, "max_length": 48, "max_predictions": 7, "batch_size": 2, **options}
    data = BertData(DataConfig(text=str(text), val_share=0.1, num_workers=0, **values))
    data.prepare_data()
    data.setup("fit")
    return data


def test_sentences_end_at_stops_and_paragraphs() -> None:
    text = 'He came. "Did he?" she asked.\nNo, e.g. not. \u201cYes.\u201d Then\n\nA heading\n\nIt is 3.5 m. 7 more.'
    assert sentences(text) == [
        "He came.", '"Did he?" she asked.', "No, e.g. not.", "\u201cYes.\u201d", "Then", "A heading", "It is 3.5 m.",
        "7 more.",
    ]  # fmt: skip


def test_pythons_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        DataError, match=r"has no Python sources, whose text trains when data\.text is not set; set data"
    ):
        list(pythons_documents())
    for folder in ("test", "pydoc_data", "json"):
        (tmp_path / folder).mkdir()
    (tmp_path / "test" / "a.py").write_text('"""A test."""\n')
    (tmp_path / "pydoc_data" / "topics.py").write_text('topics = {"if": "An if. It chooses.", "x": "word"}\n')
    (tmp_path / "json" / "a.py").write_text(
        '"""Reads.  And writes."""\nclass A:\n    """Of A."""\n    def f(self): "Does f."\n'
    )
    (tmp_path / "json" / "broken.py").write_text("def :\n")
    assert list(pythons_documents()) == [["Reads.", "And writes."], ["Of A."], ["Does f."], ["An if.", "It chooses."]]


def test_lines_are_the_format_of_berts_reference(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n \nfour\nfive\n")
    assert list(documents_of(tmp_path / "a.txt", "lines")) == [["one", "two"], ["three"], ["four", "five"]]
    (tmp_path / "p.txt").write_text("One. Two\ngoes on.\n\nThree.")
    assert list(documents_of(tmp_path / "p.txt", "paragraphs")) == [["One.", "Two goes on."], ["Three."]]
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8 text \(.* at byte 3\); convert it\.$"):
        list(documents_of(tmp_path / "b.txt"))


def test_pairs_follow_one_another_in_half_of_the_cases() -> None:
    # A token's value tells its document, sentence and place.
    documents = [
        [np.arange(1000 * d + 20 * s, 1000 * d + 20 * s + 5 + (d + s) % 7) for s in range(15)] for d in range(40)
    ]
    made = list(pairs_of(documents, 64, np.random.default_rng(0)))
    assert len(made) > 100
    for pair in made:
        assert 2 <= len(pair.first) + len(pair.second) <= 61
        assert len({*(pair.first // 1000)}) == 1
        own, other = pair.first[0] // 1000, pair.second[0] // 1000
        assert (own != other) == pair.is_random
        if not pair.is_random and len(pair.first) + len(pair.second) < 50:  # nothing was cut off
            assert pair.second[0] // 20 == pair.first[-1] // 20 + 1
    assert 0.4 < np.mean([pair.is_random for pair in made]) < 0.6
    lengths = [len(pair.first) + len(pair.second) for pair in made]
    assert max(lengths) == 61
    covered = {int(token) // 20 for pair in made for token in pair.first}
    assert len(covered) > 300, "what a random part takes the place of is used again"
    again = list(pairs_of(documents, 64, np.random.default_rng(0)))
    assert all(np.array_equal(a.second, b.second) for a, b in zip(made, again, strict=True))


def test_masks_are_the_references_and_a_function_of_seed_epoch_and_sequence() -> None:
    masking = Masking(mask_id=4, special=(2, 3), vocab_size=1000, masks=2, seed=7)
    tokens = np.arange(5, 517)
    tokens[0], tokens[-1] = 2, 3
    kinds: Counter[str] = Counter()
    for index in range(60):
        masked, places, words = masking(tokens, 0, index)
        assert len(places) == 76, "at most so many; 15 % would be 77"
        assert (np.diff(places) > 0).all()
        assert not np.isin(words, (2, 3)).any()
        assert np.array_equal(tokens[places], words)
        untouched = np.ones(512, dtype=bool)
        untouched[places] = False
        assert np.array_equal(masked[untouched], tokens[untouched])
        kinds["mask"] += int((masked[places] == 4).sum())
        kinds["kept"] += int((masked[places] == words).sum())
    total = 60 * 76
    assert abs(kinds["mask"] / total - 0.8) < 0.02
    assert abs(kinds["kept"] / total - 0.1) < 0.02
    one, other = masking(tokens, 0, 5), masking(tokens, 1, 5)
    assert not np.array_equal(one[1], other[1])
    assert np.array_equal(one[0], masking(tokens, 2, 5)[0]), "after `masks` epochs they come again"
    assert len(masking(tokens[:8], 0, 0)[1]) == 1


@pytest.mark.parametrize("drawn_before", [True, False])
def test_what_is_written_is_read(tmp_path: Path, drawn_before: bool) -> None:
    random = np.random.default_rng(0)
    wanted = [random.integers(0, 70_000, n) for n in (5, 1, 9)]
    with writing(tmp_path / "set", 70_000) as writer:
        for number, tokens in enumerate(wanted):
            masked = (np.array([0]), np.array([66_000])) if drawn_before else None
            writer.add(tokens, 1 + len(tokens) // 2, number % 2, masked)
    masking = None if drawn_before else Masking(4, (), 70_000)
    read = StoredSequences(tmp_path / "set", masking)
    assert read.lengths().tolist() == [5, 1, 9]
    for each in (read, pickle.loads(pickle.dumps(read))):
        sample = each[SampleKey(0, 2)]
        assert sample["token_type_ids"].tolist() == [0] * 5 + [1] * 4
        assert sample["next_sentence_label"] == 0
        if drawn_before:
            assert sample["input_ids"].tolist() == wanted[2].tolist()
            assert (sample["masked_lm_positions"].tolist(), sample["masked_lm_ids"].tolist()) == ([0], [66_000])
    assert len(StoredSequences(tmp_path / "set", masking, most=2)) == 2
    with pytest.raises(IndexError):
        read[3]


def test_a_trained_vocabulary_is_the_same_each_time() -> None:
    random = np.random.default_rng(0)
    texts = ["".join(chr(97 + letter) for letter in random.integers(0, 26, 5)) + " Été." for _ in range(300)]
    one, other = (Vocabulary.trained(texts, 200, lower_case=True) for _ in range(2))
    assert one.words == other.words
    assert len(one.words) == 200
    assert one.words[:5] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert one.text_of(next(one.tokens_of(["ÉTÉ zq."])).tolist()) == "ete zq ."


def test_text_becomes_sequences_once(tmp_path: Path) -> None:
    data = data_of(write_text(tmp_path / "text"))
    train, val = data.sequences("train"), data.sequences("val")
    assert data.facts() == {"vocab_size": data.vocab_size}
    words = data.vocabulary
    assert words is not None
    assert words.words[:5] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    sample = train[0]
    tokens = sample["input_ids"].clone()
    tokens[sample["masked_lm_positions"]] = sample["masked_lm_ids"]
    assert tokens[0] == words.number["[CLS]"]
    assert (tokens == words.number["[SEP]"]).sum() == 2
    assert (
        sample["token_type_ids"].sum()
        == (tokens == words.number["[SEP]"]).nonzero()[1] - (tokens == words.number["[SEP]"]).nonzero()[0]
    )
    assert "[UNK]" not in words.text_of(tokens.tolist())
    told = [{_story(each, index, words) for index in range(len(each))} - {None} for each in (train, val)]
    assert told[1]
    assert told[0].isdisjoint(told[1]), "no validation document is trained on"
    made = sorted(tmp_path.rglob("tokens.bin"))
    again = data_of(tmp_path / "text")
    assert again.folder == data.folder
    assert torch.equal(again.sequences("train")[3]["input_ids"], train[3]["input_ids"])
    assert sorted(tmp_path.rglob("tokens.bin")) == made
    assert data_of(tmp_path / "text", seed=1).folder != data.folder
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (2, 48)
    assert batch["masked_lm_ids"].shape == (2, 7)
    assert batch["cu_seqlens"].shape == (5,)


def _story(each: StoredSequences, index: int, words: Any) -> str | None:
    """Return the number of the story that a sequence's first part is of, where it says so."""
    tokens = each.tokens()[each._ends[index] : each._ends[index + 1]].tolist()
    text = words.text_of(tokens[: tokens.index(words.number["[SEP]"])])
    return text.split("story ")[1].split()[0] if "story " in text else None


def write_hdf5(file: Path, wrong: str = "") -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(file, "w") as opened:
        rows = [np.array([2, 10, 11, 3, 12, 3]), np.array([2, 9, 3, 7, 3])]
        columns = {
            "input_ids": rows,
            "segment_ids": [np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1])],
            "masked_lm_positions": [np.array([1, 4]), np.array([9 if wrong == "place" else 3])],
            "masked_lm_ids": [np.array([20, 21]), np.array([29 if wrong != "word" else 300])],
        }
        for name, values in columns.items():
            dtype = h5py.vlen_dtype(np.int16)
            opened.create_dataset(name, (2,), dtype=dtype)
            for number, value in enumerate(values):
                opened[name][number] = value.astype(np.int16)
        if wrong != "label":
            opened["next_sentence_labels"] = np.array([0, 1], dtype=np.int8)
    return file


def hdf5_data(file: Path, **options: Any) -> BertData:
    values: dict[str, Any] = {"vocab_size": 30, "max_length": 16, "batch_size": 1, **options}
    data = BertData(DataConfig(hdf5=str(file.parent), val_hdf5=str(file), num_workers=0, **values))
    data.prepare_data()
    data.setup("fit")
    return data


def test_mlperfs_rows(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    data = hdf5_data(write_hdf5(tmp_path / "rows" / "a.hdf5"))
    assert (len(data.sequences("train")), data.vocab_size) == (2, 30)
    sample = data.sequences("train")[1]
    assert {name: value.tolist() for name, value in sample.items()} == {
        "input_ids": [2, 9, 3, 7, 3], "token_type_ids": [0, 0, 0, 1, 1], "masked_lm_positions": [3],
        "masked_lm_ids": [29], "next_sentence_label": 1,
    }  # fmt: skip
    assert data.sequences("train").lengths().tolist() == [6, 5]


@pytest.mark.parametrize(
    ("wrong", "options", "message"),
    [
        ("label", {}, r"a\.hdf5 has no 'next_sentence_labels'; MLPerf's rows have input_ids, segment_ids, "),
        ("place", {}, r"a\.hdf5, row 1: masked_lm_positions do not lie in the sequence, or have not one masked_lm_ids"),
        (
            "word",
            {},
            r"a\.hdf5, row 1: a token outside of 0 to 29; set data\.vocabulary or data\.vocab_size to that of",
        ),
        ("", {"max_length": 8, "vocab_size": 5}, r"a\.hdf5, row 0: a token outside of 0 to 4; "),
    ],
)
def test_rows_that_are_not_mlperfs(tmp_path: Path, wrong: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        hdf5_data(write_hdf5(tmp_path / "a.hdf5", wrong), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "a", "hdf5": "b"}, r"^data\.text and data\.hdf5 are both set; give one of them\.$"),
        ({"hdf5": "a"}, r"^data\.val_hdf5 is not set, but its counterpart is; give both\.$"),
        ({"val_text": "a"}, r"^data\.text is not set, but its counterpart is; give both\.$"),
        ({"batch_size": 0}, r"^data\.batch_size is 0; it must be at least 1\.$"),
    ],
)
def test_configurations_that_contradict_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def test_text_that_cant_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none does not exist; name a text file, or a folder with some\.$"):
        data_of(tmp_path / "none")
    (tmp_path / "one.txt").write_text("A word. Another one.")
    with pytest.raises(DataError, match=r"^the text is 1 document\(s\), and some must be kept for validation; give fi"):
        data_of(tmp_path / "one.txt")
    text = write_text(tmp_path / "text", 4)
    with pytest.raises(ConfigError, match=r"^data\.batch_size is 500, but each of 1 process\(es\) has only \d+ train"):
        data_of(text, batch_size=500).train_dataloader()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(DataError, match=r"vocab\.txt has no \[MASK\]; a vocabulary has a different word on each line"):
        data_of(text, vocabulary=str(tmp_path / "vocab.txt"))


@pytest.mark.skipif(not SHARED_BOOKS.exists(), reason="the books are not here")
def test_books_with_berts_own_vocabulary(tmp_path: Path, golden: Path) -> None:
    import tarfile

    with tarfile.open(SHARED_BOOKS) as tar:
        names = [name for name in tar.getnames() if name.endswith(".md")][:2]
        tar.extractall(tmp_path, [tar.getmember(name) for name in names], filter="data")
    vocabulary = golden / "bert-base-uncased-vocab.txt"
    data = data_of(tmp_path, vocabulary=str(vocabulary), max_length=128, text_format="paragraphs")
    lengths = data.sequences("train").lengths()
    assert data.vocab_size == 30522
    assert len(lengths) > 100
    assert lengths.max() == 128
    assert 0.3 < lengths.mean() / 128 < 0.9, "paragraphs are as long as they are"
    unknown = float((np.asarray(data.sequences("train").tokens()) == 100).mean())
    assert unknown < 0.002, "English is in the vocabulary"
