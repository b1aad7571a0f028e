"""`AsyncScorer`: scores in order and tagged, every fault told and survived, and nothing left behind."""

import atexit
import functools
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import score_functions

from fasttrain.callbacks.async_scoring import AsyncScorer, NotScored, Scored, Tag
from fasttrain.callbacks.scored_elsewhere.evaluation import why_malformed
from fasttrain.errors import OptimizationError

FILE = str(Path(score_functions.__file__))
ROWS = np.arange(12, dtype=np.float64).reshape(4, 3)


def children() -> set[int]:
    """Process ids of this process's living children."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(status.parent.name))
    return found


def held() -> list[str]:
    """What this process holds of scoring: memory without a name."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(descriptor))
        except OSError:
            continue
    return [name for name in found if "fasttrain-scoring" in name]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("there is no /proc to look into")
    before, shared = children(), sorted(os.listdir("/dev/shm"))
    yield
    assert children() <= before, "a process is left"
    assert held() == [], "memory is left"
    assert sorted(os.listdir("/dev/shm")) == shared, "a segment is left"


def scorer(function: str, truth: Any = None, told: list[str] | None = None, **options: Any) -> AsyncScorer:
    tell = told.append if told is not None else pytest.fail
    return AsyncScorer(f"{FILE}:{function}", truth or {}, tell=tell, **options)


def faulty(fault: str, folder: Path, times: int, told: list[str], **options: Any) -> AsyncScorer:
    return scorer("faulty", {"fault": fault, "times": times, "folder": str(folder)}, told, **options)


def test_scores_arrive_in_order_under_their_tags() -> None:
    with scorer("mean", {"offset": 100.0}, most_in_flight=5) as scoring:
        for step in range(5):
            scoring.submit(ROWS + step, Tag(step, step // 2))
        outcomes = scoring.drain()
        assert scoring.in_flight == 0
        assert scoring.poll() == []
    assert [outcome.tag for outcome in outcomes] == [Tag(step, step // 2) for step in range(5)]
    assert [outcome.scores for outcome in outcomes if isinstance(outcome, Scored)] == [
        {"mean": 105.5 + step, "count": 4.0} for step in range(5)
    ]
    assert all(outcome.faults == () and outcome.arrived_at > outcome.submitted_at for outcome in outcomes)


def test_parts_are_joined() -> None:
    with scorer("mean", most_in_flight=4) as scoring:
        scoring.submit([ROWS, np.zeros((0, 3)), ROWS[::2]], Tag(1, 0))
        scoring.submit(np.asfortranarray(ROWS[:, 1:]), Tag(2, 0))
        scoring.submit([], Tag(3, 0))
        scoring.submit(ROWS.astype(np.float32), Tag(4, 0))
        with pytest.raises(ValueError, match="differ in their first dim"):
            scoring.submit([ROWS, ROWS[:, :2]], Tag(5, 0))
        first, second, third, fourth = (outcome.scores for outcome in scoring.drain() if isinstance(outcome, Scored))
    assert first == {"mean": np.concatenate([ROWS, ROWS[::2]]).mean(), "count": 6}
    assert second == {"mean": ROWS[:, 1:].mean(), "count": 4}
    assert third["count"] == 0
    assert np.isnan(third["mean"]), "what the function gives is what arrives"
    assert fourth == {"mean": ROWS.mean(), "count": 4}


def test_without_memfd_it_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scorer("mean") as scoring:
        scoring.submit([ROWS, ROWS], Tag(1, 0))
        assert list(tmp_path.iterdir()) == []
        (outcome,) = scoring.drain()
    assert isinstance(outcome, Scored)
    assert outcome.scores == {"mean": 5.5, "count": 8}


def test_the_process_is_light_and_out_of_the_way() -> None:
    with scorer("looks_around", threads=3, niceness=7) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        (outcome,) = scoring.drain()
        assert isinstance(outcome, Scored)
        nice = min(os.nice(0) + 7, 19)  # 19 is the most that there is
        assert outcome.scores == {"heavy": 0, "gpus": 0, "session": 1, "pid": scoring.pid, "threads": 3, "nice": nice}


def test_it_returns_at_once_and_waits_for_room_where_too_many_are_in_flight() -> None:
    told: list[str] = []
    with scorer("slow", {"seconds": 0.2}, told, most_in_flight=2) as scoring:
        begun = time.perf_counter()
        scoring.submit(ROWS, Tag(1, 0))
        scoring.submit(ROWS, Tag(2, 0))
        assert time.perf_counter() - begun < 0.1
        assert scoring.waited_seconds == 0
        scoring.submit(ROWS, Tag(3, 0))
        scoring.submit(ROWS, Tag(4, 0))
        assert scoring.waited_seconds > 0.1
        assert [outcome.tag.step for outcome in scoring.drain()] == [1, 2, 3, 4]
    (said,) = told
    assert said == (
        "step 3 (epoch 0) is evaluated and 2 evaluations before it are not scored yet: training waits for room. "
        "Evaluate less often, or allow more by most_in_flight; this is said once."
    )


def test_draining_tells_how_far_it_is() -> None:
    steps: list[tuple[int, int]] = []
    with scorer("slow", {"seconds": 0.1}) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        scoring.submit(ROWS, Tag(2, 0))
        scoring.drain(lambda done, total, seconds: steps.append((done, total)))
    assert sorted(set(steps)) == [(0, 2), (1, 2), (2, 2)]
    assert steps == sorted(steps)


FAULTS = {
    "killed": "was ended by SIGKILL, as the system does to a process when memory runs out",
    "crashes": "was ended by SIGABRT; its last words: free(): invalid pointer",
    "exits": "ended with status 3",
    "raises": "raised KeyError: 'image 7' (score_functions.py:",
    "none": "gave None, and not a dictionary of numbers by name",
    "list": "gave [1.0], and not a dictionary of numbers by name",
    "empty": "gave {}, and not a dictionary of numbers by name",
    "text": "gave 'mean': '0.5', and not a number by name",
    "key": "gave 1: 0.5, and not a number by name",
    "bool": "gave 'mean': True, and not a number by name",
    "unreadable": "answered what can't be read (",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_and_the_kept_rows_are_scored_in_a_new_process(fault: str, tmp_path: Path) -> None:
    told: list[str] = []
    with faulty(fault, tmp_path, 1, told) as scoring:
        scoring.submit([ROWS, ROWS], Tag(10, 1))
        (outcome,) = scoring.drain()
    assert isinstance(outcome, Scored)
    assert outcome.scores == {"mean": 5.5, "count": 8}
    (said,) = told
    assert outcome.faults == (f"the scoring process {said.partition('the scoring process ')[2].rpartition(';')[0]}",)
    assert said.startswith(f"scoring step 10 (epoch 1): the scoring process {FAULTS[fault]}")
    assert said.endswith("; trying once more in a new process.")


def test_out_of_memory(tmp_path: Path) -> None:
    told: list[str] = []
    with faulty("memory", tmp_path, 1, told) as scoring:
        scoring.submit(ROWS, Tag(10, 1))
        (outcome,) = scoring.drain()
    assert isinstance(outcome, Scored)
    assert "MemoryError: Unable to allocate" in told[0]


def test_no_room_for_the_rows() -> None:
    told: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with scorer("mean", None, told) as scoring:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        try:
            scoring.submit(np.zeros((2**14, 3)), Tag(1, 0))
            (lost,) = scoring.drain()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        scoring.submit(ROWS, Tag(2, 0))
        (found,) = scoring.drain()
    assert isinstance(lost, NotScored)
    assert lost.faults == ("the scoring process was not given the rows: File too large",) * 2
    assert isinstance(found, Scored)


def test_a_hung_process_is_ended(tmp_path: Path) -> None:
    told: list[str] = []
    with faulty("hangs", tmp_path, 1, told, timeout_seconds=2.0) as scoring:
        scoring.submit(ROWS, Tag(10, 1))
        (outcome,) = scoring.drain()
    assert isinstance(outcome, Scored)
    assert told == ["scoring step 10 (epoch 1): the scoring process hung: it had no answer after 2 s; trying once more "
                    "in a new process."]  # fmt: skip


def test_killed_from_outside_in_the_middle(tmp_path: Path) -> None:
    told: list[str] = []
    with scorer("slow", {"seconds": 0.5}, told) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        scoring.submit(ROWS, Tag(2, 0))
        while (pid := scoring.pid) is None:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        outcomes = scoring.drain()
        assert scoring.pid != pid
    assert [(o.tag.step, o.scores["mean"]) for o in outcomes if isinstance(o, Scored)] == [(1, 5.5), (2, 5.5)]
    assert "SIGKILL" in told[0]


def test_twice_is_no_score_and_the_next_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    with faulty("raises", tmp_path, 2, told) as scoring:
        scoring.submit(ROWS, Tag(10, 1))
        scoring.submit(ROWS, Tag(20, 2))
        lost, found = scoring.drain()
    assert isinstance(lost, NotScored)
    assert (lost.tag, len(lost.faults)) == (Tag(10, 1), 2)
    assert isinstance(found, Scored)
    assert told[1].endswith("; it stays without a score.")


def test_a_process_that_dies_before_the_first_evaluation_is_replaced() -> None:
    told: list[str] = []
    with scorer("mean", None, told) as scoring:
        while (pid := scoring.pid) is None:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
        scoring.submit(ROWS, Tag(1, 0))
        (outcome,) = scoring.drain()
    assert isinstance(outcome, Scored)
    assert "SIGKILL" in told[0]


def test_names_that_change_are_malformed(tmp_path: Path) -> None:
    told: list[str] = []
    with scorer("faulty", {"fault": "other", "times": 0, "folder": str(tmp_path)}, told) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        scoring.drain()
    assert told == []
    assert why_malformed({"middle": 0.5}, frozenset({"mean", "count"})) == "gave middle, and not count, mean as before"
    assert why_malformed({"mean": np.float32(0.5), "count": 3}, frozenset({"mean", "count"})) is None


def test_a_second_attempt_sees_the_rows_as_they_were(tmp_path: Path) -> None:
    told: list[str] = []
    with scorer("scribbles", {"folder": str(tmp_path)}, told) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        (outcome,) = scoring.drain()
    assert isinstance(outcome, Scored)
    assert outcome.scores["mean"] == 5.5
    assert len(told) == 1


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        (f"{FILE}:no_such", "AttributeError: module 'fasttrain_score' has no attribute 'no_such'"),
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_function_that_is_not_there_is_told_with_the_first_evaluation(reference: str, fault: str) -> None:
    told: list[str] = []
    with AsyncScorer(reference, {}, tell=told.append) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        (outcome,) = scoring.drain()
    assert isinstance(outcome, NotScored)
    assert all(fault in text for text in outcome.faults)


def test_functions_of_modules_and_partials_are_found() -> None:
    for function in (score_functions.mean, functools.partial(score_functions.mean), "score_functions:mean"):
        with AsyncScorer(function, {}, tell=pytest.fail) as scoring:
            scoring.submit(ROWS, Tag(1, 0))
            (outcome,) = scoring.drain()
        assert isinstance(outcome, Scored)


def test_a_function_that_no_other_process_can_find_is_refused() -> None:
    def inside(truth: Any, rows: Any) -> dict[str, float]:
        return {}

    for function, words in (
        (inside, "inside can't be called in another process"),
        (lambda t, r: {}, "can't be called"),
    ):
        with pytest.raises(OptimizationError, match=words):
            AsyncScorer(function, {})
    with pytest.raises(OptimizationError, match="give its module or file and its name, as in 'my_project"):
        AsyncScorer("score", {})


def test_unfinished_rows_can_be_kept_elsewhere() -> None:
    with scorer("slow", {"seconds": 5.0}) as scoring:
        scoring.submit([ROWS, ROWS], Tag(7, 1))
        scoring.submit(ROWS.astype(np.float32), Tag(8, 1))
        time.sleep(0.3)  # the first is with the process by now, the second waits
        (first, second) = scoring.unfinished()
    assert first[0] == Tag(7, 1)
    np.testing.assert_array_equal(first[1], np.concatenate([ROWS, ROWS]))
    np.testing.assert_array_equal(second[1], ROWS.astype(np.float32))
    assert second[1].dtype == np.float32


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.4])
def test_closing_does_not_wait_for_what_is_scored(wait: float) -> None:
    scoring = scorer("slow", {"seconds": 60.0})
    scoring.submit(ROWS, Tag(1, 0))
    time.sleep(wait)
    begun = time.perf_counter()
    scoring.close()
    scoring.close()
    assert time.perf_counter() - begun < 2
    with pytest.raises(OptimizationError, match="this scorer was closed"):
        scoring.submit(ROWS, Tag(2, 0))


def test_an_exception_closes_it() -> None:
    with pytest.raises(ValueError, match="in their first dimension"), scorer("slow", {"seconds": 60.0}) as scoring:
        scoring.submit([ROWS, ROWS[0]], Tag(1, 0))


def parent(way: str, tell: int, folder: Path) -> None:
    """Be a program that scores and then ends in some way."""
    atexit._clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scoring = scorer("starts_another", {"folder": str(folder)})
    scoring.submit(ROWS, Tag(1, 0))
    while scoring.pid is None or not (folder / "other").exists():
        time.sleep(0.01)
    os.write(tell, f"{scoring.pid}\n".encode())
    time.sleep(0 if way == "forgets it" else 60)


@pytest.mark.parametrize("way", ["gets Ctrl-C", "is killed", "forgets it"])
def test_it_ends_with_its_parent_however_that_ends(way: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    forked = os.fork()
    if forked == 0:
        try:
            parent(way, write, tmp_path)
        except KeyboardInterrupt:
            pass
        finally:
            atexit._run_exitfuncs()  # as the interpreter does; all else of pytest stays with the other process
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        pid = int(told.readline())
    while not (other := (tmp_path / "other").read_text()):
        time.sleep(0.01)
    if way != "forgets it":
        os.kill(forked, signal.SIGINT if way == "gets Ctrl-C" else signal.SIGKILL)
    os.waitpid(forked, 0)
    deadline = time.monotonic() + 10
    for process in (pid, int(other)):
        while is_alive(process):
            assert time.monotonic() < deadline, f"{process} lives on"
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_killed_process_has_started_ends_too(tmp_path: Path) -> None:
    told: list[str] = []
    with scorer("starts_another", {"folder": str(tmp_path)}, told, attempts=1) as scoring:
        scoring.submit(ROWS, Tag(1, 0))
        while not (tmp_path / "other").exists() or not (other := (tmp_path / "other").read_text()):
            time.sleep(0.01)
        assert scoring.pid is not None
        os.kill(scoring.pid, signal.SIGKILL)
        (outcome,) = scoring.drain()
    assert isinstance(outcome, NotScored)
    assert told[0].endswith("as the system does to a process when memory runs out; it stays without a score.")
    deadline = time.monotonic() + 10
    while is_alive(int(other)):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)
