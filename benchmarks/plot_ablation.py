"""Draws what each optimization of a recipe gains, from the rows in `results/`: python benchmarks/plot_ablation.py

One picture for each recipe and case that `fasttrain bench ablate` has rows of, in docs/pictures.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fasttrain.ablation import ALL, FAILED, NONE, ONLY, RATE, REFUSED, WITHOUT
from fasttrain.ablation_table import Cells, cells_of, names_in
from fasttrain.measure import Row, read_rows
from fasttrain.plots import PAPER

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PICTURES = HERE.parent / "docs" / "pictures"


def main() -> None:
    """Write all pictures and say which."""
    for subject, case, cells in ablations(RESULTS):
        path = PICTURES / f"{subject}_{case}.png"
        figure_of(subject, cells).savefig(path, dpi=150, bbox_inches="tight")
        sys.stdout.write(f"{path.relative_to(HERE.parent)}\n")


def ablations(folder: Path) -> Iterator[tuple[str, str, Cells]]:
    """Yield subject, case and rows of each ablation whose plain run was measured."""
    for path in sorted(folder.glob("*.csv")):
        rows = read_rows(path)
        for case in dict.fromkeys(row.case for row in rows if row.case.startswith("ablation")):
            cells = cells_of(rows, case)
            if (NONE, RATE) in cells:
                yield path.stem, case, cells


def figure_of(subject: str, cells: Cells) -> Figure:
    """Return bars of each optimization's gain alone, and of what is lost where it alone is left out."""
    names = names_in(cells)
    none, everything = cells[NONE, RATE], cells.get((ALL, RATE))
    figure = Figure(figsize=(9, 1.2 + 0.34 * len(names)), layout="constrained")
    alone, left_out = figure.subplots(1, 2, sharey=True)
    _bars(alone, cells, names, ONLY, none, PAPER.color(0))
    alone.set_title("each alone: samples/s against nothing on", fontsize=10)
    _bars(left_out, cells, names, WITHOUT, everything, PAPER.color(1))
    left_out.set_title("each left out: samples/s against everything on", fontsize=10)
    alone.set_yticks(range(len(names)), names, fontsize=9)
    alone.set_ylim(len(names) - 0.4, -0.6)
    rates = f"{none.value:,.4g} samples/s" + (f" to {everything.value:,.4g}" if everything else "")
    figure.suptitle(f"{subject}: {rates}; {none.gpu or none.cpu}, torch {none.torch}, {none.date}; bars: p10 to p90",
                    fontsize=8, color=PAPER.muted, y=-0.02)  # fmt: skip
    return figure


def _bars(axes: Axes, cells: Cells, names: Sequence[str], prefix: str, against: Row | None, color: str) -> None:
    """Draw one bar a name, in percent; a word where there is nothing to draw."""
    for place, name in enumerate(names):
        row = cells.get((prefix + name, RATE))
        if row is None or against is None:
            axes.text(0, place, _word(cells, prefix + name), va="center", fontsize=8, color=PAPER.muted)
            continue
        gain, low, high = (100 * (value / against.value - 1) for value in (row.value, row.p10, row.p90))
        axes.barh(place, gain, 0.6, color=color, xerr=[[gain - low], [high - gain]], ecolor=PAPER.ink, capsize=2)
        axes.annotate(f"{gain:+.1f}%", (max(0.0, high), place), (4, 0), textcoords="offset points", va="center",
                      fontsize=8, color=PAPER.ink)  # fmt: skip
    axes.axvline(0, color=PAPER.ink, linewidth=0.8)
    axes.margins(x=0.22)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0f}%")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _word(cells: Cells, variant: str) -> str:
    words = {REFUSED: " does not apply", FAILED: " failed"}
    return next((word for metric, word in words.items() if (variant, metric) in cells), " not measured")


if __name__ == "__main__":
    main()
