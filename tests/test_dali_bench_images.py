"""Pictures for measuring loaders: the same for everyone, kept, and as hard to decode as photographs."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fasttrain.callbacks.dali_loader.bench_images import photo_like, photo_like_classes, photo_like_jpegs


def test_pictures_are_kept_and_more_of_them_keep_the_first_ones(tmp_path: Path) -> None:
    first = photo_like_jpegs(tmp_path, 3, (160, 120))
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in first]
    more = photo_like_jpegs(tmp_path, 20, (160, 120))
    assert more[:3] == first
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in first] == before
    assert len({path.read_bytes() for path in more}) == 20
    assert all(Image.open(path).size == (160, 120) for path in more)
    assert sorted(more[0].parent.iterdir()) == more, "nothing else lies there"


def test_a_picture_is_a_function_of_its_number(tmp_path: Path) -> None:
    alone = photo_like_jpegs(tmp_path / "alone", 2, (160, 120))
    together = photo_like_jpegs(tmp_path / "together", 40, (160, 120))
    assert [path.read_bytes() for path in alone] == [path.read_bytes() for path in together[:2]]
    assert photo_like_jpegs(tmp_path / "alone", 2, (160, 120), quality=50)[0] != alone[0]


def test_files_have_a_photographs_size_and_spectrum(tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in photo_like_jpegs(tmp_path, 8, (500, 375))]
    assert 80_000 < np.mean(sizes) < 120_000
    grey = photo_like(0, (512, 512)).mean(axis=2)
    power = np.abs(np.fft.rfft2(grey - grey.mean())) ** 2
    frequency = np.hypot(np.fft.fftfreq(512)[:, None], np.fft.rfftfreq(512)[None])
    bands = [power[(frequency > low) & (frequency <= 2 * low)].mean() for low in (1 / 128, 1 / 64, 1 / 32, 1 / 16)]
    assert all(2 < coarse / fine < 12 for coarse, fine in pairwise(bands)), "falls as 1 / f^2"


def test_a_set_of_classes_is_linked_once(tmp_path: Path) -> None:
    place = photo_like_classes(tmp_path, 10, 4, 3, (160, 120))
    assert photo_like_classes(tmp_path, 10, 4, 3, (160, 120)) == place
    files = sorted(place.rglob("*.jpg"))
    assert [str(path.relative_to(place)) for path in files[:3]] == [f"0000/{number:07d}.jpg" for number in (0, 4, 8)]
    assert len(files) == 10
    assert len({path.read_bytes() for path in files}) == 3


def test_classification_is_measured_from_every_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.dali")
    from fasttrain.callbacks.dali_loader import bench

    for name, value in (("CLASS_SIZE", (160, 120)), ("CLASS_FILES", 3), ("CLASS_BATCH", 4)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "_pictures", lambda: tmp_path)
    monkeypatch.setattr(bench, "classification_set", partial(bench.classification_set, 1000))
    config = bench.DALIConfig(num_threads=1, read_threads=1)
    rows = list(bench.classification(config, warm_up=1, window=1, windows=2))
    assert [row.variant for row in rows] == ["torch", "ours"]
    assert {(row.case, row.metric, row.repeats) for row in rows} == {("classification_224", "images_per_second", 2)}
    assert all(row.value > 0 for row in rows)
