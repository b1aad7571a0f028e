"""One training run, start to finish: build, plan, train, and leave a complete run folder however it ends."""

import time
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from rich.console import Console

from fasttrain.checkpoints import readable_checkpoint
from fasttrain.clock import RunClock
from fasttrain.config import Resolved
from fasttrain.errors import ConfigError, FasttrainError
from fasttrain.outcome import Outcome
from fasttrain.plan import Catalogue, Plan
from fasttrain.quiet import quiet_libraries
from fasttrain.results import RunFolder, disk_error, is_disk_trouble
from fasttrain.run import Prepared, prepare
from fasttrain.session import Session
from fasttrain.trainer import is_lightnings_refusal


def fit(
    resolved: Resolved,
    catalogue: Catalogue,
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    console: Console | None = None,
    quiet: bool = False,
    callbacks: Sequence[pl.Callback] = (),
    clock: RunClock | None = None,
) -> Outcome:
    """Train a recipe.

    Args:
        resolved: the configuration; for a resumed run that of its folder, with any overrides.
        catalogue: the optimizations that may be asked for, by name.
        run_dir: folder to make for a new run.
        resume: folder of a run to go on with.
        console: where to write; standard output by default.
        quiet: write nothing but errors.
        callbacks: for whoever watches the run.
        clock: that counts its seconds, where another one is wanted.

    Raises:
        FasttrainError: with the sentence for the user; `result.json` says "failed" and holds it too.
    """
    started = time.perf_counter()
    console = console or Console()
    _refuse_forks(str(resolved.config.trainer.strategy))
    folder = RunFolder.existing(resume) if resume else RunFolder.create(run_dir, str(resolved.config.recipe))
    checkpoint = readable_checkpoint(folder) if resume else None
    with quiet_libraries():
        session = Session(resolved, folder, console, quiet, started, callbacks, clock)
        try:
            session.train(prepare_and_say(resolved, catalogue, console, session.quiet), checkpoint)
        except (KeyboardInterrupt, SystemExit):
            early = session.trainer is None
            session.finish("interrupted", "before training began" if early else "at once, by a second Ctrl-C")
        except Exception as error:
            sentence = _for_the_user(error, folder)
            session.finish("failed", str(sentence) if sentence else f"{type(error).__name__}: {error}")
            if sentence is None or sentence is error:
                raise
            raise sentence from error
        else:
            session.finish(session.status(), None)
    return Outcome(session.result, folder.path)


def prepare_and_say(resolved: Resolved, catalogue: Catalogue, console: Console, quiet: bool) -> Prepared:
    """Prepare a run and print its preset and plan, a line each."""
    if resolved.preset_note and not quiet:
        console.print(resolved.preset_note, highlight=False, markup=False)
    prepared = prepare(resolved, catalogue)
    if not quiet:
        for line in plan_lines(prepared.plan):
            console.print(line, highlight=False)
    return prepared


def plan_lines(plan: Plan) -> list[str]:
    """Return a line for each optimization: whether it applies, and what was measured or why not."""
    lines = []
    for row in plan.record()["optimizations"]:
        mark = {"applies": "[green]applies[/]", "refused": "[yellow]refused[/]", "off": "[dim]off[/]"}[row["verdict"]]
        reason = str(row["reason"]).replace("[", r"\[")
        lines.append(f"{row['name']}: {mark}{' - ' + reason if reason else ''}")
    return lines


def _for_the_user(error: Exception, folder: RunFolder) -> FasttrainError | None:
    """Return the error as a sentence that its user can act on, or None if it is somebody's bug."""
    if isinstance(error, FasttrainError):
        return error
    if isinstance(error, OSError) and is_disk_trouble(error):
        return disk_error(folder.path, error)
    if is_lightnings_refusal(error):
        return ConfigError(f"trainer: Lightning refuses these values: {' '.join(str(error).split())}")
    return None


def _refuse_forks(strategy: str) -> None:
    if strategy.endswith(("_fork", "_spawn", "_notebook")):
        raise ConfigError(
            f"trainer.strategy={strategy} trains in child processes that keep what they measured to themselves; "
            f"use trainer.strategy={strategy.rpartition('_')[0]}."
        )
