"""The ResNet recipe's bench from JPEGs on disk, small and on a CPU: both fits' rows are there."""

from pathlib import Path

import pytest

from fasttrain.recipes.resnet50 import bench_imagenet


def test_whole_fits_are_timed_with_their_data_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(bench_imagenet, "usable_cores", lambda: 0)
    for name, value in (("IMAGES", 120), ("CLASSES", 4), ("DISTINCT", 5), ("SIZE", (80, 60)), ("WARM_UP", 1)):
        monkeypatch.setattr(bench_imagenet, name, value)
    monkeypatch.delitem(bench_imagenet.VARIANTS, "eager")
    rows = list(bench_imagenet.imagenet_rows(4, steps=10, preset="small", image_size=32))
    found = {(row.variant, row.metric): row for row in rows}
    assert {case.name for case in bench_imagenet.cases()} == {"imagenet_224", "imagenet_224_b64"}
    for variant in ("plain", "full"):
        assert found[variant, "images_per_second"].value > 0
        assert found[variant, "images_per_second"].repeats == 10
        assert 0 < found[variant, "data_wait_percent"].value < 100
    assert found["full", "loader_images_per_second"].value > found["full", "images_per_second"].value
