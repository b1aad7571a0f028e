"""Sequence packing's plan: every sequence once, as full as published plans, the same for the same seed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fasttrain.callbacks.sequence_packing.histogram import histogram_of, lengths_of
from fasttrain.callbacks.sequence_packing.nnls import mixture_of
from fasttrain.callbacks.sequence_packing.patterns import count_of_patterns, exact_patterns
from fasttrain.callbacks.sequence_packing.plan import PackingPlan, deal, make_plan, whole_batches
from fasttrain.callbacks.sequence_packing.reference import greedy_rows
from fasttrain.callbacks.sequence_packing.table import longest_of, packing_tables
from fasttrain.errors import ConfigError, DataError

MOST = 24
some_lengths = st.lists(st.integers(1, MOST), max_size=60)


def plan_of(lengths: list[int], **options: Any) -> PackingPlan:
    return make_plan(histogram_of(np.array(lengths, dtype=np.int32), MOST), max_length=MOST, **options)


def published(golden: Path, name: str) -> NDArray[np.int64]:
    """Return a histogram whose entry i counts sequences of length i; the file's counts those of i + 1."""
    held = json.loads((golden / "bert_seqlen_histograms.json").read_text())
    return np.array([0, *held[f"{name}_histogram"]], dtype=np.int64)


@pytest.mark.parametrize(("length", "most"), [(1, 1), (7, 1), (7, 2), (12, 3), (12, 5), (30, 4)])
def test_patterns_are_all_multisets_that_fill_a_row(length: int, most: int) -> None:
    found = exact_patterns(length, most)
    assert (found.sum(axis=1) == length).all()
    assert (np.diff(found, axis=1) >= 0).all()

    def count(total: int, parts: int, largest: int) -> int:
        if total == 0:
            return 1
        return sum(count(total - part, parts - 1, part) for part in range(1, min(total, largest) + 1)) if parts else 0

    assert len({tuple(row) for row in found.tolist()}) == len(found) == count(length, most, length)


def test_the_number_of_patterns_of_the_submission() -> None:
    assert len(exact_patterns(512, 3)) == 22_102
    assert abs(count_of_patterns(512, 3) - 22_102) < 300


def test_the_mixture_is_the_one_of_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    patterns = exact_patterns(40, 3)
    matrix = np.zeros((41, len(patterns)))
    for place in range(3):
        np.add.at(matrix, (patterns[:, place], np.arange(len(patterns))), 1.0)
    matrix[0] = 0
    for seed in range(5):
        random = np.random.default_rng(seed)
        wanted, weights = random.gamma(1.0, 100.0, 41), np.sqrt(np.arange(41) / 40)
        wanted[0] = 0
        found = mixture_of(patterns, wanted, weights)
        _, error = optimize.nnls(matrix * weights[:, None], wanted * weights)
        assert (found >= 0).all()
        assert np.linalg.norm(weights * (matrix @ found - wanted)) == pytest.approx(error, rel=1e-9, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(lengths=some_lengths, most=st.integers(1, 5), method=st.sampled_from(["auto", "mixture", "best_fit"]))
def test_every_sequence_once_and_no_row_too_full(lengths: list[int], most: int, method: Any) -> None:
    plan = plan_of(lengths, max_sequences=most, method=method)
    members = deal(plan, np.array(lengths, dtype=np.int32), seed=3)
    assert len(members) == plan.rows
    assert sorted(members[members >= 0].tolist()) == list(range(len(lengths)))
    for row in members.tolist():
        inside = [lengths[i] for i in row if i >= 0]
        assert inside
        assert sum(inside) <= MOST
        assert len(inside) <= most
    assert plan.sequences == len(lengths)
    assert plan.tokens == sum(lengths)
    assert plan.efficiency == pytest.approx(sum(lengths) / (len(members) * MOST) if lengths else 1.0)


@settings(max_examples=60, deadline=None)
@given(lengths=some_lengths, most=st.integers(1, 5))
def test_best_fit_is_as_good_as_sequence_by_sequence(lengths: list[int], most: int) -> None:
    assert plan_of(lengths, max_sequences=most, method="best_fit").rows == len(greedy_rows(lengths, MOST, most))


@settings(max_examples=30, deadline=None)
@given(lengths=some_lengths)
def test_auto_takes_the_better_plan(lengths: list[int]) -> None:
    rows = {method: plan_of(lengths, method=method).rows for method in ("auto", "mixture", "best_fit")}  # type: ignore[arg-type]
    assert rows["auto"] == min(rows.values())


def test_rows_are_set_by_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, MOST + 1, 200).astype(np.int32)
    plan = plan_of(lengths.tolist())
    first = deal(plan, lengths, seed=1, epoch=2)
    np.random.default_rng().random(3)
    assert np.array_equal(first, deal(plan, lengths, seed=1, epoch=2))
    others = [deal(plan, lengths, seed=seed, epoch=epoch) for seed, epoch in ((1, 3), (2, 2))]
    assert not any(np.array_equal(first, other) for other in others)
    still = [deal(plan, lengths, seed=seed, epoch=epoch, shuffle=False) for seed, epoch in ((1, 3), (2, 2))]
    assert np.array_equal(*still)


def test_out_of_core(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, MOST + 1, 300).astype(np.int32)
    np.save(tmp_path / "lengths.npy", lengths)
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    plan = make_plan(histogram_of(mapped, MOST), max_length=MOST)
    found = deal(plan, mapped, seed=0, out=tmp_path / "rows.npy")
    assert isinstance(found, np.memmap)
    assert np.array_equal(found, deal(plan, lengths, seed=0))


def test_a_plan_for_other_lengths() -> None:
    with pytest.raises(ValueError, match=r"^the plan was made for another histogram than that of these lengths$"):
        deal(plan_of([3, 4]), np.array([3, 5]), seed=0)


@pytest.mark.parametrize(("most", "length"), [(0, MOST), (3, MOST + 1)])
def test_values_that_no_plan_can_be_made_for(most: int, length: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"^a plan of rows with {most} sequences and {length} tokens, from a histogram "
    ):
        make_plan(np.zeros(MOST + 1, dtype=np.int64), max_length=length, max_sequences=most)


@settings(max_examples=60, deadline=None)
@given(lengths=some_lengths, multiple=st.integers(1, 20))
def test_whole_batches_lose_and_repeat_nothing(lengths: list[int], multiple: int) -> None:
    members = deal(plan_of(lengths), np.array(lengths, dtype=np.int32), seed=0)
    whole = whole_batches(members, multiple)
    assert len(whole) % multiple == 0
    assert len(whole) - len(members) < multiple
    assert sorted(whole[whole >= 0].tolist()) == list(range(len(lengths)))
    empty = int((whole < 0).all(axis=1).sum())
    assert not empty or (whole >= 0).sum(axis=1).max() <= 1, "empty rows only where none is left to split"


@pytest.mark.parametrize(("length", "reason"), [(0, "0 tokens"), (25, "25 tokens")])
def test_a_length_that_no_row_takes(length: int, reason: str) -> None:
    with pytest.raises(DataError, match=rf"^sequence 1 has {reason}; a row takes from 1 to 24\.$"):
        histogram_of(np.array([3, length, 5]), MOST)


class Sequences(Dataset[Any]):
    def __init__(self, lengths: list[int]) -> None:
        self.held = lengths
        self.read = 0

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return {"input_ids": torch.zeros(self.held[index])}


class Telling(Sequences):
    def lengths(self) -> list[int]:
        return self.held


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_by_one_pass(workers: int) -> None:
    held = list(range(1, 3000))
    assert lengths_of(Sequences(held), "input_ids", workers=workers).tolist() == held


def test_lengths_that_the_data_set_tells() -> None:
    dataset = Telling([4, 5, 6])
    assert lengths_of(dataset, "input_ids").tolist() == [4, 5, 6]
    assert dataset.read == 0
    dataset.lengths = lambda: [1, 2]  # type: ignore[method-assign]
    with pytest.raises(
        DataError, match=r"^lengths\(\) of Telling gives an array of shape \(2,\); its 3 samples need one"
    ):
        lengths_of(dataset, "input_ids")


def test_lengths_are_kept_and_checked(tmp_path: Path) -> None:
    cache, dataset = tmp_path / "kept" / "lengths.npy", Sequences(list(range(1, 100)))
    first = lengths_of(dataset, "input_ids", cache=cache)
    dataset.read = 0
    assert np.array_equal(lengths_of(dataset, "input_ids", cache=cache), first)
    assert dataset.read == 16, "a few samples are looked at"
    with pytest.raises(
        DataError, match=r"lengths\.npy has the lengths of 99 sequences, but the data set has 3; delete"
    ):
        lengths_of(Sequences([1, 2, 3]), "input_ids", cache=cache)
    with pytest.raises(
        DataError, match=r"lengths\.npy says that sequence 0 has 1 tokens, but it has 2; delete the file"
    ):
        lengths_of(Sequences(list(range(2, 101))), "input_ids", cache=cache)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((1, 2), r"^sample 0 is a tuple; packing needs dicts of named sequences, one of them 'input_ids'\.$"),
        ({"ids": [1]}, r"^sample 0 has no 'input_ids', whose length says how many tokens it has; it has ids\. Name"),
        ({"input_ids": 3}, r"^'input_ids' of sample 0 is a int without a length; name by length_key a sequence with"),
    ],
)
def test_samples_without_a_length(sample: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lengths_of([sample], "input_ids")


def test_squads_lengths_pack_as_well_as_published(golden: Path) -> None:
    plan = make_plan(published(golden, "squad_1_1"), max_length=384)
    assert plan.sequences == 88_641
    assert plan.efficiency >= 0.986, "a linear program's bound for three a row is 0.9880"


def test_wikipedias_lengths_by_best_fit_with_as_many_a_row_as_published(golden: Path) -> None:
    plan = make_plan(published(golden, "wikipedia"), max_length=512, max_sequences=12, method="best_fit")
    of_file = json.loads((golden / "bert_seqlen_histograms.json").read_text())["published"]
    assert (
        round(100 * plan.efficiency, 4)
        >= of_file["lpfhp_efficiency_pct_depth12"]
        > of_file["spfhp_efficiency_pct_depth12"]
    )


WHOLE = """
import json, sys, time
import numpy as np
from fasttrain.callbacks.sequence_packing.histogram import histogram_of
from fasttrain.callbacks.sequence_packing.plan import deal, make_plan
held = np.load(sys.argv[1])
lengths = np.repeat(np.arange(513, dtype=np.uint16), held)
start = time.process_time()
plan = make_plan(histogram_of(lengths, 512), max_length=512)
members = deal(plan, lengths, seed=0)
seconds = time.process_time() - start
# Not ru_maxrss, in which a process has that of the one that started it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kilobytes = int(status["VmHWM"].split()[0])
seen = np.bincount(members[members >= 0], minlength=len(lengths))
tokens = sum(np.where(members[:, p] >= 0, lengths[members[:, p]], 0).astype(np.int32) for p in range(3))
print(json.dumps({"seconds": seconds, "kilobytes": kilobytes,
                  "once": bool((seen == 1).all()), "fullest": int(tokens.max()), "rows": len(members),
                  "efficiency": plan.efficiency, "sequences": len(lengths)}))
"""


def test_wikipedias_sequences_all_of_them(golden: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "histogram.npy", published(golden, "wikipedia"))
    command = [sys.executable, "-c", WHOLE, str(tmp_path / "histogram.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    of_file = json.loads((golden / "bert_seqlen_histograms.json").read_text())["published"]
    assert found["sequences"] == of_file["sequences"]
    assert found["once"]
    assert found["fullest"] <= 512
    assert found["efficiency"] >= max(0.995, of_file["nnlshp_efficiency_depth3"])
    assert found["seconds"] < 60
    assert found["kilobytes"] < 2e6


def test_tables_say_what_packing_will_do() -> None:
    histogram = np.bincount([2, 2, 3, 3, 3, 4, 8, 12], minlength=17)
    lengths, rows, gain = packing_tables(histogram, max_length=16, batch_size=4)
    assert [row[:2] for row in lengths.rows[:4]] == [["1 to 2", 2], ["3 to 4", 4], ["5 to 6", 0], ["7 to 8", 1]]
    assert lengths.note == "8 sequences, 4.6 tokens on average"
    assert [row[:2] for row in rows.rows] == [[1, 0], [2, 1], [3, 2]]
    assert [row[0] for row in gain.rows] == [
        "padded to 16",
        "padded to the longest of 4",
        "packed",
        "no padding at all",
    ]
    assert [row[1] for row in gain.rows] == [8, 8, 3, 3]
    assert [gain.rows[i][3] for i in (0, 2, 3)] == [1.0, 2.667, 3.459]
    assert all(table.rows for table in packing_tables(np.zeros(9, dtype=np.int64), max_length=8))


def test_the_longest_of_a_batch() -> None:
    histogram = np.array([0, 1, 1])
    assert longest_of(histogram, 1) == pytest.approx(1.5)
    assert longest_of(histogram, 2) == pytest.approx(1.75)
