"""Draws the README's picture of the graph step from the rows in `results/`: python benchmarks/plot_graph_step.py"""

import re
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fasttrain.measure import Row, read_rows

HERE = Path(__file__).parent
ROWS = HERE / "results" / "cuda_graph_step.csv"
PICTURE = HERE.parent / "docs" / "pictures" / "graph_step.png"
NAMES = {
    "transformers_bert_base": "BERT-base (transformers)",
    "timm_efficientnet_b0": "EfficientNet-B0 (timm)",
    "torchvision_vit_b_16": "ViT-B/16 (torchvision)",
    "torchvision_resnet50": "ResNet-50 (torchvision)",
}


def main() -> None:
    """Write the picture: milliseconds a step over batch size, plain Lightning and the graph step, a panel a network."""
    rows = [row for row in read_rows(ROWS) if row.metric == "step_ms"]
    figure = Figure(figsize=(11, 2.9), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(NAMES), sharey=True)
    for panel, (network, name) in zip(panels, NAMES.items(), strict=True):
        draw(panel, rows, network)
        panel.set_title(name, fontsize=10)
    panels[0].set_ylabel("ms a training step")
    panels[0].legend(frameon=False, fontsize=8, loc="upper left")
    first = next(row for row in rows if row.case.startswith("torchvision"))
    figure.suptitle(f"bf16-mixed, random data, {first.gpu}, torch {first.torch}, {first.date}; bars: p10 to p90",
                    fontsize=8, color="0.35", y=-0.02)  # fmt: skip
    figure.savefig(PICTURE, bbox_inches="tight")


def draw(panel: Axes, rows: list[Row], network: str) -> None:
    """Draw one network's two lines."""
    lines: dict[str, list[tuple[int, Row]]] = defaultdict(list)
    for row in rows:
        found = re.fullmatch(rf"{network}_b(\d+)_bf16", row.case)
        if found:
            lines[row.variant].append((int(found[1]), row))
    for variant, label, color in (("plain", "plain Lightning", "0.55"), ("ours", "CUDAGraphStep", "#1b7837")):
        points = sorted(lines[variant], key=lambda point: point[0])
        sizes, values = [size for size, _ in points], [row.value for _, row in points]
        below = [row.value - row.p10 for _, row in points]
        above = [row.p90 - row.value for _, row in points]
        panel.errorbar(sizes, values, [below, above], marker="o", ms=4, lw=1.6, color=color, label=label)
    plains = dict(lines["plain"])
    for size, ours in lines["ours"]:
        plain = plains[size]
        panel.annotate(
            gain_text(plain.value / ours.value),
            (size, ours.value),
            (-7, 6),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color="#1b7837",
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    panel.set_ylim(0, 48)
    panel.set_xlim(0.6, 100)
    panel.set_xlabel("batch size")
    panel.spines[["top", "right"]].set_visible(False)


def gain_text(gain: float) -> str:
    """Return how many times faster, with as many digits as tell it from one."""
    return f"{gain:.1f}x" if gain >= 1.2 else f"{gain:.2f}x"


if __name__ == "__main__":
    main()
