"""The command line. Imports that take seconds happen inside the commands, so that `--help` comes at once."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fasttrain.cli_bench import bench_app
from fasttrain.cli_parts import Overrides, RecipeName, wide_console
from fasttrain.cli_plan import plan_app
from fasttrain.errors import ConfigError, FasttrainError

app = typer.Typer(
    name="fasttrain",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Train Lightning recipes with the optimizations of NVIDIA's MLPerf submissions.

    [bold]fasttrain fit retinanet[/]                         train a recipe, by name or path
    [bold]fasttrain fit mine.yaml trainer.max_epochs=3[/]    change any value: key=value after the recipe
    [bold]fasttrain explain retinanet[/]                     every value, where it came from, and the plan
    [bold]fasttrain doctor retinanet[/]                      what keeps the step from being captured as a CUDA graph
    [bold]fasttrain plan packing bert[/]                     what packing sequences into rows would gain
    [bold]fasttrain tune retinanet[/]                       which modules pay to be fused on this GPU, measured and kept
    [bold]fasttrain bench data retinanet[/]                  whether it waits for its data, and what would help
    [bold]fasttrain plan batch 1281167 --gpus=8 --batch=408[/]  what a batch size wastes of an epoch
    [bold]fasttrain plan time retinanet --gpus=8 --batch=32 --rate=340[/]  estimated time to train
    [bold]fasttrain report runs/retinanet/*[/]               tables and one HTML page
    """,
)
app.add_typer(plan_app, name="plan")
app.add_typer(bench_app, name="bench")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@app.command()
def fit(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe's file, or the name of one that comes with fasttrain.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the results; default runs/RECIPE/TIME.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Run folder to go on with, exactly where it stopped.", show_default=False)
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe to its target.

    The run folder gets config.yaml (which `fit` runs again), environment.json, plan.json, metrics.csv, result.json,
    plots, sample predictions and checkpoints. Ctrl-C stops with a checkpoint; --resume goes on from it.
    """
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.fit import fit as run_fit
    from fasttrain.recipe import find_recipe, resolve
    from fasttrain.results import RunFolder

    items = list(overrides or [])
    if resume is not None:
        if recipe is not None and "=" not in recipe:
            raise ConfigError(f"--resume goes on with the recipe of {resume}; leave '{recipe}' out.")
        if recipe is not None:
            items.insert(0, recipe)  # an override in the recipe's place
        if run_dir is not None:
            raise ConfigError("--resume goes on in the run's own folder; leave --run-dir out.")
        file = RunFolder.existing(resume).path / "config.yaml"
    elif recipe is None:
        raise ConfigError("name a recipe: `fasttrain fit retinanet`, a YAML file, or --resume with a run folder.")
    else:
        file = find_recipe(recipe)
    outcome = run_fit(resolve(file, items), CATALOGUE, run_dir=run_dir, resume=resume, quiet=quiet)
    if outcome.result["status"] == "interrupted":
        raise typer.Exit(130)


@app.command()
def validate(
    run: Annotated[Path, typer.Argument(help="A run folder (its best checkpoint is scored), or a checkpoint in one.")],
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Score a checkpoint on its run's validation data, or on other data by overrides."""
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.validate import validate as run_validate

    scores = run_validate(run, overrides or [], CATALOGUE, quiet=quiet)
    console = Console()
    for name, value in scores.items():
        console.print(f"{name} {value:.4f}", highlight=False)


@app.command()
def explain(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Show every value with where it came from, and the plan: each optimization applies, or why not."""
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.explain import explain as show
    from fasttrain.recipe import find_recipe, resolve
    from fasttrain.run import prepare

    resolved = resolve(find_recipe(recipe), overrides or [])
    show(resolved, prepare(resolved, CATALOGUE).plan, wide_console())


@app.command()
def doctor(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Find every line that keeps the training step from being captured as a CUDA graph, with the cure.

    Runs the step a few times outside of a fit: .item(), boolean indexing, copies between host and device, host random
    numbers and the like are named by file and line. Exit status 1 if the step can't be captured whole.
    """
    from fasttrain.callbacks.cuda_graph_step.sync_finder.examination import examine
    from fasttrain.callbacks.cuda_graph_step.sync_finder.finder import UNSEEN_ON_CPU
    from fasttrain.doctor import doctor as run_doctor
    from fasttrain.recipe import find_recipe, resolve

    resolved = resolve(find_recipe(recipe), overrides or [])
    if not run_doctor(resolved, examine, UNSEEN_ON_CPU, wide_console()):
        raise typer.Exit(1)


@app.command()
def tune(
    recipe: RecipeName,
    overrides: Overrides = None,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Time for measuring and compiling.")] = 300.0,
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before, too.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Measure every optimization that replaces modules, not only those asked for.")
    ] = False,
) -> None:
    """Measure on this machine which modules are faster fused, and keep it for every later run.

    For each place of the recipe's model that an optimization would replace: forward and backward of the plain module,
    of torch.compile's and of the fused one, with the inputs, precision and memory format of the training step. Places
    that are the same are measured once. The times are kept for this GPU, torch and cuDNN in $FASTTRAIN_CACHE, or
    ~/.cache/fasttrain; from then on the plan patches the places where the fused module won, as `fasttrain explain`
    shows, and need not time the step for them. What the budget did not suffice for is decided as before.
    """
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.recipe import find_recipe, resolve
    from fasttrain.tune import tune as run_tune

    resolved = resolve(find_recipe(recipe), overrides or [])
    options: dict[str, Any] = {"budget_seconds": budget, "again": again, "every": every}
    if not run_tune(resolved, CATALOGUE, wide_console(), **options):
        raise typer.Exit(130)


@app.command("list")
def list_() -> None:
    """List the recipes and the optimizations that come with fasttrain."""
    from rich.table import Table

    from fasttrain.callbacks import CATALOGUE
    from fasttrain.config import load_layer
    from fasttrain.recipe import recipe_names

    console = Console()
    recipes = Table("recipe", "what", box=None, pad_edge=False, header_style="bold")
    for name, path in recipe_names().items():
        recipes.add_row(name, str(load_layer(path).values.get("summary", "")))
    rooms = Table("optimization", "what", "grade", "stage", box=None, pad_edge=False, header_style="bold")
    for name, room in CATALOGUE.items():
        rooms.add_row(name, room.summary, room.grade, room.stage.name.lower())
    console.print(recipes)
    console.print()
    console.print(rooms)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("report.html"),
) -> None:
    """Print tables of one or more runs and write them, with plots and pictures, as one self-contained HTML page.

    MLPerf result files among them are scored, judged by MLPerf's own checkers, and shown beside public results; a
    folder with nothing else, of a public submission for instance, may be given too.
    """
    from fasttrain.mlperf.result import result_files
    from fasttrain.mlperf.tables import mlperf_tables
    from fasttrain.report import print_report
    from fasttrain.report_page import write_page
    from fasttrain.run_summary import is_run_folder, load_run

    # A folder of result files alone may be anybody's; whatever else is no run folder is load_run's to refuse.
    loaded = [load_run(run) for run in runs if is_run_folder(run) or not result_files(run)]
    further = mlperf_tables(runs)
    print_report(loaded, wide_console() if further else None, further)
    if not loaded:
        return
    write_page(loaded, out, further)
    Console().print(f"page: {out}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Image folder: one folder a class, or what --annotations refers to.")],
    destination: Annotated[Path, typer.Argument(help="Folder for the shards; an interrupted conversion goes on.")],
    annotations: Annotated[
        Path | None, typer.Option(help="COCO-format file whose images to take; kept beside them.", show_default=False)
    ] = None,
    shard_mb: Annotated[int, typer.Option(help="Size that no shard exceeds, MB.")] = 256,
) -> None:
    """Write a folder of images as tar shards in webdataset's layout, which read faster where files are many."""
    from rich.progress import Progress

    from fasttrain.callbacks.dali_loader.convert import convert as run_convert

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing shards", total=None)
        shards = run_convert(
            source,
            destination,
            annotations=annotations,
            shard_megabytes=shard_mb,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    Console().print(f"{len(shards)} shards: {destination}", highlight=False, markup=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from fasttrain import __version__

        typer.echo(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; a user's error is one sentence on standard error and exit status 2."""
    # Lets a recipe name classes of the project that fasttrain is started in.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        app(arguments)
    except FasttrainError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "red"), str(error)), highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
