"""Whether a replay does what the eager step does, by itself and in fits whose captured step differs."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.recording import Reexecution
from fasttrain.callbacks.cuda_graph_step.self_check import Difference, Snapshot, beyond_noise, compare_replay
from fasttrain.errors import OptimizationError


class State:
    """A step on two tensors, done rightly or wrongly."""

    def __init__(self) -> None:
        self.tensors = {"weight": torch.ones(3), "count": torch.zeros((), dtype=torch.int64)}
        self.ran: list[str] = []
        self.noise = iter([0.0] * 10)

    def step(self, name: str, change: float = 0.0) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.tensors["weight"].mul_(2 + change + next(self.noise))
            self.tensors["count"].add_(1)

        return run

    def compare(self, change: float = 0.0, **options: Any) -> Any:
        return compare_replay(lambda: self.tensors, self.step("eager"), self.step("replay", change), **options)


def test_a_right_replay_is_run_once_after_one_eager_step() -> None:
    state = State()
    verdict = state.compare()
    assert (verdict.unexplained, verdict.worst_noise, verdict.was_made) == (None, 0.0, True)
    assert state.ran == ["eager", "replay"]
    assert state.tensors["weight"].tolist() == [2.0] * 3
    assert state.tensors["count"] == 1


def test_a_wrong_replay_is_found_and_the_eager_result_stays() -> None:
    state = State()
    verdict = state.compare(change=0.5)
    assert str(verdict.unexplained) == "weight differs by up to 0.5 (relative 0.25)"
    assert state.ran == ["eager", "replay", "eager"]
    assert state.tensors["weight"].tolist() == [2.0] * 3
    assert state.tensors["count"] == 1


@pytest.mark.parametrize(("change", "explained"), [(0.003, True), (0.009, False)])
def test_noise_explains_four_times_itself(change: float, explained: bool) -> None:
    state = State()
    state.noise = iter([0.0, 0.0, 0.002])  # eager, replay, eager
    verdict = state.compare(change)
    assert (verdict.unexplained is None) == explained
    assert verdict.worst_noise == pytest.approx(0.001, rel=0.01)
    assert state.tensors["count"] == 1
    assert state.tensors["weight"][0] == pytest.approx(2 + change if explained else 2.002)


def test_noise_without_a_measure_explains_its_own_tensor_only() -> None:
    endless, small = float("inf"), 0.1
    one, other = Difference("one", 1.0, small), Difference("other", 1.0, endless)
    assert beyond_noise({"one": one}, {}) is one
    assert beyond_noise({"one": one}, {"one": one}) is None
    assert beyond_noise({"one": one}, {"other": other}) is one
    assert beyond_noise({"other": other}, {"other": other}) is None
    assert beyond_noise({"other": other}, {"one": one}) is other
    assert beyond_noise({}, {"one": one}) is None


def test_noise_of_one_tensor_does_not_explain_another() -> None:
    """Nine tensors in ten set the common noise; the noisiest explains itself alone."""

    def of(**relative: float) -> dict[str, Difference]:
        return {name: Difference(name, 1.0, size) for name, size in relative.items()}

    common = {f"t{index}": 0.001 for index in range(19)}
    noise = of(**common, noisy=0.05)
    assert beyond_noise(of(t0=0.0039), noise) is None
    assert beyond_noise(of(noisy=0.19), noise) is None
    assert beyond_noise(of(unknown=0.0039), noise) is None
    assert str(beyond_noise(of(t0=0.0041), noise)).startswith("t0 differs")
    assert str(beyond_noise(of(noisy=0.21, t0=0.003), noise)).startswith("noisy differs")
    assert beyond_noise(of(rounding=0.9), of(rounding=0.2)) is None, "two eager steps agree in nothing there"


@pytest.mark.parametrize(
    ("now", "before", "largest"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], None),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        ([1.0, 2.0], [1.0, float("nan")], float("inf")),
        ([float("inf")], [float("inf")], None),
        ([float("inf")], [1.0], float("inf")),
        ([0.0], [-0.0], None),
        ([0.0], [1e-40], 1e-40),
        ([1 + 1j], [1 + 2j], 1.0),
        ([complex("nan")], [complex("nan")], None),
        ([1, 2], [1, 5], 3.0),
        ([True], [False], 1.0),
        ([], [], None),
    ],
)
def test_what_counts_as_different(now: list[Any], before: list[Any], largest: float | None) -> None:
    found = Snapshot({"x": torch.tensor(before)}).differences({"x": torch.tensor(now)})
    assert [each.largest for each in found.values()] == pytest.approx([] if largest is None else [largest])


def test_differences_come_with_the_worst_first() -> None:
    before = Snapshot({"small": torch.ones(2), "large": torch.ones(2), "same": torch.ones(2)})
    found = before.differences({"small": torch.ones(2) + 0.1, "large": torch.ones(2) + 1, "same": torch.ones(2)})
    assert list(found) == ["large", "small"]
    assert str(found["large"]) == "large differs by up to 1 (relative 1)"


@pytest.mark.parametrize(
    ("snapshot", "ran", "weight"),
    [(1, ["replay"], 2.5), (2, ["eager", "replay"], 2.5), (3, ["eager", "replay"], 2.5)],
    ids=["first", "second", "third"],
)
def test_without_memory_the_replay_stands_unchecked(
    snapshot: int, ran: list[str], weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    plain = Snapshot.__init__

    def init(self: Snapshot, tensors: Mapping[str, Tensor]) -> None:
        nonlocal taken
        taken += 1
        if taken == snapshot:
            raise torch.OutOfMemoryError
        plain(self, tensors)

    monkeypatch.setattr(Snapshot, "__init__", init)
    state = State()
    verdict = state.compare(change=0.5)
    assert (verdict.was_made, verdict.unexplained) == (False, None)
    assert state.ran == ran
    assert state.tensors["weight"].tolist() == [weight] * 3
    assert state.tensors["count"] == 1


@pytest.mark.parametrize("where", ["before", "differs", "unexplained"])
def test_another_process_is_heard(where: str) -> None:
    """All processes run the same steps, because these call collectives, and keep the same state."""
    asked: list[bool] = []
    order = ["before", "eager", "differs", "after", "unexplained"]

    def anyone(here: bool) -> bool:
        asked.append(here)
        return here or order[len(asked) - 1] == where or (where == "unexplained" and order[len(asked) - 1] == "differs")

    state = State()
    verdict = state.compare(anyone=anyone)
    assert not any(asked)
    if where == "before":
        assert (state.ran, verdict.was_made) == (["replay"], False)
    elif where == "differs":
        assert (state.ran, verdict.unexplained) == (["eager", "replay", "eager"], None)
    else:
        assert state.ran == ["eager", "replay", "eager"]
        assert verdict.unexplained == "another process found a difference"
    assert state.tensors["count"] == 1


def is_replaying() -> bool:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not Reexecution.replay.__code__:
        frame = frame.f_back
    return frame is not None


class DiffersInReplays(Small):
    """Does something else in a replay, as a captured Python value would."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        return loss + 0.5 * self.net[4].bias.sum() if is_replaying() else loss


class DiffersInABuffer(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_replaying():
            self.net[1].running_mean += 1
        return super().training_step(batch, batch_idx)


TRUSTED = ("DiffersInReplays.training_step", "DiffersInABuffer.training_step")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("make", "named"),
    [(DiffersInReplays, r"net\.4\.bias.* differs by up to"), (DiffersInABuffer, "net.1.running_mean differs by up to")],
)
def test_a_wrong_replay_is_named_and_left(make: type[Small], named: str, accumulate: int) -> None:
    ours, plain = same_start(make)
    graph = CUDAGraphStep(stand_in=True, trusted=TRUSTED)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    with pytest.warns(
        UserWarning, match=f"steps run eagerly, since a replay is not what the eager step computes: .*{named}"
    ):
        mine = fit(ours, batches(9), graph, **options)
    assert_same_state(mine, fit(plain, batches(9), **options))
    assert len(graph.pool) == 0
    with pytest.raises(OptimizationError, match=f"^cuda_graph_step: a replay is not what .*{named}"):
        fit(make(), batches(9), CUDAGraphStep(stand_in=True, on_failure="error", trusted=TRUSTED), **options)


def test_an_unchecked_replay_is_believed() -> None:
    graph = CUDAGraphStep(stand_in=True, trusted=TRUSTED, checks=0)
    fit(DiffersInReplays(), batches(9), graph)
    assert graph.pool.hits > 10
