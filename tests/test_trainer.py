"""Every reach into a Lightning internal, checked against what Lightning does: these fail when an internal changes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fasttrain import trainer as reach
from fasttrain.clock import PARTS, RunClock
from fasttrain.clock import _classify as part_of
from fasttrain.config import TrainerConfig
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Attachment
from fasttrain.order import EpochOrder, ResumableLoader


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.batches: dict[str, list[Any]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches["train"].append(batch)
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches["val"].append(batch)
        self.log("score", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(Logger):
    """Notes under which step each name is logged."""

    name, version = "steps", ""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, int | None]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.logged += [(name, step) for name in metrics if name != "epoch"]


def loader(count: int = 10) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(count, 2)), batch_size=2)


def run(
    *callbacks: pl.Callback, logger: Any = False, train: Any = None, val: Any = None, **options: Any
) -> tuple[pl.Trainer, Net]:
    module = Net()
    settings = {"max_epochs": 3, "log_every_n_steps": 1, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=logger, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    trainer.fit(module, loader() if train is None else train, loader(4) if val is None else val)
    return trainer, module


EPOCH_SETTINGS: list[dict[str, Any]] = [
    {},
    {"val_check_interval": 2},
    {"val_check_interval": 0.5},
    {"check_val_every_n_epoch": 2},
    {"check_val_every_n_epoch": None, "val_check_interval": 4},
    {"limit_val_batches": 0},
    {"limit_train_batches": 3},
    {"accumulate_grad_batches": 2},
    {"max_epochs": -1, "max_steps": 7},
]


@pytest.mark.parametrize("options", EPOCH_SETTINGS, ids=str)
def test_validation_is_due(options: dict[str, Any]) -> None:
    class Foresees(pl.Callback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.events.append("due" if reach.validation_is_due(trainer) else "not due")

        def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.events.append("validation")

    callback = Foresees()
    run(callback, **options)
    after = [*callback.events[1:], "end"]
    for event, following in zip(callback.events, after, strict=True):
        if event != "validation":
            assert (event == "due") == (following == "validation"), callback.events
    assert "not due" in callback.events


@pytest.mark.parametrize("options", EPOCH_SETTINGS, ids=str)
def test_accumulation_and_the_ends_of_epochs_and_fit(options: dict[str, Any]) -> None:
    class Watches(pl.Callback):
        def __init__(self) -> None:
            self.stepped: list[bool] = []
            self.accumulating: list[bool] = []
            self.ending: list[bool] = []
            self.complete: list[bool] = []
            self.before = 0

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.before = trainer.global_step

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.stepped.append(trainer.global_step > self.before)
            self.accumulating.append(reach.is_accumulating(trainer))

        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.complete.append(reach.epoch_is_complete(trainer))
            self.ending.append(reach.fit_is_ending(trainer))

    watch = Watches()
    run(watch, **options)
    assert watch.accumulating == [not stepped for stepped in watch.stepped]
    assert watch.ending == [False] * (len(watch.ending) - 1) + [True]
    stops_inside = "max_steps" in options
    assert watch.complete == [True] * (len(watch.complete) - stops_inside) + [False] * stops_inside


def test_a_stop_ends_the_fit_at_once_and_without_validation() -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                reach.stop_now(trainer)

        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.last = (reach.epoch_is_complete(trainer), reach.fit_is_ending(trainer))

    callback = Stops()
    trainer, module = run(callback)
    assert (trainer.global_step, len(module.batches["val"])) == (7, 2), "one validation, of the first epoch"
    assert callback.last == (False, True)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"log_every_n_steps": 3}], ids=str)
def test_logging_step_and_interval(options: dict[str, Any]) -> None:
    steps = Steps()

    class LogsToo(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if not reach.is_accumulating(trainer) and trainer.global_step % reach.logging_interval(trainer) == 0:
                steps.log_metrics({"ours": 0.0}, reach.logging_step(trainer))

    run(LogsToo(), logger=steps, **options)
    lightnings = [step for name, step in steps.logged if name == "loss"]
    ours = [step for name, step in steps.logged if name == "ours"]
    assert set(ours) == set(lightnings)
    assert len(set(lightnings)) > 2


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 3}], ids=str)
def test_optimizer_steps_per_epoch(options: dict[str, Any]) -> None:
    class Asks(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.asked = reach.optimizer_steps_per_epoch(self.trainer)
            return super().configure_optimizers()

    module = Asks()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader())
    assert module.asked * 2 == trainer.global_step


def test_is_between_batches_when_a_fetch_fails() -> None:
    class Breaks(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 6:
                raise OSError("broken")
            return super().__getitem__(index)

    class Watches(pl.Callback):
        def __init__(self) -> None:
            self.at_exception: bool | None = None
            self.inside: list[bool] = []

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.inside.append(reach.is_between_batches(trainer))

        def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
            self.at_exception = reach.is_between_batches(trainer)

    class FailsInStep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise OSError("out of memory")
            return super().training_step(batch, batch_idx)

    watch = Watches()
    with pytest.raises(OSError, match="broken"):
        run(watch, train=DataLoader(Breaks(torch.ones(10, 2)), batch_size=2))
    assert watch.at_exception is True
    assert watch.inside == [False] * 3
    watch = Watches()
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[watch], logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(OSError, match="out of memory"):
        trainer.fit(FailsInStep(), loader())
    assert watch.at_exception is False


class Keys(torch.utils.data.Dataset[Any]):
    def __getitem__(self, key: Any) -> Tensor:
        return torch.tensor([float(key.epoch), float(key.index)])


def test_a_loader_made_too_early_still_gets_its_position(tmp_path: Any) -> None:
    class Early(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch], batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            assert self.trainer.estimated_stepping_batches > 0  # makes the loaders
            return super().configure_optimizers()

    class Loads(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            reach.load_pending_loader_state(trainer)

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    def fit(max_steps: int, ckpt: str | None) -> Early:
        module = Early()
        trainer = pl.Trainer(
            accelerator="cpu", callbacks=[Loads()], logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, max_steps=max_steps,
        )  # fmt: skip
        data = ResumableLoader(Keys(), EpochOrder(10, shuffle=True, seed=0), batch_size=2)
        trainer.fit(module, data, ckpt_path=ckpt)
        return module

    whole = fit(8, None).batches["train"]
    first = whole[:3]
    rest = fit(8, str(tmp_path / "x.ckpt")).batches["train"]
    assert [b[0].tolist() for b in whole] == [b[0].tolist() for b in first + rest]


def test_transform_batches_in_training_and_validation() -> None:
    def add_one(batch: Any) -> Any:
        return [batch[0] + 1]

    def double(batch: Any) -> Any:
        return [batch[0] * 2]

    class Transforms(pl.Callback):
        def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            for transform in (add_one, double, add_one):
                reach.transform_batches(trainer, transform)

    trainer, module = run(Transforms(), max_epochs=1)
    for batch in module.batches["train"] + module.batches["val"]:
        assert torch.equal(batch[0], torch.full((2, 2), 4.0)), "in the order asked for, and each once"
    trainer.validate(module, loader(4), verbose=False)
    assert torch.equal(module.batches["val"][-1][0], torch.full((2, 2), 4.0)), "a second setup adds nothing"
    other, plain = run(max_epochs=1)
    assert other is not trainer
    assert torch.equal(plain.batches["train"][0][0], torch.ones(2, 2)), "no other Trainer is touched"


def test_exchanged_before_the_transfer_and_not_after_it_has_ended() -> None:
    order: list[str] = []

    def note(name: str) -> Any:
        def transform(batch: Any) -> Any:
            order.append(name)
            return batch

        return transform

    def layout(batch: Any) -> Any:
        return batch

    layout.changes_only_layout = True  # type: ignore[attr-defined]

    class Exchanges(pl.Callback):
        def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            assert reach.changes_only_layout(trainer)
            reach.transform_batches(trainer, layout)
            assert reach.changes_only_layout(trainer)
            assert reach.layout_transforms(trainer) == [layout]
            self.end = reach.exchange_batches(trainer, note("before"))
            assert not reach.changes_only_layout(trainer), "a batch may be another one by then"
            reach.transform_batches(trainer, note("after"))
            assert reach.layout_transforms(trainer) == [layout]

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                self.end()
                self.end()

    run(Exchanges(), max_epochs=1, max_steps=3, limit_val_batches=0)
    assert order == ["before", "after", "before", "after", "after"]


def test_without_an_end_a_fit_goes_on_past_its_limits() -> None:
    class GoesOn(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            reach.train_without_end(trainer)

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == 40

    for limits in ({"max_epochs": 1}, {"max_steps": 3}):
        trainer, _ = run(GoesOn(), **limits)
        assert trainer.global_step == 40


def test_lightning_marks_what_the_clock_listens_for(tmp_path: Any) -> None:
    heard: set[str] = set()

    class Listens(RunClock):
        def start(self, action_name: str) -> None:
            heard.add(action_name)
            super().start(action_name)

    class Saves(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    clock = Listens()
    run(Saves(), profiler=clock)
    parts = {part for name in heard if (part := part_of(name))}
    assert parts | {"evaluation"} == set(PARTS), "evaluation is marked by the recorder"
    assert all(clock.seconds[part] > 0 for part in parts)


def test_make_trainer_hands_on_values_and_keeps_lightnings_defaults() -> None:
    class First(pl.Callback): ...

    class Second(pl.Callback): ...

    config = TrainerConfig(accelerator="cpu", max_epochs=4, gradient_clip_val=0.5, limit_val_batches=2)
    attachments = [Attachment([First()]), Attachment(trainer_options={"precision": "bf16-mixed"})]
    trainer = reach.make_trainer(config, attachments, [Second()], [], enable_progress_bar=False)
    assert (trainer.max_epochs, trainer.gradient_clip_val, trainer.limit_val_batches) == (4, 0.5, 2)
    assert trainer.precision == "bf16-mixed", "an optimization's option wins over the configuration"
    assert trainer.limit_train_batches == 1.0
    kinds = [type(callback) for callback in trainer.callbacks]
    assert kinds.index(First) < kinds.index(Second)
    assert trainer.loggers == []
    assert trainer.checkpoint_callbacks == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"accelerator": "gpus"}, "invalid accelerator name"),
        ({"precision": "fp8"}, "Precision 'fp8' is invalid"),
        ({"strategy": "dpp"}, "invalid strategy name"),
        ({"max_time": "abc"}, "is not a valid duration"),
        ({"max_epochs": -5}, "`max_epochs` must be a non-negative integer or -1"),
        ({"devices": 3.5}, "`devices`"),
    ],
)
def test_values_that_lightning_refuses(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reach.make_trainer(TrainerConfig(**{"accelerator": "cpu", **values}), [], [], [])
    assert str(caught.value).startswith("trainer: Lightning refuses these values: ")
    assert said in str(caught.value)


def test_a_gpu_that_is_not_there() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(
        ConfigError, match=r"^trainer: Lightning refuses these values: No supported gpu backend found!$"
    ):
        reach.make_trainer(TrainerConfig(accelerator="gpu"), [], [], [])


def test_options_of_two_optimizations() -> None:
    plugins = [Attachment(trainer_options={"plugins": ["a"]}), Attachment(trainer_options={"plugins": ["b"]})]
    assert reach._joint_options(plugins) == {"plugins": ["a", "b"]}
    same = [Attachment(trainer_options={"precision": "16-mixed"})] * 2
    assert reach._joint_options(same) == {"precision": "16-mixed"}
    with pytest.raises(OptimizationError) as caught:
        reach._joint_options([*same, Attachment(trainer_options={"precision": "bf16-mixed"})])
    assert str(caught.value) == (
        "two optimizations set the Trainer's 'precision', to '16-mixed' and 'bf16-mixed'; leave one out."
    )


def test_loggers(tmp_path: Any) -> None:
    own = {"class": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path), "name": "mine"}
    board, plain, third = reach.make_loggers(["tensorboard", "csv", own], str(tmp_path))
    assert isinstance(board, TensorBoardLogger)
    assert board.log_dir == str(tmp_path / "tensorboard")
    assert isinstance(plain, CSVLogger)
    assert isinstance(third, CSVLogger)
    assert third.name == "mine"


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (
            "wandb",
            "loggers: 'wandb' is unknown; use tensorboard, csv, or a mapping with the class of a Lightning logger, for "
            "instance {class: lightning.pytorch.loggers.WandbLogger, project: mine}.",
        ),
        (
            {"class": "lightning.pytorch.loggers.CSVLoger"},
            "loggers: 'lightning.pytorch.loggers' has no class 'CSVLoger'; did you mean 'CSVLogger'?",
        ),
        (
            {"class": "lightning.pytorch.loggers.CSVLogger", "folder": "x"},
            "loggers: lightning.pytorch.loggers.CSVLogger: CSVLogger.__init__() got an unexpected keyword argument "
            "'folder'.",
        ),
    ],
)
def test_a_wrong_logger(item: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reach.make_loggers([item], "x")
    assert str(caught.value) == sentence


def test_ddp_is_built_on_the_given_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for streams: what runs on a stream is in its list, and each waits for the other."""
    running: list[Any] = []
    built: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.waited_for = name, list[str]()

        def wait_stream(self, other: Any) -> None:
            self.waited_for.append(other.name)

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        running.append(stream)
        yield
        running.remove(stream)

    current, ours = Stream("current"), Stream("ours")
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: current)
    monkeypatch.setattr("torch.cuda.stream", on)

    class Wrapped:
        def __init__(self, **arguments: Any) -> None:
            built.append((arguments, list(running)))

        def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
            self.times_itself_every = rate

    monkeypatch.setattr(reach, "DistributedDataParallel", Wrapped)
    strategy = DDPStrategy(find_unused_parameters=False, bucket_cap_mb=50)
    strategy.parallel_devices = [torch.device("cuda", 1)]
    monkeypatch.setattr(DDPStrategy, "local_rank", 0)
    trainer: Any = SimpleNamespace(strategy=strategy)
    reach.build_ddp_on(trainer, ours)  # type: ignore[arg-type]
    module = nn.Linear(1, 1)
    wrapped: Any = strategy._setup_model(module)
    assert wrapped.times_itself_every > 10**9  # its clock would end a capture
    assert callable(DistributedDataParallel._set_ddp_runtime_logging_sample_rate)
    options = {"find_unused_parameters": False, "bucket_cap_mb": 50}
    assert built == [({"module": module, "device_ids": [1], **options}, [ours])]
    assert ours.waited_for == ["current"]
    assert current.waited_for == ["ours"]
    plain: Any = SimpleNamespace(strategy=SingleDeviceStrategy("cpu"))
    reach.build_ddp_on(plain, ours)  # type: ignore[arg-type]
    assert "_setup_model" not in vars(plain.strategy)
