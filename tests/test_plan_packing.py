"""`fasttrain plan packing`: tables of a file of lengths or a recipe's data, and what it says of others."""

import json
from pathlib import Path

import numpy as np
import pytest

from fasttrain.callbacks.sequence_packing.lengths_file import histogram_in
from fasttrain.cli import main
from fasttrain.errors import ConfigError, DataError

LENGTHS = [2, 2, 3, 3, 3, 4, 8, 12]


def write(folder: Path, kind: str) -> Path:
    file = folder / f"lengths.{kind.partition(' ')[2] or kind}"
    counted = {length: LENGTHS.count(length) for length in LENGTHS}
    if kind == "npy":
        np.save(file, np.array(LENGTHS, dtype=np.uint16))
    elif kind == "json":
        file.write_text(json.dumps(LENGTHS))
    elif kind == "counted json":
        file.write_text(json.dumps(counted))
    elif kind == "txt":
        file.write_text("\n".join(map(str, LENGTHS)))
    else:
        file.write_text("length,count\n" + "".join(f"{length},{count}\n" for length, count in counted.items()))
    return file


@pytest.mark.parametrize("kind", ["npy", "json", "counted json", "txt", "csv"])
def test_lengths_come_one_by_one_or_counted(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, kind)
    assert histogram_in(file).tolist() == [0, 0, 2, 3, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert len(histogram_in(file, 16)) == 17


def test_files_that_hold_no_lengths(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"a\.pt is no file of lengths; give \.npy with the length of each sequence, "
    ):
        histogram_in(tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"none\.txt can't be read as lengths \(.*No such file"):
        histogram_in(tmp_path / "none.txt")
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"a\.npy can't be read as lengths \(it has shape \[2, 2\] of float64\); give "):
        histogram_in(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"entry 5: 1 sequences of 12 tokens; lengths are from 1 to 10 tokens, a row's"):
        histogram_in(write(tmp_path, "counted json"), 10)


def test_the_command_prints_lengths_rows_and_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_(["plan", "packing", str(write(tmp_path, "txt")), "--max-length", "16", "--batch-size", "4"])
    printed = capsys.readouterr().out
    assert "8 sequences, 4.6 tokens on average" in printed
    (packed,) = [line.split() for line in printed.splitlines() if line.startswith(" packed")]
    (padded,) = [line.split() for line in printed.splitlines() if line.startswith(" padded to 16")]
    assert (packed[1], padded[3]) == ("3", "8")
    assert float(packed[-1]) == pytest.approx(8 / 3, abs=0.01)
    assert "padded to the longest of 4" in printed


def test_the_command_takes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    for number in range(30):
        lines = [f"Line {line} of text {number} is here." for line in range(1 + number % 5)]
        (tmp_path / f"{number:02}.txt").write_text(" ".join(lines))
    small = ["data.vocab_size=60", "data.max_length=64", "data.batch_size=4", "data.num_workers=0"]
    main_(["plan", "packing", "bert", f"data.text={tmp_path}", *small, "--max-sequences", "2"])
    printed = capsys.readouterr().out
    assert "padded to the longest of 4" in printed
    assert "sequences in a row" in printed
    by_number = printed.split("sequences in a row")[1].split("patterns")[0].splitlines()
    assert [line.split()[0] for line in by_number if line[:1] == " " and line.split() and line.split()[0].isdigit()][
        :2
    ] == [
        "1",
        "2",
    ]
    with pytest.raises(SystemExit):
        main_(["plan", "packing", str(write(tmp_path, "csv")), "seed=3"])
    assert "is a file of lengths, and seed=3 a recipe's value; use --max-length." in capsys.readouterr().err


def test_data_that_cant_be_packed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    generated = ["data.generated.train_images=4", "data.generated.val_images=2", "data.batch_size=2", "preset=small"]
    with pytest.raises(SystemExit):
        main_(["plan", "packing", "retinanet", *generated])
    assert "has no 'input_ids', whose length says how many tokens it has" in capsys.readouterr().err


def main_(arguments: list[str]) -> None:
    """Run a command; one that ends well is no exit."""
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise
