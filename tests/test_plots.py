import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fasttrain.errors import ConfigError, DataError
from fasttrain.plots import (
    comparison_figure,
    loss_figure,
    score_figure,
    score_names,
    smoothed,
    throughput_figure,
    write_plots,
)
from fasttrain.run_summary import RunSummary, load_run

RESULT = """{"recipe": "retinanet", "status": "reached_target", "quality": {"name": "map", "value": 0.41, "best": 0.41},
 "target": {"name": "map", "value": 0.4, "mode": "max"}, "reached": true, "seconds": 260, "samples_per_second": 150,
 "reached_at": {"step": 1200, "epoch": 3, "seconds": 240, "samples": 19200},
 "breakdown_seconds": {"data_wait": 10, "host_to_device": 0, "step": 80, "evaluation": 10}}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = ["step,epoch,seconds,name,value"]
    for step in range(1, 1201):
        loss = 0.5 + math.exp(-step / 300)
        lines += [f"{step},0,{step / 5},train_loss,{loss}", f"{step},0,{step / 5},box_loss,{loss / 3}"]
        if step % 300 == 0:
            lines += [f"{step},0,{step / 5},map,{0.0003 * step + 0.05}", f"{step},0,{step / 5},map_50,0.6"]
            lines += [f"{step},0,{step / 5},samples_per_second,160", f"{step},0,{step / 5},grad_norm,3"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "result.json").write_text(RESULT)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunSummary:
    return load_run(folder)


def legend(figure: Figure, axes: int = 0) -> list[str]:
    box = figure.axes[axes].get_legend()
    assert box is not None
    return [text.get_text() for text in box.get_texts()]


def words(figure: Figure, axes: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[axes].texts]


def test_the_three_plots_are_written_large_enough_to_read(folder: Path) -> None:
    paths = write_plots(folder)
    assert [path.relative_to(folder).as_posix() for path in paths] == [
        "plots/loss.png", "plots/score.png", "plots/throughput.png"
    ]  # fmt: skip
    for path in paths:
        with Image.open(path) as picture:
            assert picture.width == 1200
            assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


def test_plots_leave_pyplot_alone(folder: Path) -> None:
    import matplotlib.pyplot

    write_plots(folder)
    assert matplotlib.pyplot.get_fignums() == []


def test_losses_are_drawn_smoothed_over_their_raw_values_with_the_total_first(run: RunSummary) -> None:
    figure = loss_figure(run)
    axes = figure.axes[0]
    assert legend(figure) == ["train_loss", "box_loss"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    faint, clear = axes.get_lines()[:2]
    assert faint.get_alpha() == 0.25
    assert faint.get_color() == clear.get_color()
    assert len(np.asarray(clear.get_xdata())) == 500
    # The mean of the thinned curve is that of all 1,200 values.
    assert np.mean(np.asarray(faint.get_ydata())) == pytest.approx(np.mean(run.curves["train_loss"].values), rel=1e-3)


def test_scores_show_target_and_the_point_where_it_was_reached(run: RunSummary) -> None:
    figure = score_figure(run)
    assert legend(figure) == ["map", "map_50", "target 0.4", "reached after 4 min 00 s"]
    assert figure.axes[0].get_xlabel() == "wall time (min)"
    star = figure.axes[0].get_lines()[-1]
    assert np.asarray(star.get_xydata()) == pytest.approx(np.array([[4.0, 0.41]]))


def test_scores_that_coco_leaves_undefined_are_not_drawn(folder: Path) -> None:
    with (folder / "metrics.csv").open("a") as file:
        file.write("".join(f"{step},0,{step / 5},map_small,-1.0\n" for step in (300, 600)))
    figure = score_figure(load_run(folder))
    assert "map_small" not in legend(figure)
    assert figure.axes[0].get_ylim()[0] > 0


def test_throughput_stands_over_a_bar_that_fills_its_width(run: RunSummary) -> None:
    figure = throughput_figure(run)
    assert legend(figure) == ["while training", "average, 150/s"]
    bars = figure.axes[1].patches
    assert legend(figure, 1) == ["data wait 10.0 s", "host to device 0 s", "step 1 min 20 s", "evaluation 10.0 s"]
    assert words(figure, 1) == ["10%", "80%", "10%"]
    assert sum(bar.get_extents().width for bar in bars) == pytest.approx(figure.axes[1].get_window_extent().width)
    assert len(throughput_figure(run, with_breakdown=False).axes) == 1


def test_runs_are_compared_on_one_plot(run: RunSummary, folder: Path) -> None:
    figure = comparison_figure([run, run])
    assert legend(figure) == [folder.name, folder.name, "target 0.4"]
    assert figure.axes[0].get_ylabel() == "map"


def test_without_values_the_plots_say_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: x\n")
    run = load_run(tmp_path)
    assert words(loss_figure(run)) == ["no loss was logged"]
    assert words(score_figure(run)) == ["no score was logged"]
    assert words(throughput_figure(run)) == ["no throughput was logged"]
    assert words(throughput_figure(run), 1) == ["where the time went is unknown"]
    assert words(comparison_figure([run])) == ["no score was logged"]
    assert len(write_plots(tmp_path)) == 3


def test_scores_are_guessed_when_no_target_names_them(folder: Path) -> None:
    (folder / "result.json").unlink()
    assert score_names(load_run(folder)) == ["map", "map_50"]


def test_a_diverged_loss_is_drawn_as_far_as_it_goes(folder: Path) -> None:
    with (folder / "metrics.csv").open("a") as file:
        file.write("".join(f"{step},0,{step / 5},train_loss,nan\n" for step in range(1201, 1401)))
    line = next(line for line in loss_figure(load_run(folder)).axes[0].get_lines() if line.get_label() == "train_loss")
    drawn = np.asarray(line.get_ydata())
    assert np.isfinite(drawn[:400]).all()
    assert np.isnan(drawn[-50:]).all()


def test_smoothing_keeps_a_constant_and_its_gaps() -> None:
    values = np.full(200, 3.0)
    values[50] = np.nan
    drawn = smoothed(values)
    assert np.isnan(drawn[50])
    assert np.delete(drawn, 50) == pytest.approx(3.0)
    few = np.arange(5.0)
    assert smoothed(few) is few


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / "plots").write_text("a file in the way")
    with pytest.raises(DataError) as caught:
        write_plots(folder)
    assert str(caught.value) == (
        f"The plots can't be written to '{folder / 'plots'}' (File exists); the run's numbers are whole."
    )


def test_plots_of_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        write_plots(tmp_path)
