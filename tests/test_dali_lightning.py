"""DALI's loaders in a Trainer: epochs are counted as Lightning counts them, whatever cuts them short."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from encoded_pictures import CONFIG, NotesKeys, PictureData, loader, seen

pytest.importorskip("nvidia.dali")

from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.dali_loader import DALIConfig
from fasttrain.config import CheckpointConfig
from fasttrain.environment import Hardware
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.order import EpochOrder
from fasttrain.resume import ResumePoint

TRAIN, VAL, BATCH = 10, 5, 3
GPU = Hardware("gpu", "cuda:0", "a GPU", 2, (9, 0))


def epoch_of(epoch: int) -> list[list[tuple[int, int]]]:
    order = EpochOrder(TRAIN, shuffle=True, seed=1, even=True)
    return seen(loader(TRAIN, BATCH, order=order, drop_last=True), epoch)


@pytest.fixture(scope="module")
def epochs() -> list[list[list[tuple[int, int]]]]:
    return [epoch_of(epoch) for epoch in range(4)]


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
           "enable_model_summary": False, "default_root_dir": folder, **options},
    )  # fmt: skip


def fit(folder: Path, data: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[NotesKeys, pl.Trainer]:
    module, made = NotesKeys(), trainer(folder, **options)
    made.fit(module, datamodule=data or PictureData(TRAIN, VAL, BATCH), ckpt_path=ckpt_path)
    return module, made


Epochs = list[list[list[tuple[int, int]]]]


# vturrisi/solo-learn#346: two epochs of data in one of the Trainer's; Lightning#12956: epochs cut short or skipped.
def test_an_epoch_of_the_trainer_is_one_of_the_data(tmp_path: Path, epochs: Epochs) -> None:
    module, _ = fit(tmp_path, max_epochs=3, num_sanity_val_steps=2)
    assert module.seen["train"] == [batch for epoch in epochs[:3] for batch in epoch]
    assert all(trainers == datas for trainers, datas in module.data_epochs)
    assert [[index for _, index in batch] for batch in module.seen["sanity"]] == [[0, 1, 2], [3, 4]]
    assert [[index for _, index in batch] for batch in module.seen["val"]] == 3 * [[0, 1, 2], [3, 4]]
    assert module.validation_ends == 3


def test_limits_leave_the_next_epoch_whole(tmp_path: Path, epochs: Epochs) -> None:
    module, _ = fit(tmp_path, max_epochs=3, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=1)
    assert module.seen["train"] == [batch for epoch in epochs[:3] for batch in epoch[:2]]
    assert [[index for _, index in batch] for batch in module.seen["val"]] == 3 * [[0, 1, 2]]


def test_reloading_every_epoch_goes_on_with_the_next(tmp_path: Path, epochs: Epochs) -> None:
    data = PictureData(TRAIN, VAL, BATCH)
    module, _ = fit(tmp_path, data, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert module.seen["train"] == [batch for epoch in epochs[:3] for batch in epoch]
    assert all(each._open._pipeline is None for each in data.dali_loaders.values()), "closed at teardown"


def test_max_steps_in_the_middle_of_an_epoch(tmp_path: Path, epochs: Epochs) -> None:
    module, made = fit(tmp_path, max_steps=5)
    assert module.seen["train"] == epochs[0] + epochs[1][:2]
    assert made.global_step == 5


def test_validation_in_the_middle_of_an_epoch_takes_nothing_from_it(tmp_path: Path, epochs: Epochs) -> None:
    module, _ = fit(tmp_path, max_epochs=2, val_check_interval=1)
    assert module.seen["train"] == epochs[0] + epochs[1]
    assert len(module.seen["val"]) == 6 * 2


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_run_sees_what_an_unbroken_one_sees(tmp_path: Path, epochs: Epochs, stop: int) -> None:
    whole = [batch for epoch in epochs[:3] for batch in epoch]
    options: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 0}
    point = ResumePoint(tmp_path, CheckpointConfig())
    first, _ = fit(tmp_path, max_steps=stop, callbacks=[point], **options)
    second, _ = fit(
        tmp_path, max_epochs=3, callbacks=[ResumePoint(tmp_path, CheckpointConfig())], ckpt_path=point.path, **options
    )
    assert first.seen["train"] + second.seen["train"] == whole


def test_two_processes_share_each_epoch(tmp_path: Path) -> None:
    """NVIDIA/DALI#3229: the end of a validation skipped under DDP; #3828: shards."""
    script = Path(__file__).with_name("dali_two_processes.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        shares = [[tuple(key) for batch in one["train"] for key in batch if key[0] == epoch] for one in told]
        assert [len(share) for share in shares] == [6, 6], "of 13 samples, six each in batches of three"
        indices = [index for share in shares for _, index in share]
        assert len(set(indices)) == 12
    for one, expected in zip(told, ([0, 2, 4], [1, 3]), strict=True):
        assert [index for batch in one["val"] for _, index in batch] == 2 * expected, "neither padded nor short"
        assert one["validation_ends"] == 2
        assert all(trainers == datas for trainers, datas in one["data_epochs"])
    assert told[0]["weights"] == told[1]["weights"]


def test_nothing_is_left_when_a_fit_is_over(tmp_path: Path) -> None:
    data = PictureData(TRAIN, VAL, BATCH)
    pipelines = []

    class Watches(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            pipelines.extend(weakref.ref(each._open.pipeline) for each in data.dali_loaders.values())

    fit(tmp_path, data, max_epochs=2, callbacks=[Watches()])
    gc.collect()
    assert len(pipelines) == 2
    assert [pipeline() for pipeline in pipelines] == [None, None]


# ---- the plan's door ------------------------------------------------------------------------------------------------


def optimization(**values: Any) -> Any:
    return CATALOGUE["dali_loader"](DALIConfig(**values))


def test_it_applies_to_data_that_offers_it_and_says_which_loaders_were_made(tmp_path: Path, epochs: Epochs) -> None:
    one = optimization(num_threads=1, read_threads=2)
    context = Context(NotesKeys(), PictureData(TRAIN, VAL, BATCH, DALIConfig(prefetch=5)), GPU)
    verdict = one.check(context)
    assert isinstance(verdict, Applies)
    assert "cuda:0" in verdict.note
    attachment = one.attach(context)
    assert attachment.data is not context.data
    assert attachment.data.config == CONFIG
    assert not one.applied(), "nothing yet"
    module, _ = fit(tmp_path, attachment.data, max_epochs=1)  # the device is the strategy's: a CPU here
    assert module.seen["train"] == epochs[0]
    made = {change.path: change.count for change in one.applied()}
    assert made == {"data.train_dataloader": 3, "data.val_dataloader": 2}, "with their batches"


def test_the_plan_asks_for_queues_where_cuda_has_no_more_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def note() -> str:
        verdict = optimization().check(Context(NotesKeys(), PictureData(), GPU))
        assert isinstance(verdict, Applies)
        return verdict.note

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment" in note()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as some ways of sharding a model want it
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in note()


def test_on_a_cpu_it_refuses() -> None:
    verdict = optimization().check(Context(NotesKeys(), PictureData(), Hardware.cpu()))
    assert isinstance(verdict, Refuses)
    assert "data.loader=dali uses it all the same" in verdict.reason


def test_without_dali_it_refuses_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    verdict = optimization().check(Context(NotesKeys(), PictureData(), GPU))
    assert isinstance(verdict, Refuses)
    assert "pip install 'fasttrain[dali]'" in verdict.reason
