"""The plan: every optimization is asked first, conflicts are settled, the rest is ordered; only then does one act."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.clock import RunClock
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, DataError, OptimizationError
from fasttrain.optimization import (
    Applies,
    Attachment,
    Change,
    Context,
    ExampleBatch,
    Optimization,
    Refuses,
    Stage,
    Table,
    Verdict,
)
from fasttrain.plan import Catalogue, in_order, make_plan, requested
from fasttrain.randomness import random_state
from fasttrain.recorder import RunRecorder

CPU = Hardware("cpu", "cpu", "a CPU", 2)


@dataclass(frozen=True)
class RoomConfig:
    strength: float = 1.0
    kind: str = "a"

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ConfigError(f"strength is {self.strength}; it must not be negative.")


def room(
    name: str,
    stage: Stage = Stage.MODEL,
    verdict: Verdict | None = None,
    changes: Sequence[Change] = (Change("net", "done"),),
    **orders: Any,
) -> type[Optimization[Any]]:
    """Make a room; `events` of the class notes what it was asked, in order."""

    class Room(Optimization[RoomConfig]):
        summary: ClassVar[str] = "for tests"
        config_class: ClassVar[type[Any]] = RoomConfig
        grade = "same numbers"

        def check(self, context: Context) -> Verdict:
            EVENTS.append(f"check {name}")
            return verdict or Applies()

        def attach(self, context: Context) -> Attachment:
            EVENTS.append(f"attach {name}")
            return Attachment()

        def applied(self) -> Sequence[Change]:
            return changes

    Room.name, Room.stage = name, stage
    Room.before = frozenset(orders.get("before", ()))
    Room.after = frozenset(orders.get("after", ()))
    Room.conflicts = orders.get("conflicts", {})
    return Room


EVENTS: list[str] = []


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


def context() -> Context:
    return Context(pl.LightningModule(), pl.LightningDataModule(), CPU)


def ask(*rooms: type[Optimization[Any]]) -> list[Optimization[Any]]:
    return [each(RoomConfig()) for each in rooms]


def names(optimizations: Sequence[Optimization[Any]]) -> list[str]:
    return [optimization.name for optimization in optimizations]


def test_every_answer_is_in_before_anything_acts() -> None:
    plan = make_plan(ask(room("a"), room("b", verdict=Refuses("no")), room("c")), context())
    assert EVENTS == ["check a", "check b", "check c"]
    plan.attach(context())
    assert EVENTS[3:] == ["attach a", "attach c"], "what was refused does not act"


def test_stages_then_the_rooms_own_order_then_the_recipes() -> None:
    wanted = ask(
        room("capture", Stage.CAPTURE),
        room("late", Stage.CALLBACK, after=["early"]),
        room("model2"),
        room("model1", before=["model2"]),
        room("data", Stage.DATA),
        room("early", Stage.CALLBACK),
        room("plugin", Stage.PLUGIN),
        room("also", Stage.CALLBACK),
    )
    assert names(in_order(wanted)) == ["data", "model1", "model2", "plugin", "early", "late", "also", "capture"]
    assert names(in_order(ask(room("b"), room("a")))) == ["b", "a"], "no order of their own: as given"


def test_an_order_towards_a_room_that_is_not_asked_for_does_nothing() -> None:
    assert names(in_order(ask(room("b", after=["zzz"]), room("a", before=["yyy"])))) == ["b", "a"]


def test_a_circle() -> None:
    with pytest.raises(OptimizationError) as caught:
        in_order(ask(room("a", before=["b"]), room("b", before=["a"]), room("c")))
    assert str(caught.value) == "the order of a, b contradicts itself: each must come before another of them."


@pytest.mark.parametrize("declared_by", ["a", "b"])
def test_of_two_in_conflict_the_first_asked_for_stays(declared_by: str) -> None:
    other = {"a": "b", "b": "a"}[declared_by]
    rooms = {n: room(n, conflicts={other: "both want the weights"} if n == declared_by else {}) for n in "ab"}
    plan = make_plan(ask(rooms["b"], rooms["a"]), context())
    assert names(plan.applying) == ["b"]
    (refused,) = plan.refused
    assert refused.verdict == Refuses("does not go together with 'b', which was asked for first: both want the weights")


def test_one_that_is_refused_drives_out_nobody() -> None:
    first = room("a", verdict=Refuses("not here"), conflicts={"b": "both"})
    assert names(make_plan(ask(first, room("b")), context()).applying) == ["b"]


def test_record() -> None:
    plan = make_plan(
        ask(room("late", Stage.CAPTURE, Applies("12 ms")), room("no", verdict=Refuses("no GPU")), room("a")),
        context(),
        off=["gone"],
    )
    rows = plan.record()["optimizations"]
    assert [(row["name"], row["verdict"], row["reason"]) for row in rows] == [
        ("a", "applies", ""),
        ("late", "applies", "12 ms"),
        ("no", "refused", "no GPU"),
        ("gone", "off", "switched off by the configuration"),
    ]
    assert rows[0]["changes"] == []
    with_changes = plan.record(with_changes=True)["optimizations"]
    assert with_changes[0]["changes"] == [{"path": "net", "what": "done", "count": 1}]
    assert with_changes[2]["changes"] == [], "what was refused changed nothing"
    assert (rows[1]["stage"], rows[1]["grade"]) == ("capture", "same numbers")


def test_what_they_tell_at_the_end() -> None:
    class Tells(room("tells")):  # type: ignore[misc]
        def outcome(self) -> Sequence[Table]:
            return [Table("graphs", ("input", "hits"), [("8x3", 2)], "Two.")]

    class Fails(room("fails")):  # type: ignore[misc]
        def outcome(self) -> Sequence[Table]:
            return [Table("graphs", ("input", "hits"), [("8x3",)])]

    class Refused(room("refused", verdict=Refuses("no GPU"))):  # type: ignore[misc]
        def outcome(self) -> Sequence[Table]:
            raise AssertionError("one that is refused has nothing to tell")

    plan = make_plan(ask(Fails, room("silent"), Tells, Refused), context())
    fails, tells = plan.outcome()["optimizations"]
    assert (fails["name"], fails["tables"]) == ("fails", [])
    assert fails["error"].startswith("ValueError: table 'graphs', row 1 has 1 cells ")
    assert json.loads(json.dumps(tells)) == {
        "name": "tells",
        "tables": [{"title": "graphs", "columns": ["input", "hits"], "rows": [["8x3", 2]], "note": "Two."}],
        "error": None,
    }


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (("8x3",), "row 2 has 1 cells for 2 columns (input, hits); give one for each, and math.nan for a number that "
                   "is unknown."),
        (("8x3", None), "row 2: hits is None, a NoneType; give a str, an int or a float."),
        (("8x3", True), "row 2: hits is True, a bool; give a str, an int or a float."),
        (("8x3", torch.tensor(3)), "row 2: hits is tensor(3), a Tensor; give a str, an int or a float."),
    ],
)  # fmt: skip
def test_a_table_that_no_report_could_show(row: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^table 'graphs', row 2") as caught:
        Table("graphs", ("input", "hits"), [("4x3", 1), row])
    said = str(caught.value).removeprefix("table 'graphs', ")
    assert said == sentence


CATALOGUE: Catalogue = {"alpha": room("alpha"), "beta": room("beta")}


def test_requested() -> None:
    wanted, off = requested({"beta": {"strength": 2}, "alpha": None}, CATALOGUE)
    assert (names(wanted), off) == (["beta"], ["alpha"])
    assert wanted[0].config == RoomConfig(2.0)
    wanted, off = requested({"alpha": True, "beta": False}, CATALOGUE)
    assert (names(wanted), wanted[0].config, off) == (["alpha"], RoomConfig(), ["beta"])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"alhpa": {}}, "optimizations.alhpa: there is no such optimization; did you mean 'alpha'?"),
        ({"zzz": None}, "optimizations.zzz: there is no such optimization; known: alpha, beta"),
        ({"alpha": 3}, "optimizations.alpha is 3; give a mapping of its parameters, or false to leave it out."),
        ({"alpha": [1]}, "optimizations.alpha is [1]; give a mapping of its parameters, or false to leave it out."),
        ({"alpha": {"stength": 3}}, "optimizations.alpha: unknown key 'stength'; did you mean 'strength'?"),
        ({"alpha": {"strength": "x"}}, "optimizations.alpha: strength is x; a number is expected."),
        ({"alpha": {"strength": -1}}, "strength is -1.0; it must not be negative."),
    ],
)
def test_a_wrong_request(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        requested(asked, CATALOGUE)
    assert str(caught.value) == sentence


def test_one_that_changes_nothing_is_an_error_once_training_begins() -> None:
    plan = make_plan(ask(room("idle", changes=())), context())
    recorder = RunRecorder(plan, RunClock(), 0.0, lambda record: None)
    with pytest.raises(OptimizationError) as caught:
        recorder.on_train_start(pl.Trainer(logger=False, accelerator="cpu"), pl.LightningModule())
    assert str(caught.value) == (
        "optimization 'idle' was to be applied and changed nothing; a speed-up would be credited to it wrongly. "
        "Leave it out: optimizations.idle=false."
    )


class Data(pl.LightningDataModule):
    """Draws from every global generator on its way to a batch, as users' code does."""

    def __init__(self, wrap: Any = lambda loader: loader, size: int = 8) -> None:
        super().__init__()
        self.wrap, self.size, self.set_up = wrap, size, 0

    def setup(self, stage: str) -> None:
        self.set_up += 1
        random.random()
        np.random.rand()
        torch.rand(1)

    def train_dataloader(self) -> Any:
        dataset = TensorDataset(torch.arange(self.size).float().unsqueeze(1), torch.arange(self.size))
        return self.wrap(DataLoader(dataset, batch_size=4, shuffle=True))


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(same_state, one, other)) if isinstance(one, (list, tuple)) else bool(one == other)


def test_the_example_batch_leaves_the_random_state_alone() -> None:
    data = Data()
    before = random_state()
    example = ExampleBatch(data)
    first = example()
    assert same_state(before, random_state())
    assert example() is first, "drawn once"
    assert data.set_up == 1
    assert first[0].shape == (4, 1)


@pytest.mark.parametrize("wrap", [lambda loader: [loader, loader], lambda loader: {"a": loader, "b": loader}])
def test_the_example_batch_of_several_loaders_is_what_the_trainer_would_hand_over(wrap: Any) -> None:
    batch = ExampleBatch(Data(wrap))()
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    assert [part[0].shape for part in parts] == [(4, 1), (4, 1)]


def test_no_example_batch() -> None:
    with pytest.raises(DataError, match=r"^the training loader of Data is empty: there is no batch in it\.$"):
        ExampleBatch(Data(wrap=lambda loader: []))()

    class AsksItsTrainer(Data):
        def train_dataloader(self) -> Any:
            return [0] * self.trainer.world_size  # type: ignore[union-attr]

    with pytest.raises(OptimizationError) as caught:
        ExampleBatch(AsksItsTrainer())()
    assert str(caught.value).startswith(
        "AsksItsTrainer gives no batch to measure with before there is a Trainer (AttributeError: "
    )
    bad = Data(wrap=lambda loader: (_ for _ in ()).throw(DataError("a.jpg is broken")))
    with pytest.raises(DataError, match=r"^a\.jpg is broken$"):
        ExampleBatch(bad)()
