"""`fasttrain plan`: what can be worked out before anyone trains."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fasttrain.cli_parts import Overrides, wide_console
from fasttrain.errors import ConfigError

plan_app = typer.Typer(no_args_is_help=True, help="Work out a run before it is started.")


@plan_app.command("batch")
def plan_batch(
    samples: Annotated[int, typer.Argument(help="Samples of one epoch; 1281167 for ImageNet.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the whole run.")],
    batch: Annotated[int, typer.Option(help="Samples a step and GPU.")],
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Propose other numbers of whole nodes, too.", show_default=False)
    ] = None,
    near: Annotated[float, typer.Option(help="How far proposals may be from this global batch, a share of it.")] = 0.05,
    epochs: Annotated[int, typer.Option(help="Of the run, for its evaluations.")] = 37,
    evaluate_every: Annotated[int, typer.Option(metavar="EPOCHS", help="Epochs between evaluations.")] = 4,
    offset: Annotated[int, typer.Option(help="Epoch, from 0, after which the first evaluation comes.")] = 2,
    warmup_epochs: Annotated[float, typer.Option(help="Of the learning rate.")] = 2.0,
) -> None:
    """Show what a batch size wastes of each epoch, when the run evaluates, and batch sizes that waste less.

    An epoch's last step is padded: its work beyond the samples is wasted. The defaults are ResNet-50's of MLPerf.
    """
    from fasttrain.batch_plan import BatchPlan, plan_lines, proposals

    wanted = BatchPlan(samples, gpus, batch)
    better = proposals(wanted, gpus_per_node, near)
    for line in plan_lines(wanted, better, epochs, evaluate_every, offset, warmup_epochs):
        Console().print(line, highlight=False, soft_wrap=True)


@plan_app.command("time")
def plan_time(
    benchmark: Annotated[str, typer.Argument(help="A recipe, or MLPerf's name of a benchmark: ssd, resnet, bert.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the whole run.")],
    batch: Annotated[int, typer.Option(help="Samples a step and GPU.")],
    rate: Annotated[
        float | None, typer.Option(help="Training samples a second and GPU, as measured.", show_default=False)
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="CSV of result rows with that rate, in its place.", show_default=False)
    ] = None,
    case: Annotated[str, typer.Option(help="Of --rows: the case.")] = "",
    variant: Annotated[str, typer.Option(help="Of --rows: the variant.")] = "ours",
    efficiency: Annotated[
        float | None,
        typer.Option(help="Share of it left on all GPUs; default 1 on one, else 0.95.", show_default=False),
    ] = None,
    evaluation_rate: Annotated[
        float | None, typer.Option(help="The same in evaluation; default the training rate.", show_default=False)
    ] = None,
    scoring: Annotated[float, typer.Option(metavar="SECONDS", help="Of the host after each evaluation.")] = 0.0,
    hidden: Annotated[bool, typer.Option(help="Whether training goes on meanwhile.")] = True,
    first_steps: Annotated[
        float, typer.Option(metavar="SECONDS", help="Compiling, capturing, filling loaders on the clock.")
    ] = 60.0,
    epochs: Annotated[
        float | None, typer.Option(help="To the target; default MLPerf's reference.", show_default=False)
    ] = None,
) -> None:
    """Estimate a benchmark's time to train on so many GPUs, and show what the estimate rests on.

    From a measured rate of one GPU, MLPerf's reference convergence points at the global batch, and evaluations' cost.
    """
    from fasttrain.mlperf.projection import WORK, Assumptions, estimate, estimate_lines, rate_from_rows

    if (rate is None) == (rows is None):
        raise ConfigError(
            "give the measured rate of one GPU, either --rate=SAMPLES_PER_SECOND or --rows=FILE with --case and "
            "--variant; `fasttrain bench` measures one."
        )
    measured = rate if rows is None else rate_from_rows(rows, case, variant)
    assert measured is not None
    name = benchmark if benchmark in WORK else _benchmark_of(benchmark)
    left = (1.0 if gpus == 1 else 0.95) if efficiency is None else efficiency
    given = Assumptions(gpus, batch, measured, left, evaluation_rate, scoring, hidden, first_steps, epochs)
    for line in estimate_lines(estimate(name, given), given):
        Console().print(line, highlight=False, soft_wrap=True)


def _benchmark_of(recipe: str) -> str:
    """Return MLPerf's name of the benchmark that a recipe says it is an attempt at."""
    from fasttrain.config import load_layer
    from fasttrain.mlperf.benchmark import find_benchmark
    from fasttrain.mlperf.projection import WORK
    from fasttrain.recipe import find_recipe

    try:
        file = find_recipe(recipe)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rstrip('.')}; benchmarks: {', '.join(WORK)}.") from None
    path = (load_layer(file).values.get("mlperf") or {}).get("benchmark")
    if not path:
        raise ConfigError(f"{recipe}: the recipe names no mlperf.benchmark; name one of MLPerf's: {', '.join(WORK)}.")
    return find_benchmark(str(path)).name


@plan_app.command()
def packing(
    data: Annotated[
        str, typer.Argument(help="A recipe, or a file of lengths: .npy, .json, .txt or .csv, by sequence or counted.")
    ],
    overrides: Overrides = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens in a row; default the recipe's, or a file's longest.", show_default=False)
    ] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Most sequences in a row.", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Compare with padding to the longest of so many, too.", show_default=False)
    ] = None,
) -> None:
    """Show the lengths of sequences, the rows that packing makes of them, and the speed-up to expect."""
    from fasttrain.callbacks import CATALOGUE
    from fasttrain.callbacks.sequence_packing.lengths_file import SUFFIXES
    from fasttrain.callbacks.sequence_packing.planning import tables_of_data, tables_of_file
    from fasttrain.plan import requested
    from fasttrain.recipe import build_data, find_recipe, resolve
    from fasttrain.report import print_tables, text_table
    from fasttrain.run_summary import OutcomeTable

    if Path(data).suffix in SUFFIXES:
        if overrides:
            raise ConfigError(f"{data} is a file of lengths, and {overrides[0]} a recipe's value; use --max-length.")
        tables = tables_of_file(Path(data), max_length, max_sequences, batch_size)
    else:
        given = {"max_length": max_length, "max_sequences_per_row": max_sequences}
        items = [f"optimizations.sequence_packing.{key}={value}" for key, value in given.items() if value is not None]
        resolved = resolve(find_recipe(data), [*(overrides or []), *items])
        asked = {"sequence_packing": resolved.config.optimizations.get("sequence_packing") or {}}
        (optimization,), _ = requested(asked, CATALOGUE)
        tables = tables_of_data(optimization, build_data(resolved), batch_size)  # type: ignore[arg-type]
    shown = [OutcomeTable("", t.title, tuple(t.columns), tuple(map(tuple, t.rows)), t.note) for t in tables]
    print_tables(map(text_table, shown), wide_console())
