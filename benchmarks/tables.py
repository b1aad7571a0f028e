"""Writes the measured tables of the documents from the rows in `results/`, so that no figure is typed.

    python benchmarks/tables.py            # every README of the tree

A document says where a table goes and what is in it; what stands between the two comments is replaced:

    <!-- rows focal_loss fwd_bwd_ms; mlperf_b16 = fp16, mlperf_b16_bf16 = bf16; eager, ours_graph = ours, floor -->
    <!-- end of rows -->

subject and metric; cases and variants, each with the name it goes by in the table where that is another. And the table
of an ablation, by subject and case:

    <!-- ablation retinanet ablation_b16 -->
    <!-- end of ablation -->

Several metrics of one case and variant, such as the parts of a step, stand below one another:

    <!-- parts retinanet openimages_800_b32_roofline full; step_ms = the step, convolutions_ms = convolutions -->
    <!-- end of rows -->
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fasttrain.ablation import RATE
from fasttrain.ablation_table import FOOTNOTE, HEADER, cells_of, lines_of, reasons_of
from fasttrain.measure import Row, read_rows

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(<!-- rows (?P<what>[^;\n]+);(?P<cases>[^;\n]+);(?P<variants>[^;\n]+) -->\n).*?(<!-- end of rows -->)", re.DOTALL
)
ABLATION = re.compile(r"(<!-- ablation (?P<subject>\S+) (?P<case>\S+) -->\n).*?(<!-- end of ablation -->)", re.DOTALL)
PARTS = re.compile(r"(<!-- parts (?P<what>[^;\n]+);(?P<metrics>[^;\n]+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
BOUNDS = ("floor", "copy", "dali_reader")
"""Variants that compute less than was asked for: nothing is compared with them."""
MISSING = "not measured"


def documents() -> list[Path]:
    """Return the documents that may hold tables."""
    return sorted([ROOT / "README.md", *ROOT.glob("callbacks/*/README.md"), *ROOT.glob("recipes/*/README.md")])


def with_tables(text: str) -> str:
    """Return a document's text with its tables as the rows say."""

    def replaced(block: re.Match[str]) -> str:
        subject, metric = block["what"].split()
        rows = [row for row in _rows(subject) if row.metric == metric]
        return block[1] + "\n".join(_table(rows, _names(block["cases"]), _names(block["variants"]))) + "\n" + block[5]

    def ablated(block: re.Match[str]) -> str:
        rows = [row for row in _rows(block["subject"]) if row.case == block["case"]]
        return block[1] + "\n".join(_ablation(rows, block["case"])) + "\n" + block[4]

    def parts(block: re.Match[str]) -> str:
        subject, case, variant = block["what"].split()
        rows = {row.metric: row for row in _rows(subject) if (row.case, row.variant) == (case, variant)}
        return block[1] + "\n".join(_parts(rows, _names(block["metrics"]))) + "\n" + block[4]

    return PARTS.sub(parts, ABLATION.sub(ablated, BLOCK.sub(replaced, text)))


def _rows(subject: str) -> list[Row]:
    path = ROOT / "benchmarks" / "results" / f"{subject}.csv"
    return read_rows(path) if path.exists() else []


def _ablation(rows: Sequence[Row], case: str) -> list[str]:
    if not rows:
        return [MISSING.capitalize() + "."]
    cells = cells_of(rows, case)
    rates = [row for (_, metric), row in cells.items() if metric == RATE]
    return [
        "| " + " | ".join(HEADER) + " |",
        "|---" * len(HEADER) + "|",
        *("| " + " | ".join(line) + " |" for line in lines_of(cells)),
        "",
        " ".join([FOOTNOTE, *(f"{reason.rstrip('.')}." for reason in reasons_of(cells)), *_captions(rates)]),
    ]


def _parts(rows: dict[str, Row], metrics: dict[str, str]) -> list[str]:
    """Return a line for each metric, in the order asked for."""
    found = [rows[metric] for metric in metrics if metric in rows]
    texts = {row.metric: f"{_figure(row.value)} {row.unit}".strip() for row in found}
    lines = [f"| {label} | {texts.get(metric, MISSING)} |" for metric, label in metrics.items()]
    return ["| | |", "|---|---|", *lines, "", *_captions([row for row in found if row.value])]


def _names(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {key.strip(): (label or key).strip() for key, _, label in pairs}


def _table(rows: Sequence[Row], cases: dict[str, str], variants: dict[str, str]) -> list[str]:
    cells = {(row.case, row.variant): row for row in rows if row.case in cases and row.variant in variants}
    units = {"" if row.unit == "1" else row.unit for row in cells.values()}
    lines = [
        f"| {' or '.join(sorted(units))} | " + " | ".join(variants.values()) + " |",
        "|---" * (len(variants) + 1) + "|",
    ]
    for case, label in cases.items():
        of_case = {variant: cells.get((case, variant)) for variant in variants}
        lines.append(
            f"| {label} | " + " | ".join(_cell(row, list(of_case.values())) for row in of_case.values()) + " |"
        )
    return [*lines, "", *_captions(list(cells.values()))]


def _cell(row: Row | None, of_case: Sequence[Row | None]) -> str:
    if row is None:
        return MISSING
    timed = [other.value for other in of_case if other is not None and other.variant not in BOUNDS]
    best = max(timed) if row.unit.endswith("/s") else min(timed)
    text = _figure(row.value)
    if row.unit in ("", "1"):  # a score or a share, of which nobody here knows whether more is better
        return text
    return f"**{text}**" if row.value == best and row.variant not in BOUNDS else text


def _figure(value: float) -> str:
    """Return four digits of it, as people write numbers."""
    if value >= 10_000:
        return f"{value:.0f}"
    return f"{value:.4g}" if value >= 1e-3 or not value else f"{value:.6f}".rstrip("0")


def _captions(rows: Sequence[Row]) -> list[str]:
    """One sentence for each machine and commit that rows come from: compared is what stands in one line."""
    captions = []
    for gpu, cpu, torch, cudnn, date, commit in dict.fromkeys(
        (row.gpu, row.cpu, row.torch, row.cudnn, row.date, row.commit) for row in rows
    ):
        of_run = [row for row in rows if (row.date, row.commit, row.cpu) == (date, commit, cpu)]
        measured = [row for row in of_run if row.variant not in BOUNDS] or of_run
        spread = max(max(row.p90 - row.value, row.value - row.p10) / row.value for row in measured)
        repeats = sorted({row.repeats for row in measured})
        cores = cpu.split(", ")[1] if ", " in cpu else cpu
        versions = f"torch {torch}" + (f", cuDNN {int(cudnn) // 10000}.{int(cudnn) % 10000 // 100}" if cudnn else "")
        captions.append(
            f"{_spread(repeats, spread)} {gpu or cpu.split(', ')[0]}, {cores}, {versions}, {date}, commit {commit}."
        )
    return captions


def _spread(repeats: Sequence[int], spread: float) -> str:
    if list(repeats) == [1]:
        return "One measurement each."
    return f"Medians of {' or '.join(map(str, repeats))}; 10th and 90th percentiles within {spread:.0%} of them."


if __name__ == "__main__":
    for document in documents():
        before = document.read_text()
        if (after := with_tables(before)) != before:
            document.write_text(after)
            sys.stdout.write(f"{document.relative_to(ROOT)}\n")
