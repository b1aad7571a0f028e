"""Result files in a report: each with the checker's verdict, time to train as MLPerf scores it, and public results."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from fasttrain.errors import ConfigError, DataError, MissingDependencyError
from fasttrain.mlperf.checks import Verdict, check_compliance, check_convergence
from fasttrain.mlperf.public import anchors, expected_to_converge, reference_points, shown_anchors
from fasttrain.mlperf.result import RunResult, read_result, result_files
from fasttrain.mlperf.score import REQUIRED_RUNS, left_out, olympic_mean
from fasttrain.report import TextTable, format_number
from fasttrain.run_summary import UNKNOWN

ALIKE = ("benchmark", "division", "platform", "global_batch")
"""What attempts have in common that are scored together."""


def mlperf_tables(folders: Iterable[Path]) -> list[TextTable]:
    """Return the tables of all result files in some folders; none where there are none. Runs MLPerf's checkers."""
    results, problems = read_all(folders)
    if not results and not problems:
        return []
    benchmarks = sorted({result.benchmark for result in results if result.benchmark})
    return [
        files_table(results, problems),
        scores_table(results),
        *(public_table(name, results) for name in benchmarks if anchors(name)),
    ]


def read_all(folders: Iterable[Path]) -> tuple[list[RunResult], list[str]]:
    """Return the results of all folders, and a sentence for each file that is damaged."""
    results, problems = [], []
    for folder in folders:
        for file in result_files(folder):
            try:
                results.append(read_result(file))
            except DataError as error:
                problems.append(str(error))
    return results, problems


def files_table(results: Sequence[RunResult], problems: Sequence[str] = ()) -> TextTable:
    """Return a line for each file, with the compliance checker's verdict or the rules that failed."""
    rows, notes = [], list(problems)
    for result in results:
        verdict, missing = _asked(lambda result=result: check_compliance(result.path, result.ruleset))  # type: ignore[misc]
        if missing and missing not in notes:
            notes.append(missing)
        rows.append((
            f"{result.path.parent.name}/{result.path.name}", result.benchmark or UNKNOWN, result.division or UNKNOWN,
            result.status or "no run_stop", minutes(result.seconds), format_number(result.to_converge, 4),
            _score(result), format_number(result.samples_per_second), _words(result, verdict),
        ))  # fmt: skip
    columns = ("file", "benchmark", "division", "status", "minutes", "converged at", "last score", "logged samples/s",
               "rules")  # fmt: skip
    rulesets = ", ".join(sorted({result.ruleset for result in results})) or UNKNOWN
    notes.append(
        f"Minutes are run_start to run_stop. Rules: training {rulesets}, by mlperf-logging's compliance checker."
    )
    return TextTable("MLPerf result files", columns, "llllrrrrl", tuple(rows), " ".join(notes))


def scores_table(results: Sequence[RunResult]) -> TextTable:
    """Return time to train of each set of attempts: the mean without the fastest and the slowest run."""
    groups: dict[tuple[object, ...], list[RunResult]] = {}
    for result in results:
        groups.setdefault(tuple(getattr(result, name) for name in ALIKE), []).append(result)
    rows, notes = [], []
    for group in groups.values():
        first = group[0]
        required = REQUIRED_RUNS.get(first.benchmark or "")
        if required and len(group) < required:
            notes.append(f"{first.benchmark}: a result needs {required} runs, here are {len(group)}.")
        check, factor = _convergence(group)
        if factor != 1:
            notes.append(f"{first.benchmark}: times {factor:.4f}, for it took less training than the reference.")
        score = score_of(group)
        rows.append((
            first.benchmark or UNKNOWN, first.division or UNKNOWN, first.platform or UNKNOWN,
            format_number(first.global_batch), f"{len(group)} of {required}" if required else str(len(group)),
            str(sum(result.converged for result in group)), minutes(None if score is None else score * factor),
            _trained(group), _reference(first), check,
        ))  # fmt: skip
    columns = ("benchmark", "division", "platform", "global batch", "runs", "converged", "minutes", "trained",
               "reference", "convergence check")  # fmt: skip
    notes.append("Minutes and training are means without the fastest and slowest run (unet3d: four each).")
    return TextTable("Time to train, as MLPerf scores it", columns, "lllrrrrrrl", tuple(rows), " ".join(notes))


def public_table(benchmark: str, results: Sequence[RunResult]) -> TextTable:
    """Return public results of a benchmark, fastest first, above our own."""
    rows = [
        (
            f"{a.submitter} v{a.round}", f"{a.gpus} x {a.accelerator}", f"{a.minutes:.2f}", f"{a.minutes * a.gpus:.1f}",
            format_number(a.to_converge, 4), f"{a.global_batch:,}", format_number(a.samples_per_second_per_gpu, 4),
            a.place,
        )
        for a in shown_anchors(benchmark)
    ]  # fmt: skip
    for result in results:
        if result.benchmark == benchmark:
            rows.append((
                "here", f"{result.platform} ({result.division})",
                minutes(result.seconds) if result.converged else "not reached", UNKNOWN,
                format_number(result.to_converge, 4), format_number(result.global_batch), UNKNOWN, str(result.path),
            ))  # fmt: skip
    columns = ("who", "system", "minutes", "GPU minutes", "trained", "global batch", "samples/s/GPU", "source")
    note = (
        f"{len(shown_anchors(benchmark))} of the {len(anchors(benchmark))} public results in anchors.csv. Sources are "
        "folders of github.com/mlcommons/training_results_vN, N being the round; minutes were computed from their logs "
        "as MLPerf does; throughput is training's alone where the logs tell it apart. An open run on other data is no "
        "comparison."
    )
    return TextTable(f"{benchmark} in public", columns, "llrrrrrl", tuple(rows), note)


def score_of(group: Sequence[RunResult]) -> float | None:
    """Return the seconds that a set of attempts scores."""
    seconds = [result.seconds if result.converged else None for result in group]
    return olympic_mean(group[0].benchmark, seconds)


def minutes(seconds: float | None) -> str:
    """Return seconds as minutes with three decimals, as MLPerf publishes them."""
    return UNKNOWN if seconds is None else f"{seconds / 60:.3f}"


def _trained(group: Sequence[RunResult]) -> str:
    mean = olympic_mean(group[0].benchmark, [result.to_converge for result in group])
    reached = [result.to_converge for result in group if result.to_converge is not None]
    if mean is None and reached:
        return f"{fmean(reached):,.6g} (of {len(reached)})"
    return format_number(mean, 4)


def _reference(result: RunResult) -> str:
    if result.benchmark is None or result.global_batch is None or not reference_points(result.benchmark):
        return UNKNOWN
    try:
        return format_number(expected_to_converge(result.benchmark, result.global_batch)[0], 4)
    except ConfigError:
        return f"none at {result.global_batch:,}"


def _convergence(group: Sequence[RunResult]) -> tuple[str, float]:
    """Return the convergence checker's verdict in words, and the factor of the score."""
    benchmark = group[0].benchmark
    if benchmark is None or not reference_points(benchmark):
        return "no reference points", 1.0
    least = 2 * left_out(benchmark) + 1
    converged = sum(result.converged for result in group)
    if converged < least:
        return f"not run: it needs {least} converged runs, here are {converged}", 1.0
    verdict, _ = _asked(lambda: check_convergence([result.path for result in group], group[0].ruleset))
    return ("not run", 1.0) if verdict is None else (verdict.reasons[0], verdict.factor)


def _asked(ask: Callable[[], Verdict]) -> tuple[Verdict | None, str | None]:
    try:
        return ask(), None
    except MissingDependencyError as error:
        return None, str(error)


def _words(result: RunResult, verdict: Verdict | None) -> str:
    aborted = ["run_stop: aborted, the target was not reached"] if result.status == "aborted" else []
    if verdict is None:
        return "\n".join(["not checked", *aborted])
    return "\n".join([("passed" if verdict.passed else "FAILED"), *verdict.reasons, *aborted])


def _score(result: RunResult) -> str:
    if not result.scores:
        return UNKNOWN
    last = result.scores[-1][1]
    values = last.values() if isinstance(last, dict) else [last]
    return "/".join(f"{value:.4f}" for value in values)
