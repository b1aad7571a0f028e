"""BERT's rates in `Trainer.fit`, in miniature and on the CPU: what each variant trains on, and its rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.bench import Case
from fasttrain.callbacks import CATALOGUE
from fasttrain.plan import requested
from fasttrain.recipes.bert import bench
from fasttrain.recipes.bert.bench import BY_COUNT, VARIANTS, Corpus, CorpusData, rate_rows
from fasttrain.recipes.bert.data import DataConfig

TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
LENGTHS = np.random.default_rng(0).integers(8, 512, 64)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with Corpus(LENGTHS) as made:
        yield made


def cases() -> dict[str, Case]:
    return {case.name: case for case in bench.cases()}


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_rows_are_rates_of_steps_with_their_data(folder: Path, name: str) -> None:
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    sizes: dict[str, Any] = {"model": TINY, "batch_size": 4, "warm_up": 1, "size": 2, "count": 2, "workers": 0}
    rows = {row.metric: row for row in rate_rows(variant, folder, "large_512_rows2", **sizes)}
    assert {(row.case, row.variant, row.repeats) for row in rows.values()} == {("large_512_rows2", name, 2)}
    sequences = rows["sequences_per_second"].value * rows["step_ms"].value / 1e3
    assert sequences == pytest.approx(4, rel=0.4), "packed rows hold as many on average"
    assert ("sequence_packing" in rows["step_ms"].note) == (name == "packed")


def test_a_graph_by_count_has_a_shape_for_each_number_of_sequences(folder: Path) -> None:
    wanted, _ = requested(dict(BY_COUNT.rooms), CATALOGUE)
    assert [each.name for each in wanted] == ["sequence_packing", "cuda_graph_step"]
    shapes = {}
    for name, variant in (
        ("static", next(variant for variant in VARIANTS if variant.name == "packed_graph")),
        ("by_count", BY_COUNT),
    ):
        (packing, _), _ = requested(dict(variant.rooms), CATALOGUE)
        packed = packing.data_module(CorpusData(folder, DataConfig(batch_size=4, num_workers=0)))  # type: ignore[attr-defined]
        packed.setup("fit")
        batches = list(packed.train_dataloader())
        assert {len(batch["input_ids"]) for batch in batches} == {2}
        shapes[name] = {
            tuple((key, tuple(value.shape)) for key, value in batch.items() if key != "totals") for batch in batches
        }
    assert len(shapes["static"]) == 1
    assert 1 < len(shapes["by_count"]) <= 5


def test_two_rows_a_step_is_a_case_of_which_a_part_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()["large_512_rows2"]
    assert set(str(case.options["variants"]).split(",")) <= {variant.name for variant in (*VARIANTS, BY_COUNT)}
    asked = []
    monkeypatch.setattr(bench, "SEQUENCES", 40)
    monkeypatch.setattr(bench, "rate_rows", lambda variant, *_, **options: asked.append((variant.name, options)) or [])
    assert list(replace(case, run=lambda: case.run(variants="packed_graph_by_count,packed")).run()) == []  # type: ignore[call-arg]
    assert [name for name, _ in asked] == ["packed", "packed_graph_by_count"]
    assert all(options["batch_size"] == 4 for _, options in asked)
