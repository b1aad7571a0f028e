"""What would break a CUDA-graph capture of a recipe's training step: every place, with the line and the cure."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fasttrain.batches import tensors_in
from fasttrain.config import Resolved
from fasttrain.environment import Hardware
from fasttrain.optimization import ExampleBatch
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import Recipe, build


class Found(Protocol):
    """One line that would break a capture, or freeze a value in it."""

    @property
    def kind(self) -> str:
        """A few words."""

    @property
    def where(self) -> object | None:
        """Whose text is file:line; None where the line could not be told."""

    @property
    def code(self) -> str:
        """The line's source."""

    @property
    def user_where(self) -> object | None:
        """The user's own line that led there, where `where` is a library's."""

    @property
    def what(self) -> str:
        """What happens there."""

    @property
    def cure(self) -> str:
        """What to write instead."""

    @property
    def count(self) -> int:
        """How often in a step."""

    @property
    def breaks(self) -> bool:
        """Whether a capture fails."""

    @property
    def freezes(self) -> bool:
        """Whether a capture succeeds, and its replays would repeat or leave out what is done here."""


SHOWN_TENSORS = 8

Examine = Callable[[pl.LightningModule, Any, str, str], Sequence[Found]]


def doctor(resolved: Resolved, examine: Examine, unseen_on_cpu: str, console: Console) -> bool:
    """Examine a recipe's training step and print what was found; return whether it can be captured whole.

    The step is that of the module as the recipe builds it, with no optimization applied, on the first training batch.

    Args:
        resolved: the configuration.
        examine: given module, batch, device and precision, returns what a capture would stumble over.
        unseen_on_cpu: what an examination on a CPU can't show, in a sentence for the user.
        console: where to print.

    Raises:
        ConfigError, DataError: from the recipe's classes.
        OptimizationError: the step can't be run by itself, or there is no batch without a Trainer.
    """
    hardware = Hardware.of_accelerator(resolved.config.trainer.accelerator)
    with quiet_libraries():
        recipe = build(resolved)
        batch = ExampleBatch(recipe.data)()
    precision = str(resolved.config.trainer.precision)
    console.print(_examined(recipe, batch, hardware.device, precision))
    findings = examine(recipe.module, batch, hardware.device, precision)
    console.print()
    if findings:
        console.print(findings_table(findings))
        console.print()
    if hardware.kind == "cpu":
        console.print(unseen_on_cpu, style="dim", highlight=False)
    console.print(verdict(findings), highlight=False, style="bold")
    return can_be_captured(findings)


def findings_table(findings: Sequence[Found]) -> Table:
    """Return a numbered table: each finding's kind, line, source, caller, what it is, and the cure."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, each in enumerate(findings, start=1):
        table.add_row(f"{number}.", _described(each))
    return table


def verdict(findings: Sequence[Found]) -> str:
    """Return one line: whether the step can be captured whole, and if not, why."""
    breaking = sum(each.breaks for each in findings)
    frozen = sum(each.freezes for each in findings)
    notes = len(findings) - breaking - frozen
    parts = []
    if breaking:
        parts.append(f"{_places(breaking)} {'breaks' if breaking == 1 else 'break'} a capture")
    if frozen:
        parts.append(f"{_places(frozen)} would not be done again by a replay")
    if not parts:
        parts.append("The step can be captured whole")
    if notes:
        parts.append(f"{notes} {'note' if notes == 1 else 'notes'}")
    return "; ".join(parts) + "."


def can_be_captured(findings: Sequence[Found]) -> bool:
    """Whether the step can be captured whole as it is."""
    return not any(each.breaks or each.freezes for each in findings)


def _examined(recipe: Recipe, batch: Any, device: str, precision: str) -> Table:
    module = type(recipe.module)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("step", Text(f"{module.__module__}.{module.__qualname__}.training_step, forward and backward"))
    table.add_row("on", Text(f"{device}, precision {precision}, no optimization applied"))
    table.add_row("batch", Text(_batch_text(batch)))
    return table


def _batch_text(batch: Any) -> str:
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors_in(batch)]
    rest = [f"and {len(shapes) - SHOWN_TENSORS} more"] if len(shapes) > SHOWN_TENSORS else []
    return ", ".join(shapes[:SHOWN_TENSORS] + rest) or "no tensor in it"


def _described(each: Found) -> Text:
    mark = "red" if each.breaks else "yellow" if each.freezes else "green"
    lines = [
        Text.assemble(
            (each.kind, f"bold {mark}"), "  ", (str(each.where or "at a line that could not be told"), "cyan"),
            f"  ({each.count} times)" if each.count > 1 else "",
        )
    ]  # fmt: skip
    if each.code:
        lines.append(Text(f"    {each.code}"))
    if each.user_where is not None:
        lines.append(Text(f"called from {each.user_where}"))
    lines += [Text(each.what), Text(f"cure: {each.cure}"), Text()]
    return Text("\n").join(lines)


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count} places"
