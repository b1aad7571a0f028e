"""Wasted work of an epoch, by which NVIDIA chose its nodes for ResNet-50 of MLPerf v2.0, and what is proposed."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fasttrain.batch_plan import BatchPlan, proposals
from fasttrain.cli import app
from fasttrain.errors import ConfigError

IMAGENET = 1_281_167


@pytest.mark.parametrize(
    ("nodes", "global_batch", "steps", "percent"),
    [(512, 65_536, 20, "2.31"), (460, 58_880, 22, "1.11"), (530, 67_840, 19, "0.61"), (527, 67_456, 19, "0.04")],
)
def test_nodes_of_mlperf_submissions(nodes: int, global_batch: int, steps: int, percent: str) -> None:
    plan = BatchPlan(IMAGENET, gpus=8 * nodes, batch=16)
    assert (plan.global_batch, plan.steps) == (global_batch, steps)
    assert f"{100 * plan.waste:.2f}" == percent


def test_527_nodes_waste_0_039_percent_and_are_the_first_proposal_near_512() -> None:
    best = proposals(BatchPlan(IMAGENET, gpus=8 * 512, batch=16), gpus_per_node=8)[0]
    assert (best.gpus, best.batch, best.global_batch) == (8 * 527, 16, 67_456)
    assert f"{best.waste:.3%}" == "0.039%"


def test_warm_up_and_evaluations_of_nvidias_run_at_scale() -> None:
    plan = BatchPlan(IMAGENET, gpus=8 * 527, batch=16)
    assert plan.warmup_steps(31) == 31 * 19
    due = plan.evaluations(epochs=90, every=4, offset=2)
    assert due[:3] == [(3, 57), (7, 133), (11, 209)], "a first block of 3 epochs, then 4"
    assert due[-2:] == [(87, 87 * 19), (90, 90 * 19)], "the last epoch is evaluated after, too"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 64))
def test_waste_is_less_than_a_step(samples: int, gpus: int, batch: int) -> None:
    if gpus * batch > samples:
        with pytest.raises(ConfigError):
            BatchPlan(samples, gpus, batch)
        return
    plan = BatchPlan(samples, gpus, batch)
    assert 0 <= plan.waste * samples < plan.global_batch + 1e-6
    assert plan.steps == math.ceil(samples / plan.global_batch)
    found = proposals(plan)
    assert [each.waste for each in found] == sorted(each.waste for each in found)
    assert found[0].waste <= plan.waste, "the wanted batch is near itself"
    assert all(abs(each.global_batch - plan.global_batch) <= 0.05 * plan.global_batch for each in found)
    assert {each.gpus for each in found} == {gpus}, "without nodes the GPUs stay"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((0, 1, 1), "samples is 0; it must be at least 1."),
        ((100, 8, 0), "batch is 0; it must be at least 1."),
        (
            (100, 8, 16),
            "8 GPUs with 16 samples each take 128 a step, but the epoch has only 100; take fewer.",
        ),
    ],
)
def test_impossible_plans(values: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchPlan(*values)
    assert str(caught.value) == sentence


def test_gpus_that_are_no_whole_nodes() -> None:
    with pytest.raises(ConfigError, match=r"^12 GPUs are not whole nodes of 8; give a multiple, or leave .* out\.$"):
        proposals(BatchPlan(1000, 12, 1), gpus_per_node=8)


def test_the_command_prints_the_plan_and_what_is_better() -> None:
    arguments = ["plan", "batch", str(IMAGENET), "--gpus=4096", "--batch=16", "--gpus-per-node=8", "--epochs=90",
                 "--warmup-epochs=31"]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[1] == ["4,096", "16", "65,536", "20", "2.307%"]
    assert lines[5] == ["4,216", "16", "67,456", "19", "0.039%"]
    assert "warm-up: 620 steps in 31 epochs" in done.output
    assert "evaluations: 23 in 90 epochs, after epoch (step) 3 (60), 7 (140)" in done.output
