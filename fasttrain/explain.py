"""What a run would do, before it does anything: every value with where it came from, and the plan with its reasons."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasttrain.config import Resolved, leaves
from fasttrain.fit import plan_lines
from fasttrain.judgement import yaml_text
from fasttrain.plan import Plan
from fasttrain.sections import SECTIONS


def values_table(resolved: Resolved) -> Table:
    """Return a table of dotted key, value and the layer that set it."""
    table = Table(title=None, box=None, pad_edge=False, show_header=True, header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim")
    for section, path in resolved.classes.items():
        table.add_row(f"{section}.class", path, escape(resolved.origin[f"{section}.class"]))
    for key, value in leaves(resolved.config):
        if key in SECTIONS:  # a class without parameters
            continue
        origin = resolved.origin.get(key, "default")
        style = "" if origin == "default" else "cyan"
        table.add_row(escape(key), f"[{style}]{_shown(value)}[/]" if style else _shown(value), escape(origin))
    return table


def explain(resolved: Resolved, plan: Plan, console: Console) -> None:
    """Print the values and the plan."""
    console.print(values_table(resolved))
    console.print()
    if resolved.preset_note:
        console.print(resolved.preset_note, highlight=False, markup=False)
    lines = plan_lines(plan)
    console.print("[bold]plan[/]" if lines else "[bold]plan[/]: no optimizations asked for")
    for number, line in enumerate(lines, start=1):
        console.print(f"{number}. {line}", highlight=False)


def _shown(value: Any) -> str:
    return escape("(left to the class)" if value == "???" else yaml_text(value))
