"""What commands of the command line have in common: arguments, and where they print."""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Override any value: data.batch_size=8, trainer.max_epochs=3, module.levels='[3,4,5]', "
        "optimizations.channels_last=false, optimizations=none. `fasttrain explain RECIPE` lists the keys.",
        show_default=False,
    ),
]
RecipeName = Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with fasttrain.")]


def wide_console() -> Console:
    """Return a console; a file or pipe has no width to keep to, so what is searched for or copied stays on one line."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
