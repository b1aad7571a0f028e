"""`fasttrain bench`: cases by name, and measurements of a recipe by their own commands."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from fasttrain.cli_parts import Overrides, RecipeName, wide_console

CASES = "cases"


class _CasesByName(TyperGroup):
    """Takes everything that is no command of its own for names and options of `cases`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [CASES, *args]
        return list(super().parse_args(ctx, args))


bench_app = typer.Typer(
    cls=_CasesByName,
    rich_markup_mode="rich",
    help="""Measure rooms and recipes: plain, ours, peers and the floor, side by side on this machine.

    [bold]fasttrain bench --list[/]                   the cases
    [bold]fasttrain bench focal_loss --out x.csv[/]   those of a room or recipe; rows are appended to x.csv
    [bold]fasttrain bench data retinanet[/]           whether a recipe waits for its data
    [bold]fasttrain bench ablate retinanet[/]         what each of its optimizations gains, alone and beside the others
    """,
)

Out = Annotated[Path | None, typer.Option(help="CSV file to append the rows to.", show_default=False)]


@bench_app.command(CASES)
def cases(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUBJECT[/CASE]]... [OPTION=VALUE]...", help="Rooms or recipes.", show_default=False),
    ] = None,
    out: Out = None,
    show: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
) -> None:
    """Run cases by name, all of them when none is named. The word `cases` can be left out."""
    import torch

    from fasttrain.bench import choose_cases, find_cases, run_cases, split_options, with_options
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.recipe import recipe_names

    console = wide_console()
    packages = [f"fasttrain.callbacks.{name}" for name in CATALOGUE]
    packages += [f"fasttrain.recipes.{name}" for name in recipe_names()]
    wanted, options = split_options(names or [])
    chosen = with_options(choose_cases(find_cases(packages), wanted), options)
    if show:
        for case in chosen:
            choices = " ".join(f"{name}={value}" for name, value in case.options.items())
            console.print(f"{case.subject}/{case.name}  {case.summary}  {choices}".rstrip(), highlight=False)
        return
    _see_that_it_can_be_written(out)
    for case, row in run_cases(chosen, torch.cuda.is_available()):
        if row is None:
            console.print(f"{case.subject}/{case.name}: skipped, it needs a GPU", style="yellow", highlight=False)
        else:
            _keep(row, out, console)


@bench_app.command()
def data(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Batches of each of the three measurements.")] = 50,
    out: Out = None,
) -> None:
    """Tell whether a recipe's run waits for its data, and what would help.

    One fit, as configured, on one device and without evaluation, measures samples a second of the step alone (a batch
    repeated), of the loader alone, and of both together, where it also sees how much of each step is waiting for data:
    on a GPU the time in which it had nothing to do. Prints medians with the 10th and 90th percentile of ten parts.
    """
    from fasttrain.bench_data import bench_data
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.recipe import find_recipe, resolve

    resolved = resolve(find_recipe(recipe), overrides or [])
    _see_that_it_can_be_written(out)
    found, prepared = bench_data(resolved, CATALOGUE, steps)
    names = [optimization.name for optimization in prepared.plan.applying]
    note = f"preset {resolved.config.preset}, optimizations: {', '.join(names) or 'none'}"
    console = wide_console()
    for row in found.rows(str(resolved.config.recipe), "ours" if names else "plain", note):
        _keep(row, out, console)
    cure = "optimizations.device_prefetch={}"
    console.print(found.verdict(cure), highlight=False, markup=False, soft_wrap=True)


@bench_app.command()
def ablate(
    recipe: RecipeName,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="An optimization to look at; may be given again. Default: all.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each variant that count, after its warm-up.")] = 50,
    limit_seconds: Annotated[
        float | None,
        typer.Option(help="Time for everything; what it does not suffice for is named.", show_default=False),
    ] = None,
    out: Out = None,
) -> None:
    """Show what each optimization of a recipe gains: alone, and when it alone is left out.

    Each variant is a short fit with the recipe's own loader in a process of its own: samples a second once it is
    steady, memory, seconds until it is steady, and how far its first losses are from the plain run's. Those that do
    not apply or fail are shown with the reason, and those that lose as well. Ctrl-C keeps what was measured.
    """
    import math
    from contextlib import nullcontext

    from fasttrain.ablation import Ablation
    from fasttrain.ablation_table import print_table, progress_line
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.measure import write_rows
    from fasttrain.recipe import find_recipe, resolve

    resolved = resolve(find_recipe(recipe), overrides or [])
    _see_that_it_can_be_written(out)
    console = wide_console()
    limit = math.inf if limit_seconds is None else limit_seconds
    ablation = Ablation(
        resolved, CATALOGUE, "fasttrain.callbacks:CATALOGUE",
        steps=steps, only=only or (), limit_seconds=limit, note=" ".join(overrides or []),
    )  # fmt: skip
    rows: list[Any] = []
    stopped = False
    with console.status("starting") if console.is_terminal else nullcontext() as status:
        ablation.on_begin = status.update if status is not None else lambda label: None
        try:
            for measured in ablation.run():
                rows += measured.rows
                if out is not None:
                    write_rows(out, measured.rows)
                console.print(progress_line(measured), highlight=False, markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            stopped = True
    print_table(rows, ablation.case, ablation.not_reached, console)
    if stopped:
        console.print("stopped; what was measured is above", style="yellow")
        raise typer.Exit(130)


def _see_that_it_can_be_written(out: Path | None) -> None:
    """A file that can't be written is better known before the measurements."""
    if out is not None:
        from fasttrain.measure import write_rows

        write_rows(out, [])


def _keep(row: Any, out: Path | None, console: Console) -> None:
    """Print a row and write it, at once: the next may take long, and not come to an end."""
    from fasttrain.measure import write_rows

    console.print(
        f"{row.subject}/{row.case}  {row.variant:<10} {row.metric} {row.value:.4g} {row.unit} "
        f"(p10 {row.p10:.4g}, p90 {row.p90:.4g}, {row.repeats} repeats) {row.note}",
        highlight=False,
    )
    if out is not None:
        write_rows(out, [row])
