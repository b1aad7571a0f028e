"""The report as one HTML page: nothing is loaded from anywhere, plots and pictures are inside as data URIs."""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from fasttrain import plots, report
from fasttrain.errors import ConfigError
from fasttrain.run_summary import RunSummary

TEMPLATE = Path(__file__).with_name("report_page.html.j2")

MOST_PICTURES = 12
"""Sample pictures shown, of all runs together: at about 300 KB each, more make a page slow to open and to send."""

DARK_FOR_LIGHT = dict(zip(plots.LIGHT.colors, plots.DARK.colors, strict=True))

Subject = TypeVar("Subject")

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Plot:
    """One plot as two data URIs, for pages on a light and on a dark ground."""

    title: str
    light: str
    dark: str


@dataclass(frozen=True)
class RunSection:
    """What the page shows of one run besides its summary; `pictures` are (file name, data URI)."""

    anchor: str
    label: str
    summary: RunSummary
    plots: tuple[Plot, ...]
    pictures: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]


def write_page(runs: Sequence[RunSummary], out: Path, further: Sequence[report.TextTable] = ()) -> None:
    """Write the page, whole or not at all, with further tables at its end; folders on the way to `out` are made.

    Raises:
        ConfigError: `out` can't be written.
    """
    page = render_page(runs, further)
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise ConfigError(f"The report can't be written to '{out}' ({reason}); name a file that can be.") from None


def render_page(runs: Sequence[RunSummary], further: Sequence[report.TextTable] = ()) -> str:
    """Return the page's HTML; every text from a run folder is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        duration=report.format_duration,
        number=report.format_number,
        score=report.format_score,
        target=report.format_target,
    )
    sections = [
        _section(f"run-{number}", label, run, max(3, MOST_PICTURES // len(runs)))
        for number, (label, run) in enumerate(zip(report.run_labels(runs), runs, strict=True), start=1)
    ]
    several = len(runs) > 1
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        sections=sections,
        title=", ".join(dict.fromkeys(run.recipe for run in runs)),
        tables=[report.comparison_table(runs), *report.seed_tables(runs)] if several else [],
        further=further,
        comparison=_plot("Score over wall time", plots.comparison_figure, runs) if several else None,
        report=report,
        light=plots.LIGHT,
        dark=plots.DARK,
    )


def _section(anchor: str, label: str, run: RunSummary, most_pictures: int) -> RunSection:
    pictures, damaged = [], []
    for path in run.pictures[:most_pictures]:
        content = path.read_bytes()
        if content.startswith(PNG_SIGNATURE):
            pictures.append((path.name, _data_uri("image/png", content)))
        else:
            damaged.append(f"samples/{path.name} is no PNG image and left out.")
    figures = (
        _plot("Loss", plots.loss_figure, run),
        _plot("Score", plots.score_figure, run),
        _plot("Throughput", lambda run, theme: plots.throughput_figure(run, theme, with_breakdown=False), run),
    )
    return RunSection(anchor, label, run, figures, tuple(pictures), (*run.problems, *damaged))


def _plot(title: str, draw: Callable[[Subject, plots.Theme], Figure], subject: Subject) -> Plot:
    content = BytesIO()
    # Without a date, the same run gives the same page.
    draw(subject, plots.LIGHT).savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    light = content.getvalue().decode("utf-8")
    # Drawing takes longest of all that the page needs, so the dark plot is the light one in other colours.
    dark = re.sub("#[0-9a-f]{6}", lambda match: DARK_FOR_LIGHT.get(match[0], match[0]), light)
    return Plot(title, *(_data_uri("image/svg+xml", svg.encode("utf-8")) for svg in (light, dark)))


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
