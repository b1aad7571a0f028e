"""A run's plots: loss, score and throughput, as matplotlib Figures that nobody else's pyplot state can touch.

Each function returns a Figure, with words in place of curves where nothing was logged. Colours are Okabe and Ito's
(Color Universal Design, 2008), told apart under every common colour blindness, lightened for the dark theme.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from fasttrain.errors import DataError
from fasttrain.report import breakdown, format_duration, format_number, run_labels
from fasttrain.run_summary import Curve, RunSummary, load_run

Values = NDArray[np.float64]

WIDE, TALL = (4.8, 2.95), (4.8, 4.1)
"""Inches, next to letters of 9 to 10 points: a phone shows the plots at two thirds of this width, still readable."""

MOST_POINTS = 500
"""A curve with more points than this is drawn by averages: finer than a screen shows, and the page stays small."""

MOST_SCORES = 4
"""Scores drawn of one run: the one it is judged by and the first few of its parts."""

NOT_SCORES = ("loss", "lr", "per_second", "seconds", "_ms", "bytes", "grad", "norm", "epoch", "memory")
"""Parts of names that mark a logged number as no score, for runs whose result doesn't name theirs."""


@dataclass(frozen=True)
class Theme:
    """Colours of a plot; `background` is None for a transparent one."""

    ink: str
    muted: str
    grid: str
    background: str | None
    palette: tuple[str, ...]

    @property
    def colors(self) -> tuple[str, ...]:
        """All colours but the background's."""
        return (self.ink, self.muted, self.grid, *self.palette)

    def color(self, index: int) -> str:
        """Return a palette colour; they repeat after the last."""
        return self.palette[index % len(self.palette)]


PAPER = Theme(
    ink="#1b1f24",
    muted="#5b6470",
    grid="#e3e6ea",
    background="#ffffff",
    palette=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7f87"),
)
LIGHT = Theme(PAPER.ink, PAPER.muted, PAPER.grid, None, PAPER.palette)
DARK = Theme(
    ink="#e8eaed",
    muted="#a3abb5",
    grid="#363c44",
    background=None,
    palette=("#56b4e9", "#ff8c42", "#2fc99a", "#e59bc5", "#f0b429", "#9ad1f5", "#9aa1aa"),
)


def write_plots(run: Path) -> tuple[Path, ...]:
    """Write loss.png, score.png and throughput.png into the run folder's plots/ and return their paths.

    Raises:
        ConfigError: `run` is no run folder.
        DataError: a plot can't be written, for instance because the disk is full.
    """
    summary = load_run(run)
    folder = run / "plots"
    figures = {
        "loss": loss_figure(summary),
        "score": score_figure(summary),
        "throughput": throughput_figure(summary),
    }
    paths = tuple(folder / f"{name}.png" for name in figures)
    try:
        folder.mkdir(exist_ok=True)
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, dpi=250)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"The plots can't be written to '{folder}' ({reason}); the run's numbers are whole.") from None
    return paths


def loss_figure(run: RunSummary, theme: Theme = PAPER) -> Figure:
    """Return every logged loss over the steps: smoothed, with the raw values faint behind."""
    figure, axes = _figure(theme)
    losses = {name: curve for name, curve in run.curves.items() if "loss" in name.lower()}
    if not losses:
        return _say(figure, axes, theme, "no loss was logged")
    seen: list[float] = []
    for index, (name, curve) in enumerate(_total_first(losses).items()):
        steps, raw = _thinned(curve.steps, curve.values)
        smooth = _smoothed_line(axes, steps, raw, theme.color(index), name)
        seen += smooth[np.isfinite(smooth)].tolist()
    if seen and min(seen) > 0 and max(seen) > 30 * min(seen):
        axes.set_yscale("log")
    elif seen and min(seen) >= 0 and max(seen) > 0:
        axes.set_ylim(0, max(seen) * 1.08)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(axes, theme, "upper right")
    return figure


def score_figure(run: RunSummary, theme: Theme = PAPER) -> Figure:
    """Return the scores over wall time, with the target and the point where it was reached."""
    figure, axes = _figure(theme)
    names = score_names(run)
    if not names:
        return _say(figure, axes, theme, "no score was logged")
    unit, seconds_per_unit = _time_unit([run])
    for index, name in enumerate(names):
        curve = run.curves[name]
        main = index == 0
        values = _defined(curve)
        if np.isnan(values).all():
            continue
        axes.plot(
            np.asarray(curve.seconds) / seconds_per_unit,
            values,
            color=theme.color(index),
            linewidth=2.2 if main else 1.1,
            alpha=1 if main else 0.75,
            marker="o" if len(values) < 60 else None,
            markersize=4 if main else 2.5,
            label=name,
            zorder=3 if main else 2,
        )
    if run.target:
        _dashed(axes, run.target.value, theme, f"target {run.target.value:g}")
    if run.target and run.reached:
        label = f"reached after {format_duration(run.reached.seconds)}"
        value = _value_at(run.curves.get(run.target.name), run.reached.seconds, run.target.value)
        _star(axes, run.reached.seconds / seconds_per_unit, value, theme.color(4), theme, label)
    axes.set_xlabel(f"wall time ({unit})")
    axes.set_ylabel("score")
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    _legend(axes, theme, "best")
    return figure


def throughput_figure(run: RunSummary, theme: Theme = PAPER, with_breakdown: bool = True) -> Figure:
    """Return samples per second over wall time, and below it a bar of where the time went."""
    if with_breakdown:
        figure = Figure(figsize=TALL, layout="constrained", facecolor=theme.background or "none")
        FigureCanvasAgg(figure)
        axes, bar = figure.subplots(2, 1, height_ratios=(4, 1))
        _style(axes, theme)
        _draw_breakdown(run, bar, theme)
    else:
        figure, axes = _figure(theme)
    rates = run.curves.get("samples_per_second")
    if rates is None:
        return _say(figure, axes, theme, "no throughput was logged")
    unit, seconds_per_unit = _time_unit([run])
    seconds, raw = _thinned(rates.seconds, rates.values)
    _smoothed_line(axes, seconds / seconds_per_unit, raw, theme.color(0), "while training")
    if run.samples_per_second:
        _dashed(axes, run.samples_per_second, theme, f"average, {format_number(run.samples_per_second)}/s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"wall time ({unit})")
    axes.set_ylabel("samples per second")
    _legend(axes, theme, "lower right")
    return figure


def comparison_figure(runs: Sequence[RunSummary], theme: Theme = PAPER) -> Figure:
    """Return the main score of several runs over wall time, a star where each reached its target."""
    figure, axes = _figure(theme)
    unit, seconds_per_unit = _time_unit(runs)
    names = set()
    for index, (label, run) in enumerate(zip(run_labels(runs), runs, strict=True)):
        for name in score_names(run)[:1]:
            curve = run.curves[name]
            names.add(name)
            seconds = np.asarray(curve.seconds) / seconds_per_unit
            axes.plot(seconds, _defined(curve), color=theme.color(index), linewidth=1.8, label=label, marker="o",
                      markersize=3, linestyle=("-", "--", ":")[index // len(theme.palette) % 3])  # fmt: skip
            if run.target and run.reached:
                value = _value_at(curve, run.reached.seconds, run.target.value)
                _star(axes, run.reached.seconds / seconds_per_unit, value, theme.color(index), theme)
    if not names:
        return _say(figure, axes, theme, "no score was logged")
    for value in sorted({run.target.value for run in runs if run.target and run.target.name in names}):
        _dashed(axes, value, theme, f"target {value:g}")
    axes.set_xlabel(f"wall time ({unit})")
    axes.set_ylabel(", ".join(sorted(names)))
    axes.set_xlim(left=0)
    _legend(axes, theme, "best")
    return figure


def score_names(run: RunSummary) -> list[str]:
    """Return the names of the run's scores, the one it is judged by first.

    A score's parts share its name as a prefix (map, map_50). Where neither result nor target name one, whatever is
    logged and isn't a loss, a rate, a time or a size counts.
    """
    main = run.target.name if run.target else run.quality.name if run.quality else ""
    if main in run.curves:
        return [main, *(name for name in run.curves if name.startswith(f"{main}_"))][:MOST_SCORES]
    return [name for name in run.curves if not any(part in name.lower() for part in NOT_SCORES)][:MOST_SCORES]


def smoothed(values: Values) -> Values:
    """Return a centred Gaussian average, its width a fortieth of the curve; values that aren't finite weigh nothing."""
    sigma = len(values) / 40
    if sigma < 0.5:
        return values
    reach = int(3 * sigma)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    finite = np.isfinite(values)
    # mode="same" gives the longer input's length; a kernel is never longer than its curve.
    weighted = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    weights = np.convolve(finite.astype(np.float64), kernel, mode="same")
    with np.errstate(invalid="ignore"):
        return np.where(finite, weighted / weights, np.nan)


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[Values, Values]:
    """Return a curve with at most MOST_POINTS points, each the mean of its neighbours."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    ys = np.where(np.isfinite(ys), ys, np.nan)
    if len(xs) <= MOST_POINTS:
        return xs, ys
    starts = np.linspace(0, len(xs), MOST_POINTS, endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(xs)))
    return np.add.reduceat(xs, starts) / counts, np.add.reduceat(ys, starts) / counts


def _total_first(losses: Mapping[str, Curve]) -> dict[str, Curve]:
    """Order losses by falling size, so that the total comes before its terms and colours stay the same run by run."""

    def size(name: str) -> float:
        values = np.asarray(losses[name].values)
        values = values[np.isfinite(values)]
        return -float(np.median(values)) if values.size else 0.0

    return {name: losses[name] for name in sorted(losses, key=size)}


def _defined(curve: Curve) -> Values:
    """Return a score's values with NaN for -1, which COCO's scorers write where no ground truth of a size exists."""
    values = np.asarray(curve.values, np.float64)
    return np.where(values == -1, np.nan, values)


def _value_at(curve: Curve | None, seconds: float, otherwise: float) -> float:
    """Return a curve's value at the point nearest in time."""
    if curve is None:
        return otherwise
    return curve.values[int(np.argmin(np.abs(np.asarray(curve.seconds) - seconds)))]


def _time_unit(runs: Sequence[RunSummary]) -> tuple[str, float]:
    longest = max((max(curve.seconds) for run in runs for curve in run.curves.values()), default=0.0)
    return ("s", 1.0) if longest < 180 else ("min", 60.0) if longest < 3 * 3600 else ("h", 3600.0)


def _figure(theme: Theme) -> tuple[Figure, Axes]:
    figure = Figure(figsize=WIDE, layout="constrained", facecolor=theme.background or "none")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _style(axes, theme)
    return figure, axes


def _style(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor("none")
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=9, length=0)
    axes.xaxis.label.set(color=theme.ink, fontsize=10)
    axes.yaxis.label.set(color=theme.ink, fontsize=10)


def _smoothed_line(axes: Axes, x: Values, raw: Values, color: str, label: str) -> Values:
    """Draw a curve smoothed, with its raw values faint behind, and return what was drawn in front."""
    smooth = smoothed(raw)
    if smooth is not raw:
        axes.plot(x, raw, color=color, alpha=0.25, linewidth=0.8)
    marker = "o" if len(raw) < 25 else None
    axes.plot(x, smooth, color=color, linewidth=1.8, marker=marker, markersize=3.5, label=label)
    return smooth


def _dashed(axes: Axes, value: float, theme: Theme, label: str) -> None:
    axes.axhline(value, color=theme.muted, linewidth=1.2, linestyle=(0, (5, 3)), label=label)


def _star(axes: Axes, x: float, y: float, color: str, theme: Theme, label: str | None = None) -> None:
    axes.plot([x], [y], color=color, linestyle="none", marker="*", markersize=14, markeredgecolor=theme.ink,
              markeredgewidth=0.8, zorder=4, label=label)  # fmt: skip


def _legend(axes: Axes, theme: Theme, place: Literal["upper right", "lower right", "best"]) -> None:
    axes.legend(loc=place, frameon=False, fontsize=9, labelcolor=theme.ink, handlelength=1.6, borderaxespad=0.3)


def _say(figure: Figure, axes: Axes, theme: Theme, words: str) -> Figure:
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=theme.muted, fontsize=13)
    return figure


def _draw_breakdown(run: RunSummary, axes: Axes, theme: Theme) -> None:
    parts = breakdown(run)
    axes.set_axis_off()
    if not parts:
        axes.text(0.5, 0.5, "where the time went is unknown", transform=axes.transAxes, ha="center", color=theme.muted)
        return
    left = 0.0
    for index, (name, seconds, share) in enumerate(parts):
        label = f"{name} {format_duration(seconds)}"
        axes.barh(0, share, left=left, color=theme.color(index), edgecolor=theme.background, label=label, height=0.9)
        if share > 0.06:
            axes.text(left + share / 2, 0, f"{share:.0%}", ha="center", va="center", fontsize=10, color="#ffffff")
        left += share
    axes.set_xlim(0, 1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, frameon=False, fontsize=9,
                labelcolor=theme.ink, handlelength=1.0, handleheight=1.0)  # fmt: skip
