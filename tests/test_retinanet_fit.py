"""The RetinaNet recipe through the whole flow, on the CPU, on small sets: what a user's first minutes are like."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fasttrain.callbacks import CATALOGUE
from fasttrain.errors import ConfigError, DataError, FasttrainError
from fasttrain.fit import Outcome, fit
from fasttrain.recipe import find_recipe, resolve
from fasttrain.recorder import RunRecorder
from fasttrain.validate import validate

TINY = [
    "data.generated.train_images=48",
    "data.generated.val_images=8",
    "data.batch_size=8",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "optimizations=none",
    "loggers=[]",
]


def run(run_dir: Path, *overrides: str, resume: Path | None = None) -> Outcome:
    recipe = resume / "config.yaml" if resume else find_recipe("retinanet")
    items = list(overrides) if resume else [*TINY, *overrides]
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    return fit(resolve(recipe, items), CATALOGUE, run_dir=None if resume else run_dir, resume=resume, console=console)


def metrics(folder: Path) -> list[list[str]]:
    """The rows of metrics.csv without wall seconds and throughput, which differ from run to run."""
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
    return [[row[0], row[1], *row[3:]] for row in rows if row[3] != "samples_per_second"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("finished") / "run")


def test_run_folder_is_complete(finished: Outcome) -> None:
    names = {str(path.relative_to(finished.folder)) for path in finished.folder.rglob("*") if path.is_file()}
    wanted = {"config.yaml", "environment.json", "plan.json", "metrics.csv", "result.json", "checkpoints/last.ckpt",
              "checkpoints/best.ckpt", "plots/loss.png", "plots/score.png", "plots/throughput.png",
              "samples/contact-sheet.png", "samples/detections-00.png"}  # fmt: skip
    assert wanted <= names
    result = json.loads((finished.folder / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["preset"] == "small"
    assert (result["samples"], result["steps"], result["epochs"]) == (96, 12, 2)
    parts = result["breakdown_seconds"]
    assert set(parts) == {"data_wait", "host_to_device", "step", "evaluation", "checkpoint", "start_up", "other"}
    assert sum(parts.values()) == pytest.approx(result["seconds"], abs=0.1)
    assert min(parts["step"], parts["evaluation"], parts["checkpoint"]) > 0


def test_stopped_in_mid_epoch_and_resumed(finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = RunRecorder.on_train_batch_end

    def interrupt_after_eight(self: RunRecorder, trainer: Any, *rest: Any) -> None:
        count(self, trainer, *rest)
        if trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunRecorder, "on_train_batch_end", interrupt_after_eight)
    parts = run(tmp_path / "parts")
    assert (parts.result["status"], parts.result["steps"]) == ("interrupted", 8)
    monkeypatch.undo()
    rest = run(tmp_path, resume=tmp_path / "parts")
    whole, again = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (finished.folder, rest.folder)
    )
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, again["state_dict"][name]), name
    assert metrics(finished.folder) == metrics(rest.folder)
    assert rest.result["samples"] == finished.result["samples"]
    assert rest.result["quality"] == finished.result["quality"]


def test_validate_gives_the_score_of_the_run(finished: Outcome) -> None:
    scores = validate(finished.folder / "checkpoints" / "last.ckpt", [], CATALOGUE, quiet=True)
    assert scores["map"] == finished.result["quality"]["value"]
    assert json.loads((finished.folder / "validation.json").read_text())["scores"] == scores


def test_config_runs_again_to_the_same_weights(finished: Outcome, tmp_path: Path) -> None:
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    again = fit(resolve(finished.folder / "config.yaml"), CATALOGUE, run_dir=tmp_path / "again", console=console)
    assert metrics(again.folder) == metrics(finished.folder)


def test_ctrl_c_keeps_a_checkpoint_and_prints_a_summary(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fasttrain", "fit", "retinanet", *TINY, "trainer.max_epochs=500",
               f"--run-dir={folder}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.csv").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopping after this step with a checkpoint" in output
    assert f"go on with: fasttrain fit --resume {folder}" in output
    assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    assert (folder / "checkpoints" / "last.ckpt").exists()


def coco(folder: Path, count: int = 24, **changes: Any) -> list[str]:
    """Write a small COCO folder, and return the overrides that use it for training and evaluation."""
    from PIL import Image

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    images, annotations = [], []
    for index in range(count):
        pixels = torch.randint(0, 255, (40, 60, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{index}.jpg")
        images.append({"id": index, "file_name": f"{index}.jpg", "width": 60, "height": 40})
        box = [5.0, 6.0, 20.0, 18.0]
        annotations.append({"id": index + 1, "image_id": index, "category_id": 7, "bbox": box, "area": 360.0,
                            "iscrowd": 0})  # fmt: skip
    content = {"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "thing"}], **changes}
    (folder / "boxes.json").write_text(json.dumps(content))
    return [f"data.{split}_{what}={path}" for split in ("train", "val")
            for what, path in (("images", folder), ("annotations", folder / "boxes.json"))]  # fmt: skip


def test_broken_image_stops_with_its_name_and_loses_nothing(tmp_path: Path) -> None:
    data = coco(tmp_path / "data")
    whole = (tmp_path / "data" / "20.jpg").read_bytes()
    (tmp_path / "data" / "20.jpg").write_bytes(whole[:200])
    with pytest.raises(DataError, match=r"20\.jpg"):
        run(tmp_path / "run", *data, "data.cache=none", "trainer.max_epochs=1")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "failed"
    assert "20.jpg" in result["error"]
    (tmp_path / "data" / "20.jpg").write_bytes(whole)
    assert run(tmp_path, resume=tmp_path / "run").result["status"] == "finished"


def test_broken_image_in_a_worker_process_is_the_same_sentence(tmp_path: Path) -> None:
    data = coco(tmp_path / "data")
    (tmp_path / "data" / "20.jpg").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        run(tmp_path / "run", *data, "data.cache=none", "data.num_workers=1")
    path = tmp_path / "data" / "20.jpg"
    assert str(caught.value) == f"'{path}' is empty (0 bytes); download or copy it again."


def test_broken_image_is_skipped_counted_and_reported(tmp_path: Path) -> None:
    data = coco(tmp_path / "data")
    (tmp_path / "data" / "20.jpg").write_bytes(b"")
    outcome = run(tmp_path / "run", *data, "data.on_bad_image=skip", "trainer.max_epochs=1")
    assert outcome.result["status"] == "finished"
    assert outcome.result["bad_samples"] == {
        "train: images that can't be used, the first of them '20.jpg'": 1,
        "val: images that can't be used, the first of them '20.jpg'": 1,
    }


def test_more_boxes_than_max_boxes(tmp_path: Path) -> None:
    many = [{"id": n, "image_id": 3, "category_id": 7, "bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0}
            for n in range(1, 31)]  # fmt: skip
    data = coco(tmp_path / "data", annotations=many)
    with pytest.raises(DataError, match=r"image '3\.jpg' has 30 boxes.*set data\.max_boxes=30\."):
        run(tmp_path / "run", *data)


def test_half_given_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_annotations is not set, but data\.train_images is: give all"):
        run(tmp_path / "run", "data.train_images=somewhere")


def test_batch_larger_than_the_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size is 64, but each of 1 process\(es\) has only 24 training"):
        run(tmp_path / "run", *coco(tmp_path / "data"), "data.batch_size=64")


def test_full_disk_while_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fasttrain.results.MetricsFile._append", full)
    with pytest.raises(FasttrainError, match="can't be written: the disk is full; make room or choose another"):
        run(tmp_path / "run")


def test_unreachable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="FASTTRAIN_CACHE"):
        run(tmp_path / "run", f"data.cache_folder={tmp_path / 'file' / 'cache'}")
