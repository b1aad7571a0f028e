"""MLPerf's own checkers, run in processes of their own as a submitter would."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fasttrain.errors import MissingDependencyError

INSTALL = "pip install 'fasttrain[mlperf]'"
SECONDS = 120.0
LONGEST_REASON = 160


@dataclass(frozen=True)
class Verdict:
    """What a checker said; a failure's reasons are the rules that failed."""

    passed: bool
    reasons: tuple[str, ...] = ()
    factor: float = 1.0
    """By which a score is multiplied that was reached with less training than the reference's."""


def require_mlperf_logging() -> None:
    """See that the checkers are there.

    Raises:
        MissingDependencyError: with the install line.
    """
    if find_spec("mlperf_logging") is None:
        raise MissingDependencyError(f"MLPerf's checkers are in the package mlperf-logging; install it: {INSTALL}.")


def check_compliance(file: Path, ruleset: str = "2.0.0") -> Verdict:
    """Have the compliance checker judge one result file.

    Raises:
        MissingDependencyError: mlperf-logging is not installed.
    """
    require_mlperf_logging()
    with tempfile.TemporaryDirectory() as folder:
        command = ["compliance_checker", "--usage", "training", "--ruleset", ruleset, "--log_output", f"{folder}/log"]
        done = _run([*command, str(file.absolute())], folder)
    passed = done.returncode == 0 and "SUCCESS" in done.stdout + done.stderr
    return Verdict(passed, () if passed else tuple(failed_rules(done.stdout + done.stderr)))


def check_convergence(files: Sequence[Path], ruleset: str = "2.0.0") -> Verdict:
    """Have the reference-convergence checker judge all runs of a result: did they converge faster than is plausible?

    Raises:
        MissingDependencyError: mlperf-logging is not installed.
    """
    require_mlperf_logging()
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            (Path(folder) / f"result_{number}.txt").symlink_to(file.absolute())
        command = ["rcp_checker", "--rcp_usage", "training", "--rcp_version", ruleset, "--log_output", f"{folder}/log"]
        done = _run([*command, folder], folder)
    said = (done.stdout + done.stderr).splitlines()
    verdict = [line.rpartition(" - ")[2] for line in said if "RCP test" in line]
    if verdict:
        factors = re.findall(r"normalized by factor of .* = ([\d.]+)", "\n".join(said))
        factor = float(factors[-1]) if factors else 1.0
        return Verdict(done.returncode == 0, (verdict[-1].partition(", consider")[0],), factor)
    return Verdict(False, (said[-1] if said else f"the checker ended with status {done.returncode}",))


def failed_rules(output: str) -> Iterator[str]:
    """Yield the rules that failed, each once, from what the compliance checker printed."""
    seen: set[str] = set()
    for reason in _reasons(output.splitlines()):
        if reason not in seen:
            seen.add(reason)
            yield reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
    if not seen:
        yield next((line for line in reversed(output.splitlines()) if line.strip()), "no reason was given")


def _reasons(lines: Iterable[str]) -> Iterator[str]:
    key = ""
    for line in lines:
        text = line.strip()
        if found := re.search(r"CHECK for '(\w+)' failed", text):
            key = found[1]
        elif text.startswith("failed test:"):
            if "initialized_tensors" in text or not text.removeprefix("failed test:").strip():
                yield "weights_initialization: the tensors are not those of the benchmark's model"
            else:
                yield f"{key}: {text.removeprefix('failed test:').strip()}"
        elif found := re.search(
            r"(Failed checks for .*|Required .* occurrence.*|Log lines had parsing errors.*|"
            r"Could not find config file.*|No log lines detected.*|Failed executing.*)",
            text,
        ):
            yield found[1]  # fmt: skip


def _run(arguments: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"mlperf_logging.{arguments[0]}", *arguments[1:]]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{arguments[0]} did not end within {SECONDS:.0f} s")
