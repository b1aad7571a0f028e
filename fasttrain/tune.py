"""Measures, site by site, whether a recipe's fused forms are faster than plain modules and the compiler, and keeps it.

The plan of every later run on this machine reads what was kept (`choices`), and patches the sites where it pays.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from fasttrain import __version__
from fasttrain.batches import tensors_in
from fasttrain.choices import Measured
from fasttrain.choices_file import choices_path, load_choices, save_choice
from fasttrain.config import Resolved
from fasttrain.environment import Hardware, source_commit
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Context, Optimization
from fasttrain.patches import PatchOptimization
from fasttrain.plan import Catalogue, requested
from fasttrain.quiet import quiet_libraries
from fasttrain.randomness import random_state_kept
from fasttrain.recipe import build
from fasttrain.run import context_of
from fasttrain.site_key import Call
from fasttrain.site_timing import SiteTimes, time_site
from fasttrain.step_calls import Arguments, StepCalls
from fasttrain.tune_report import Outcome, SiteRow, print_outcome, progress_line

SECONDS_OF_A_SITE = 2.0
"""What is set aside for each site that is still to come; a compilation may use what is left beyond that."""
SECONDS_TO_COMPILE = 10.0
"""What is expected of the first compilation of one call; of the others what the last one took."""
NOT_REACHED = "the budget was used up"
STOPPED = "stopped before it"

AnyPatches = PatchOptimization[Any]


@dataclass
class Work:
    """Sites of one room that are the same, and are measured once."""

    room: AnyPatches
    key: str
    plain: nn.Module
    calls: tuple[Call, ...]
    paths: list[str]
    modules: set[int] = field(default_factory=set)
    """Identities of the modules at the paths: one may be at several."""


@dataclass
class Clock:
    """The budget, divided over the sites that are left."""

    until: float
    left: int
    compile_seconds: float = SECONDS_TO_COMPILE

    def share(self) -> float:
        """Return the seconds for the next site: an equal part, or more, if the others have theirs set aside."""
        remaining = self.until - time.perf_counter()
        return max(remaining / self.left, remaining - SECONDS_OF_A_SITE * (self.left - 1))


def tune(
    resolved: Resolved,
    catalogue: Catalogue,
    console: Console,
    *,
    budget_seconds: float = 300.0,
    again: bool = False,
    every: bool = False,
) -> bool:
    """Measure the sites of a recipe's optimizations, keep the times, and print them; return whether it came to an end.

    Args:
        resolved: the configuration.
        catalogue: all optimizations, by name.
        console: where to print.
        budget_seconds: for measuring and compiling; sites that it does not suffice for stay as they were.
        again: measure what is known, too.
        every: measure all rooms of the catalogue that patch, not only those asked for.

    Raises:
        ConfigError: no optimization with sites is asked for, or the budget is none.
        OptimizationError: the model has no site, or its step can't be run by itself.
        DataError: from the data, or the file can't be read or written.
    """
    if not budget_seconds > 0:
        raise ConfigError(
            f"--budget is {budget_seconds:g}; give the seconds that measuring may take, 300 for instance."
        )
    wanted, _ = requested(resolved.config.optimizations, catalogue)
    rooms = rooms_to_tune(wanted, catalogue, every)
    hardware = Hardware.of_accelerator(resolved.config.trainer.accelerator)
    path = choices_path(hardware.name)
    with quiet_libraries(), random_state_kept(), _cudnn_as_configured(resolved.config.trainer.benchmark):
        context = context_of(build(resolved), hardware, wanted)
        known = load_choices(path)
        with console.status("running the training step") if console.is_terminal else nullcontext():
            works, idle = find_work(rooms, context)
            calls = _calls(context)
            step = calls.time(in_graph="cuda_graph_step" in context.asked_for)
        if "precision" in context.asked_for:
            idle["precision"] = f"may choose another than {calls.precision} for the run; set trainer.precision"
        outcome = Outcome(str(resolved.config.recipe), hardware.name, calls.precision, step.median_ms, idle, path)
        todo = [work for work in works if again or work.key not in known or not known[work.key].is_complete]
        if todo:
            found = _measure(todo, context, console, path, outcome, budget_seconds)
            known = {**known, **found}
    for work in works:
        why_not = outcome.not_measured.get(work.key, "")
        row = SiteRow(work.room.name, work.paths, len(work.modules), work.calls, known.get(work.key), why_not)
        outcome.rows.append(row)
    print_outcome(outcome, console, compiled="compile" in context.asked_for)
    return STOPPED not in outcome.not_measured.values()


def rooms_to_tune(wanted: Sequence[Optimization[Any]], catalogue: Catalogue, every: bool) -> list[AnyPatches]:
    """Return the optimizations with sites: those asked for, and with `every` the catalogue's others as well.

    Raises:
        ConfigError: there is none.
    """
    rooms = [optimization for optimization in wanted if isinstance(optimization, PatchOptimization)]
    able = {name: room for name, room in catalogue.items() if issubclass(room, PatchOptimization)}
    if every:
        asked = {room.name for room in rooms}
        rooms += [room(room.config_class()) for name, room in able.items() if name not in asked]
    if rooms:
        return rooms
    names = ", ".join(optimization.name for optimization in wanted)
    found = f"none of those asked for does ({names})" if names else "none is asked for"
    cure = (
        f"ask for one, for instance optimizations.{min(able)}=true, or give --all to measure {', '.join(sorted(able))}"
        if able else "there is none here"
    )  # fmt: skip
    raise ConfigError(f"tune measures optimizations that replace modules of the model, and {found}; {cure}.")


def find_work(rooms: Sequence[AnyPatches], context: Context) -> tuple[list[Work], dict[str, str]]:
    """Return the sites of some rooms, those that are the same together; and what is no work, with its reason.

    Raises:
        OptimizationError: there is no site, none is called in a training step, or the step can't be run by itself.
        DataError: from the data.
    """
    assert context.choices is not None
    works: dict[str, Work] = {}
    idle: dict[str, str] = {}
    for room in rooms:
        sites = room.callback.patches.sites(context.module)
        if not sites:
            idle[room.name] = room.callback.patches.why_no_site(context.module)
        for site in sites:
            try:
                key = context.choices.key(room.room, site.path, site.plain)
            except OptimizationError as error:
                raise OptimizationError(f"tune runs the training step by itself: {str(error).rstrip('.')}.") from error
            if key is None:
                idle[f"{room.name} {site.path}"] = "the training step does not call it"
                continue
            calls = tuple(_calls(context)()[site.path])
            work = works.setdefault(key, Work(room, key, site.plain, calls, []))
            work.paths.append(site.path)
            work.modules.add(id(context.module.get_submodule(site.path)))
    if not works:
        reasons = "; ".join(f"{what}: {why}" for what, why in idle.items())
        raise OptimizationError(f"there is no site to measure. {reasons}.")
    return list(works.values()), idle


def _measure(
    todo: Sequence[Work], context: Context, console: Console, path: Path, outcome: Outcome, budget_seconds: float
) -> dict[str, Measured]:
    """Time what is to be timed, the largest first, and keep each at once; mutates the outcome's reasons."""
    with console.status("recording the sites' inputs") if console.is_terminal else nullcontext():
        model, arguments = _calls(context).arguments([work.paths[0] for work in todo])
    todo = sorted(todo, key=lambda work: -len(work.modules) * _elements(arguments[work.paths[0]]))
    clock = Clock(time.perf_counter() + budget_seconds, len(todo))
    found: dict[str, Measured] = {}
    reason = NOT_REACHED
    for number, work in enumerate(todo, start=1):
        label = f"[{number}/{len(todo)}] {work.room.name} {work.paths[0]}"
        if reason == STOPPED or time.perf_counter() >= clock.until:
            outcome.not_measured[work.key] = reason
            continue
        try:
            with console.status(label) if console.is_terminal else nullcontext():
                times = _timed(work, model, arguments[work.paths[0]], context, clock)
        except KeyboardInterrupt:
            outcome.not_measured[work.key] = reason = STOPPED
            continue
        if not times.times:
            outcome.not_measured[work.key] = "; ".join(f"{name}: {why}" for name, why in times.missing.items())
        else:
            found[work.key] = _entry(work, times, context, outcome.recipe)
            save_choice(path, work.key, found[work.key])
        line = progress_line(label, found.get(work.key), outcome.not_measured.get(work.key, ""))
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return found


def _timed(work: Work, model: nn.Module, arguments: Sequence[Arguments], context: Context, clock: Clock) -> SiteTimes:
    sites = work.room.callback.patches.sites(model)
    site = next(site for site in sites if site.path == work.paths[0])
    different = len(set(work.calls))
    device, share = context.hardware.device, clock.share()
    times = time_site(model, site, arguments, device, share, clock.compile_seconds * different)
    clock.left -= 1
    if times.compile_seconds is not None:
        clock.compile_seconds = times.compile_seconds / different
    return times


def _entry(work: Work, times: SiteTimes, context: Context, recipe: str) -> Measured:
    assert context.choices is not None
    return Measured(
        room=work.room.room,
        precision=context.choices.precision,
        module=" ".join(str(work.plain).split()),
        calls=tuple(str(call) for call in work.calls),
        times=times.times,
        missing=times.missing,
        how=times.how,
        seen=f"{recipe}: {work.paths[0]}",
        date=date.today().isoformat(),
        by=" ".join(filter(None, [__version__, source_commit()])),
    )


def _calls(context: Context) -> StepCalls:
    assert context.choices is not None
    calls = context.choices.calls
    assert isinstance(calls, StepCalls)
    return calls


def _elements(arguments: Sequence[Arguments]) -> int:
    return sum(tensor.numel() for each in arguments for tensor in tensors_in((each.positional, each.named)))


@contextmanager
def _cudnn_as_configured(benchmark: bool | None) -> Iterator[None]:
    """Let cuDNN try its algorithms if it will in the run: Lightning sets this where it is configured."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before if benchmark is None else benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
