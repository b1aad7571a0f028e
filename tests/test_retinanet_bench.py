"""RetinaNet's bench cases on fits, in miniature: each variant trains, and its rows say what they should."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fasttrain.callbacks.dali_loader.bench_annotations import detection_files
from fasttrain.callbacks.dali_loader.bench_images import photo_like_jpegs
from fasttrain.fit_windows import data_wait_fraction, samples_per_second
from fasttrain.kernel_times import Kernel
from fasttrain.measure import Row
from fasttrain.recipes.retinanet import bench, bench_fit, bench_target
from fasttrain.recipes.retinanet.bench_fit import Steps, Work
from fasttrain.recipes.retinanet.bench_roofline import KINDS, convolution_work, roofline_rows
from fasttrain.recipes.retinanet.bench_run import Order, Report, train
from fasttrain.recipes.retinanet.bench_target import in_its_own_process, target_rows
from fasttrain.recipes.retinanet.bench_txl import OPTIMIZER, fit_once, overrides_for
from fasttrain.recipes.retinanet.bench_weights import normalised, random_backbone
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining
from fasttrain.step_clock import StepTime

ON_A_CPU = (
    "preset=small", "trainer.accelerator=cpu", "trainer.log_every_n_steps=2", "data.num_workers=0", "data.cache=none",
    "optimizations.channels_last=false", "optimizations.dali_loader=false",
)  # fmt: skip
SMALL = RetinaNetConfig(5, image_size=(64, 64), norm="frozen", trainable_layers=3)
TINY = Work(batch_size=2, image_size=(64, 64), width=64, height=48, files=4, classes=5, overrides=ON_A_CPU)


def found(rows: Iterator[Row]) -> dict[tuple[str, str], Row]:
    return {(row.variant, row.metric): row for row in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set of the layout of TXL-PBC's."""
    pictures = photo_like_jpegs(tmp_path / "pictures", 4, (64, 48), 75)
    for split, images in (("train", 22), ("test", 2)):
        annotations = detection_files(pictures, 48, 64, images, 3)
        shutil.move(annotations, annotations.with_name(f"instances_{split}.json"))
    return pictures[0].parent


def test_the_recipes_cases() -> None:
    names = [case.name for case in bench.cases()]
    assert {"openimages_800_b32", "txl_pbc_ttt", "txl_pbc_loaders", "txl_pbc_evaluated"} <= set(names)
    assert len(set(names)) == len(names)
    options = {case.name: case.options for case in bench.cases()}
    assert options["openimages_800_b32"]["variants"] == "full plain"
    assert options["txl_pbc_ttt"]["seeds"] == "0 1 2"


def test_rates_and_waits_of_windows() -> None:
    steps = [StepTime(0.5, 0.1, 0.0), StepTime(1.5, 0.0, 0.0), StepTime(1.0, 0.5, 0.0), StepTime(1.0, 0.5, 0.0)]
    windows = [steps[:2], steps[2:]]
    assert samples_per_second(windows, 8) == [8.0, 8.0]
    assert data_wait_fraction(windows) == [0.05, 0.5]


def test_a_fit_with_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "weights", lambda self: "null")  # the small preset's backbone is another
    rows = found(bench_fit.full(TINY, Steps(2, 5, 2)))
    rate = rows["full", "images_per_second"]
    assert (rate.case, rate.repeats, rate.unit) == ("openimages_800_b32", 2, "images/s")
    assert 0 < rate.p10 <= rate.value <= rate.p90
    assert "fasttrain fit, async_scoring" in rate.note, "what acted is beside the figure"
    assert 0 <= rows["full", "data_wait_fraction"].value < 1


def test_plain_lightning_on_the_same_images() -> None:
    rows = found(bench_fit.plain(TINY, Steps(1, 2, 1), "32-true", "cpu", workers=0))
    assert rows["plain", "images_per_second"].repeats == 2
    assert "0 worker processes" in rows["plain", "images_per_second"].note


def test_the_backbones_statistics_are_those_of_its_maps(tmp_path: Path) -> None:
    pictures = photo_like_jpegs(tmp_path, 4, (64, 48), 75)
    network = random_backbone(pictures, 64)
    spreads = []
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda module, _, output: spreads.append(float(output.std())))
    with torch.no_grad():
        network(normalised(pictures, 64))
    assert len(spreads) == 53
    assert all(0.8 < spread < 1.2 for spread in spreads)
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    model = RetinaNet(RetinaNetConfig(num_classes=3, image_size=(64, 64), weights=str(tmp_path / "weights.pt")))
    frozen = [name for name, parameter in model.backbone.body.named_parameters() if not parameter.requires_grad]
    assert {name.split(".")[0] for name in frozen} == {"conv1", "layer1"}


def traced() -> list[Kernel]:
    """Three replays of 100 microseconds each, of which the last has no end."""
    kernels = []
    for launch, begin in ((1, 0.0), (2, 100.0), (3, 200.0)):
        kernels += [Kernel("sm90_xmma_fprop", begin + i, begin + i + 1, launch) for i in range(60)]
        kernels += [Kernel("focal_loss_kernel", begin + 60, begin + 80, launch)]
        kernels += [Kernel("void dali::Resample", begin + 50, begin + 85, 10 + launch)]
    return sorted(kernels, key=lambda kernel: kernel.begin)


def test_the_roofline_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.metric: row for row in roofline_rows("case", "full", traced(), SMALL, 2, "a note")}
    values = {metric: row.value for metric, row in rows.items()}
    assert values["step_ms"] == pytest.approx(0.1)
    assert values["convolutions_ms"] == pytest.approx(0.06)
    assert values["loss_ms"] == pytest.approx(0.02)
    assert (values["data_ms"], values["data_beside_ms"]) == pytest.approx((0.005, 0.035))
    parts = [values[f"{kind}_ms"] for kind in (*KINDS, "other", "gap")]
    assert sum(parts) == pytest.approx(values["step_ms"])
    assert {row.case for row in rows.values()} == {"case_roofline"}
    assert rows["gap_ms"].note == "2 replays traced; a note"
    assert "focal_loss_kernel" in capsys.readouterr().out
    assert list(roofline_rows("case", "full", [], SMALL, 2, "")) == [], "no trace, no rows"


def test_the_convolutions_work_is_that_of_a_counted_step() -> None:
    # FlopCounterMode counts the weight gradient of a grouped convolution as if it had one group.
    config = RetinaNetConfig(5, "resnet50", (64, 64), norm="frozen", trainable_layers=3)
    with torch.device("meta"):
        model, images = RetinaNet(config), torch.empty(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        levels = model.forward_levels(images)
        torch.stack([part.sum() for level in levels for part in level]).sum().backward()
    flop, floor_ms = convolution_work(config, 2)
    assert flop == counter.get_total_flops()
    assert floor_ms > 0


def order(folder: Path, variant: str, target: float, **options: object) -> Order:
    overrides = [
        *overrides_for(folder, 0, (64, 64)), "target.stop=true", f"target.value={target}", "trainer.max_epochs=2",
        "trainer.check_val_every_n_epoch=1", "optimizations.async_scoring={}", "data.batch_size=2", *ON_A_CPU,
    ]  # fmt: skip
    given = {"epochs": 2, "every": 1, "batch_size": 2, "workers": 0, "image_size": (64, 64), "accelerator": "cpu"}
    return Order(
        variant, str(folder), 0, target=target, begun=time.time(), optimizer=asdict(OPTIMIZER), overrides=overrides,
        **{**given, **options},  # type: ignore[arg-type]
    )  # fmt: skip


def test_ours_to_a_target_that_is_reached_and_to_one_that_is_not(folder: Path) -> None:
    missed = train(order(folder, "full", 0.99))
    assert missed.seconds_to_target is None
    assert len(missed.scores) == 2
    assert 0 < missed.startup_seconds < missed.seconds
    assert missed.details["steps"] == 22
    reached = train(order(folder, "full", -1.0))
    assert reached.seconds_to_target is not None
    assert reached.startup_seconds < reached.seconds_to_target <= reached.seconds
    assert reached.details["steps"] < 22, "it stopped there"


def test_plain_lightning_to_a_target(folder: Path) -> None:
    report = train(order(folder, "plain", -1.0, epochs=1, batch_size=11))
    assert len(report.scores) == 1
    assert report.seconds_to_target is not None
    assert report.details["steps"] == 2
    assert 0 < report.startup_seconds <= report.seconds_to_target <= report.seconds


def test_rows_to_a_target_count_who_reached_it() -> None:
    runs = [
        Report(10.0, 30.0, 31.0, [0.5, 0.71], {"imports": 4.0, "step": 9.0, "steps": 100}),
        Report(12.0, None, 50.0, [0.6], {"imports": 6.0, "step": 11.0, "steps": 120}),
    ]
    rows = {row.metric: row for row in target_rows("full", runs, "0 1", 12, 1, 0.7)}
    assert (rows["seconds_to_target"].value, rows["seconds_to_target"].repeats) == (30.0, 1)
    assert "reached by 1 of 2, seeds 0 1, last scores 0.7100 0.6000" in rows["seconds_to_target"].note
    assert (rows["startup_seconds"].value, rows["startup_seconds"].repeats) == (11.0, 2)
    assert rows["startup_seconds"].note.endswith("10.0 12.0")
    assert rows["seconds"].note.startswith("imports 5.00, step 10.00; ")
    nobody = [row.metric for row in target_rows("full", runs[1:], "1", 12, 1, 0.7)]
    assert nobody == ["startup_seconds", "seconds"], "no seconds are made up"


def test_a_process_that_fails_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "python.sh"
    script.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RuntimeError, match=r"^the run of full, seed 0, failed: no memory\n$"):
        in_its_own_process(order(folder, "full", 0.5))
    answer = asdict(Report(1.0, 2.0, 3.0, [0.5], {"steps": 7}))
    script.write_text(f"#!/bin/sh\necho something else\necho '{json.dumps(answer)}'\n")
    assert in_its_own_process(order(folder, "full", 0.5)) == Report(1.0, 2.0, 3.0, [0.5], {"steps": 7})


def test_each_seed_is_a_process_with_its_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = folder / "orders"
    answer = json.dumps(asdict(Report(1.0, 2.0, 3.0, [0.5], {"steps": 7})))
    script = folder / "python.sh"
    script.write_text(f"#!/bin/sh\necho \"$3\" >> {orders}\necho '{answer}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("FASTTRAIN_TXL_PBC", str(folder))
    rows = list(bench_target.to_target(seeds="3 5", epochs=4, every=2, target=0.4, more="trainer.benchmark=false"))
    assert [(row.variant, row.metric, row.repeats) for row in rows[:1]] == [("full", "seconds_to_target", 2)]
    given = [json.loads(line) for line in orders.read_text().splitlines()]
    assert [(order["variant"], order["seed"]) for order in given] == [(v, s) for v in ("full", "plain") for s in (3, 5)]
    for order in given:
        assert Order(**order).optimizer == {**asdict(OPTIMIZER), "betas": list(OPTIMIZER.betas)}
        wanted = {"target.stop=true", "target.value=0.4", "trainer.max_epochs=4", "trainer.check_val_every_n_epoch=2"}
        assert wanted <= set(order["overrides"])
        assert order["overrides"][-1] == "trainer.benchmark=false", "what is given last counts"


def test_both_loaders_cases_train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.dali")
    monkeypatch.setenv("FASTTRAIN_TXL_PBC", str(folder))
    monkeypatch.setattr(bench_target, "DALI", "data.loader=dali")  # without a GPU the optimization refuses
    more = " ".join([*ON_A_CPU[:-1], "data.image_size=[64,64]", "data.batch_size=8"])
    rows = found(bench_target.loaders(seeds="0", epochs=1, more=more))
    assert {variant for variant, _ in rows} == {"dali", "torch"}
    assert {metric for _, metric in rows} == {"map", "train_seconds"}


def test_each_kind_of_evaluation_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTRAIN_TXL_PBC", str(folder))
    more = " ".join([*ON_A_CPU, "data.image_size=[64,64]", "data.batch_size=8"])
    rows = found(bench.txl_pbc_evaluated(epochs=1, repeats=1, more=more))
    assert {variant for variant, _ in rows} == {"async_scoring", "blocking", "no_evaluation"}
    assert rows["no_evaluation", "evaluation_seconds"].value == 0
    assert rows["blocking", "evaluation_seconds"].value > 0
    assert rows["async_scoring", "evaluation_seconds"].value > 0


def test_a_run_that_was_stopped_gives_no_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = RetinaNetTraining.training_step

    def stopped(self: RetinaNetTraining, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(RetinaNetTraining, "training_step", stopped)
    overrides = [*overrides_for(folder, 0, (64, 64)), *ON_A_CPU, "data.batch_size=8", "trainer.max_epochs=1"]
    with pytest.raises(KeyboardInterrupt, match="measured"):
        fit_once([*overrides, "trainer.limit_val_batches=0", "target=null"])
