"""The bench that trains a small BERT on books to a target, in miniature and on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from fasttrain.bench import with_options
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError
from fasttrain.measure import Row
from fasttrain.optimization import Applies, Refuses
from fasttrain.recipes.bert import bench, bench_books
from fasttrain.recipes.bert.bench_books import (
    EVERY_VARIANT,
    VARIABLE,
    Run,
    Training,
    books_of,
    chosen,
    module_of,
    prepared,
    rows_of,
    train,
)
from fasttrain.recipes.bert.bench_fit import planned

pytest.importorskip("tokenizers")

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
TINY = Training(
    target=0.2, steps=60, every=10, batch_size=12, lr=1e-2, warmup_steps=4, sizes=SIZES,
    data={"num_workers": 0, "val_batch_size": 8},
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two books of short paragraphs, in few words."""
    folder = tmp_path_factory.mktemp("books")
    for book in range(2):
        paragraphs = [
            " ".join(f"The {('cat', 'dog')[number % 2]} of room {line} sleeps." for line in range(1 + number % 9))
            for number in range(120)
        ]
        (folder / f"{book}.md").write_text("\n\n".join(paragraphs))
    return folder


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(text))
        yield prepared(vocab_size=60, cache_folder=str(tmp_path_factory.mktemp("cache")))


def found(rows: Iterator[Row]) -> dict[str, Row]:
    return {row.metric: row for row in rows}


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_seconds_and_steps_to_the_target(folder: Path, name: str) -> None:
    (variant,) = chosen(name)
    rows = found(rows_of(variant, {seed: train(variant, folder, seed, TINY) for seed in (0, 1)}, folder, TINY))
    assert set(rows) == {"seconds_to_target", "steps_to_target", "seconds"}
    assert {(row.subject, row.case, row.variant, row.repeats) for row in rows.values()} == {
        ("bert", "classic_books", name, 2)
    }
    assert 0 < rows["seconds_to_target"].value <= rows["seconds"].value
    assert 0 < rows["steps_to_target"].value < TINY.steps, "it stopped there"
    note = rows["seconds"].note
    assert note.startswith("sequence_packing;" if name == "packed" else "no room;")
    assert "reached by 2 of 2, seeds 0 1; last scores 0." in note
    fill = books_of(folder, 0, TINY).sequences("train").lengths().mean() / 192
    assert f"sequences fill {fill:.1%} of 192 tokens" in note


def test_a_target_that_no_run_reaches_has_no_row(folder: Path) -> None:
    training, (variant,) = replace(TINY, target=1.1, steps=5, every=2, stop=False), chosen("padded")
    rows = found(rows_of(variant, {0: train(variant, folder, 0, training)}, folder, training))
    assert set(rows) == {"seconds", "mlm_accuracy"}
    assert "reached by 0 of 1" in rows["seconds"].note
    assert f"last scores {rows['mlm_accuracy'].value:.4f} at 4" in rows["seconds"].note


def test_without_a_stop_the_run_goes_on_to_the_schedule_s_end(folder: Path) -> None:
    run = train(chosen("padded")[0], folder, 0, replace(TINY, target=0.0, steps=6, every=2, stop=False))
    assert (run.steps, [score.step for score in run.scores]) == (6, [2, 4, 6])
    assert 0 < run.scores[0].seconds < run.scores[1].seconds < run.scores[2].seconds <= run.seconds
    assert run.first(0.0) == run.scores[0]
    assert run.first(max(score.accuracy for score in run.scores) + 0.01) is None


def test_a_run_ends_when_its_time_is_over(folder: Path) -> None:
    run = train(chosen("padded")[0], folder, 0, replace(TINY, target=1.1, seconds=0.0))
    assert run.steps < TINY.steps


def test_packed_and_padded_runs_are_judged_after_as_many_sequences(folder: Path) -> None:
    training = replace(TINY, target=1.1, steps=20, every=4)
    padded, packed = (train(chosen(name)[0], folder, 0, training) for name in ("padded", "packed"))
    assert [score.step for score in padded.scores] == [4, 8, 12, 16, 20]
    assert len(packed.scores) >= 4
    for one, other in zip(padded.scores, packed.scores, strict=False):
        assert abs(one.step - other.step) <= 2, "rows hold as many sequences on average"


def test_text_is_prepared_once_for_all_seeds(
    text: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(text))
    options: dict[str, Any] = {"vocab_size": 60, "cache_folder": str(folder.parent)}
    made = (folder / "made.json").stat().st_mtime_ns
    assert prepared(**options) == folder
    assert (folder / "made.json").stat().st_mtime_ns == made
    monkeypatch.setenv(VARIABLE, str(folder))
    assert prepared() == folder, "what was prepared elsewhere is taken as it is"
    one, other = (books_of(folder, seed, TINY) for seed in (0, 1))
    assert one.sequences("train").tokens().tolist() == other.sequences("train").tokens().tolist()
    assert [batch["input_ids"].tolist() for batch in one.train_dataloader()] != [
        batch["input_ids"].tolist() for batch in other.train_dataloader()
    ], "order and masks are the seed's"


def test_who_has_not_said_where_the_books_are_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"^bert/classic_books trains on the books that FASTTRAIN_CLASSIC_BOOKS names"
                       r", which is not set; set it to a folder of \.txt or \.md files, or to sequences"):  # fmt: skip
        next(bench_books.to_target())
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"which is '.*/nowhere' and no folder; set it to"):
        prepared()


def test_options_choose_a_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in bench.cases() if case.name == "classic_books")
    assert case.needs_gpu
    assert case.options["variants"] == EVERY_VARIANT
    asked: list[tuple[str, int, Training]] = []

    def noted(variant: Any, place: Path, seed: int, training: Training) -> Run:
        asked.append((variant.name, seed, training))
        return Run([], training.steps, 1.0)

    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(bench_books, "train", noted)
    options = {"variants": "packed padded", "seeds": "3 4", "target": "0.4", "steps": "70", "stop": "0", "seconds": "9"}
    rows = list(with_options([case], options)[0].run())
    assert {row.variant for row in rows} == {"packed", "padded"}
    # One short run of each comes before those that count.
    assert [(name, seed) for name, seed, _ in asked] == [
        (name, seed) for name in ("packed", "padded") for seed in (0, 3, 4)
    ]
    training = asked[1][2]
    assert (training.target, training.steps, training.seconds, training.stop) == (0.4, 70, 9.0, False)
    with pytest.raises(ConfigError, match=r"^bench option variants names 'paked'; did you mean 'packed'\?$"):
        chosen("padded paked")


def test_fp8_is_in_the_encoder_and_in_the_graph(folder: Path) -> None:
    (variant,) = chosen("packed_graph_fp8")
    torch.manual_seed(0)
    data = books_of(folder, 0, TINY)
    module = module_of(data, TINY)
    plan, context = planned(variant, module, data, Hardware("gpu", "cpu", "an H200", 2, (9, 0)))
    verdicts = {entry.optimization.name: entry.verdict for entry in plan.entries}
    assert context.precision == "bf16-mixed"
    assert isinstance(verdicts["fp8_linear"], Applies)
    # In each layer attention's joined projections, its output, and the feed-forward block; neither pooler nor heads.
    assert verdicts["fp8_linear"].note.startswith("6 sites")
    # There is no CUDA on this machine; on one the graph is captured with FP8 in it.
    assert isinstance(verdicts["cuda_graph_step"], Refuses)
    assert "CUDA graphs need an NVIDIA GPU" in verdicts["cuda_graph_step"].reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPU refuses")
def test_a_room_that_does_not_apply_is_no_silent_other_variant(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^packed_graph_fp8: \[\('fp8_linear', .*FP8 products need an NVIDIA GPU"):
        train(chosen("packed_graph_fp8")[0], folder, 0, TINY)


def test_seeds_decide_the_weights_and_variants_do_not(folder: Path) -> None:
    data = books_of(folder, 0, TINY)
    weights = []
    for seed in (0, 0, 1):
        pl.seed_everything(seed, verbose=False)
        weights.append(module_of(data, TINY).model.state_dict()["bert.pooler.dense.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
