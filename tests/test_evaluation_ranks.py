"""Dedicated evaluation ranks without Lightning: weights arrive, scores come back in time, and nobody waits in vain."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import score_functions
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import Ended, run_ranks
from torch import Tensor, nn

from fasttrain.callbacks.async_scoring import Tag
from fasttrain.callbacks.evaluation_ranks import (
    EvaluationRanksConfig,
    EvaluationSide,
    FlatWeights,
    TrainingSide,
    WaitSchedule,
    assign_roles,
    share,
)
from fasttrain.callbacks.evaluation_ranks.reference import TOLERANCE, reference
from fasttrain.errors import ConfigError, OptimizationError

forks = pytest.mark.skipif(torch.cuda.is_initialized(), reason="a process that uses CUDA can't be forked")
IMAGES, BATCH, EPOCHS, BATCHES = 11, 2, 4, 5


# ---- pure parts -----------------------------------------------------------------------------------------------------


def test_the_schedule_of_the_submission() -> None:
    """48 nodes, about 458 batches an epoch: late up to epoch 16, and 350 batches after the weights from then on."""
    schedule = WaitSchedule(early_wait=0, early_epochs=16, late_wait=350)
    for epoch, first in ((1, 457), (16, 457), (17, 350), (18, 350)):
        fires = [lapsed for lapsed in range(1, 458) if schedule.is_due(epoch, lapsed, 458)]
        assert fires[0] == first, epoch


@pytest.mark.parametrize(("asked", "waits"), [(-1, 9), (0, 9), (1, 1), (9, 9), (10, 9), (11, 9)])
def test_a_wait_that_does_not_fit_is_one_batch_before_the_next_evaluation(asked: int, waits: int) -> None:
    assert WaitSchedule(asked, 3, 5).wait(3, 10) == waits
    assert WaitSchedule(5, 3, asked).wait(4, 10) == waits


def test_without_a_known_distance_the_score_is_taken_before_the_next_evaluation() -> None:
    assert not WaitSchedule().is_due(1, 10**9, float("inf"))
    assert WaitSchedule(late_wait=7).is_due(1, 7, float("inf"))


@given(st.integers(0, 200), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_shares_are_the_whole_in_order(count: int, ranks: int) -> None:
    parts = [share(count, rank, ranks) for rank in range(ranks)]
    assert [batch for part in parts for batch in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"eval_ranks": 0}, r"eval_ranks is 0; it must be at least 1"), ({"early_wait": -1}, "early_wait is -1"),
     ({"timeout_seconds": 0}, "timeout_seconds is 0; it must be more than 0")],
)  # fmt: skip
def test_wrong_parameters(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EvaluationRanksConfig(**wrong)


class Net(nn.Module):
    """Weights of several dtypes, shared and in another memory format, and buffers that are saved and that are not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(3, 1)
        self.tied = self.head
        self.small = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.randn(3, dtype=torch.float64), persistent=False)
        self.register_buffer("scalar", torch.tensor(True))

    def forward(self, images: Tensor) -> Tensor:
        scored: Tensor = self.head(self.body(images).mean((2, 3)))
        return scored + self.small.float().sum() + self.unsaved.sum().float()


def bits(module: nn.Module) -> list[bytes]:
    tensors = [*module.parameters(), *module.buffers()]
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def test_flat_weights_keep_every_bit() -> None:
    one, other = Net(0), Net(1)
    with torch.no_grad():
        one.head.weight[0, 0] = float("nan")
        one.head.weight[0, 1] = -0.0
    flats = FlatWeights(one), FlatWeights(other)
    assert bits(one) != bits(other)
    assert flats[0].layout == flats[1].layout
    flats[0].take()
    expected = bits(one)
    nn.init.zeros_(one.head.weight)  # training goes on
    flats[1].flat.copy_(flats[0].flat)
    flats[1].give()
    assert bits(other) == expected
    assert other.body[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_that_change_their_shape_or_are_none_are_refused() -> None:
    net = Net()
    flat = FlatWeights(net)
    net.body[1].running_mean = torch.zeros(3)  # another tensor, the same layout
    flat.take()
    net.head = nn.Linear(3, 2)
    with pytest.raises(OptimizationError, match="weights of Net have changed their names, shapes or dtypes"):
        flat.take()
    with pytest.raises(OptimizationError, match="ReLU has no parameters and no buffers"):
        FlatWeights(nn.ReLU())


# ---- processes ------------------------------------------------------------------------------------------------------


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(IMAGES, 1, 6, 6, generator=generator).split(BATCH))


def detect(net: Net, number: int, batch: Tensor) -> Any:
    """Two rows for an image, its number first."""
    net.eval()
    with torch.no_grad():
        found = net(batch)[:, 0].double().repeat_interleave(2)
    numbers = (torch.arange(len(batch)) + number * BATCH).repeat_interleave(2)
    return torch.stack([numbers.double(), found], dim=1).numpy()


def train(net: Net, batch: int) -> None:
    """Change all weights, without drawing and alike on all ranks."""
    net.train()
    net(images()[0] + batch).sum().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        net.unsaved.add_(0.01)


SCHEDULE = WaitSchedule(early_wait=0, early_epochs=2, late_wait=2)


def work(rank: int, eval_ranks: int) -> dict[str, Any]:
    roles = assign_roles(eval_ranks, timeout_seconds=20, dead_after_seconds=20)
    net = Net(seed=0 if roles.trains else 1)
    told: dict[str, Any] = {"weights": [], "scores": [], "taken": [], "seen": []}
    if roles.trains:
        side, step = TrainingSide(roles, net, SCHEDULE, 20), 0
        for epoch in range(EPOCHS):
            for batch in range(BATCHES):
                train(net, batch)
                step += 1
                if scored := side.after_batch():
                    told["scores"].append((scored.tag, scored.scores))
                    told["taken"].append(step)
            assert side.pending is None, "a score is taken before the next evaluation begins"
            side.hand_over(Tag(step, epoch), BATCHES)
            told["weights"].append(bits(net))
        if scored := side.collect():
            told["scores"].append((scored.tag, scored.scores))
        side.finish()
        return told

    def evaluate(tag: Tag) -> list[Any]:
        told["weights"].append(bits(net))
        batches = images()
        mine = share(len(batches), roles.role_rank, roles.role_size)
        told["seen"].append(list(mine))
        return [detect(net, number, batches[number]) for number in mine]

    EvaluationSide(roles, net, "score_functions:in_order", {}, timeout_seconds=20).serve(evaluate)
    return told


@forks
@pytest.mark.parametrize(("training", "evaluation"), [(1, 1), (2, 2)])
def test_scores_come_back_late_and_equal_those_of_one_process(training: int, evaluation: int) -> None:
    ranks = run_ranks(training + evaluation, lambda rank: work(rank, evaluation))
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    trained, evaluated = ranks[:training], ranks[training:]

    net, step, weights, scores = Net(), 0, [], []
    for epoch in range(EPOCHS):
        for batch in range(BATCHES):
            train(net, batch)
            step += 1
        weights.append(bits(net))
        numbered = list(enumerate(images()))
        found = reference(lambda pair: detect(net, *pair), numbered, score_functions.in_order, {})
        scores.append((Tag(step, epoch), found))
    assert TOLERANCE == 0
    for rank in trained:
        assert rank["weights"] == weights, "training goes on as if nobody evaluated"
        assert rank["scores"] == scores
        # Epochs 1 and 2 one batch before the next evaluation, from epoch 3 on two batches after the weights.
        assert rank["taken"] == [5 + 4, 10 + 4, 15 + 2]
    for rank in evaluated:
        assert rank["weights"] == weights, "weights arrive as they were when they were handed over"
    shares = [batch for rank in evaluated for batch in rank["seen"][0]]
    assert shares == list(range(len(images()))), "each batch once, in order"
    assert scores[0][1]["images"] == IMAGES


def faulty_work(rank: int, eval_ranks: int, fault: str) -> Any:
    timeout: float = 1.5 if fault == "hangs" else 30
    roles = assign_roles(eval_ranks, timeout_seconds=timeout, dead_after_seconds=2.5 if "killed" in fault else 20)
    net = nn.Linear(2, 1) if fault == "another module" and not roles.trains else Net()
    truth = {"folder": os.environ["FAULTS"], "times": 2, "fault": "raises"}
    score = "score_functions:faulty" if fault == "score" else "score_functions:in_order"
    if roles.trains:
        side = TrainingSide(roles, net, WaitSchedule(late_wait=1000), timeout)
        side.hand_over(Tag(1, 0))
        try:
            for batch in range(100_000):
                time.sleep(0.005)
                if fault == "training raises" and batch == 20 and rank == roles.training - 1:
                    raise KeyError("a label")
                if fault == "training killed" and batch == 20 and rank == roles.training - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if side.after_batch():
                    side.finish()
                    return "scored"
                if fault in ("hangs", "score") and batch == 20:
                    side.collect()
        except BaseException as error:
            side.abandon(error)
            raise

    def evaluate(tag: Tag) -> list[Any]:
        if fault.startswith("evaluation") and rank == roles.evaluation_ranks[-1]:
            if fault == "evaluation killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a broken image")
        if fault == "hangs":
            time.sleep(3)
        return [np.ones((1, 2))]

    EvaluationSide(roles, net, score, truth).serve(evaluate)
    return "served"


FAULTS = [
    ("evaluation killed", 1, 1, 0, r"rank 1 gave no sign of life for \d+ s; its process was killed or its machine"),
    ("evaluation killed", 1, 2, 0, r"rank (1 has ended: OptimizationError: .*an evaluation rank ended|2 gave no sign)"),
    ("evaluation raises", 1, 1, 0, r"rank 1 has ended: ValueError: a broken image"),
    ("training raises", 2, 1, 2, r"rank 1 has ended: KeyError: 'a label'"),
    ("training killed", 2, 1, 2, r"rank 1 gave no sign of life"),
    ("training killed", 1, 1, 1, r"the first training rank does not answer any more"),
    ("hangs", 1, 1, 0, r"step 1 \(epoch 0\) has no score 1.5 s after its weights were handed over.*timeout_seconds"),
    ("score", 1, 1, 0, r"rank 1 has ended: .*could not be scored: .*raised KeyError.*, at the second attempt too"),
    ("another module", 1, 1, 0, r"rank 1 has ended: .*other names, shapes or dtypes"),
]


@forks
@pytest.mark.parametrize(("fault", "training", "evaluation", "witness", "says"), FAULTS)
def test_a_fault_of_one_rank_ends_all(
    fault: str, training: int, evaluation: int, witness: int, says: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", str(tmp_path))
    begun = time.monotonic()
    ranks = run_ranks(training + evaluation, lambda rank: faulty_work(rank, evaluation, fault), 20)
    assert not any(isinstance(rank, str) for rank in ranks), "nobody ends as if all were well"
    assert all(isinstance(rank, (Exception, Ended)) for rank in ranks), ranks
    with pytest.raises(OptimizationError, match=says):
        raise ranks[witness]
    assert time.monotonic() - begun < 20


@forks
def test_somebody_must_train() -> None:
    def alone(rank: int) -> None:
        assign_roles(1)

    (error,) = run_ranks(1, alone)
    with pytest.raises(OptimizationError, match=r"1 process, and 1 of them would evaluate.*; start at least 2\."):
        raise error
