"""Fixtures for all tests, and what must hold for the whole suite: no GPU where none is, few threads, no real cache."""

import logging
import os
import tarfile
from pathlib import Path

import pytest

# Said here as well as below: Lightning gives a process that trains alone all cores where the variable is not set, and
# processes forked from it later would wait for OpenMP threads that they don't have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Without a GPU Triton's kernels run in its interpreter, which is decided when a kernel's module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HERE = Path(__file__).parent
SHARED_DATA = HERE.parent.parent / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # The tests' tensors are small, and two threads on cores that others use too wait for each other most of the time.
    # Forked processes, besides, must not use their parent's OpenMP threads.
    torch.set_num_threads(1)
    # Autograd looks for devices at the first backward. What torch.compile loads counts as one, and autograd would then
    # make threads that forked processes lack: so the first backward is now.
    torch.ones(1, requires_grad=True).backward()


@pytest.fixture(autouse=True)
def _no_greetings() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "fasttrain-cache"))


@pytest.fixture
def foreign_project(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own Lightning project, on the import path as it is when fasttrain is started in its folder."""
    folder = HERE / "foreign_project"
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture(scope="session")
def txl_pbc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real blood-cell images with COCO annotations: images/{train,val,test}, instances_{train,val,test}.json."""
    return _unpacked("det_txl_pbc.tar", tmp_path_factory) / "txl_pbc"


@pytest.fixture(scope="session")
def dsb2018(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real nuclei with masks: images/*, instances_{train,val}.json, COCO with run lengths."""
    return _unpacked("seg_dsb2018_nuclei.tar", tmp_path_factory) / "dsb2018"


@pytest.fixture(scope="session")
def grocery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of groceries with a folder for each of 81 classes: train, val, test."""
    return _unpacked("cls_grocery160.tar", tmp_path_factory) / "grocery"


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values computed by others."""
    return _unpacked("golden_fixtures.tar.gz", tmp_path_factory) / "golden"


def _unpacked(name: str, factory: pytest.TempPathFactory) -> Path:
    archive = SHARED_DATA / name
    if not archive.exists():
        pytest.skip(f"{name} is not here")
    folder = factory.mktemp("data")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder
