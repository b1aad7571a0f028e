"""Recipe + Plan -> lightning.Trainer. Reaches into Lightning's internals live here.

Those on the path of a batch through a step are in `epoch_loop`, `short_path` and `step_results`.
Written against Lightning 2.6; `tests/test_trainer.py` fails when one of these internals changes its shape.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

from fasttrain.config import TrainerConfig
from fasttrain.ddp import strategy_of
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Attachment
from fasttrain.ranks_together import RanksTogether
from fasttrain.sections import import_class

BatchTransform = Callable[[Any], Any]

NEVER = 2**31 - 1
"""So many forwards that none of them is ever the one."""


def make_trainer(
    config: TrainerConfig,
    attachments: Sequence[Attachment],
    callbacks: Sequence[pl.Callback],
    loggers: Sequence[Logger],
    ranks: RanksTogether | None = None,
    **options: Any,
) -> pl.Trainer:
    """Return the Trainer of a run.

    Args:
        config: Lightning's arguments as configured; those left at null take Lightning's defaults.
        attachments: the optimizations', in the plan's order; their options override `config`.
        callbacks: the flow's own, which come after the optimizations'.
        loggers: may be empty.
        ranks: is told of an exception before all other callbacks, which may wait for the device.
        options: further arguments of lightning.Trainer.

    Raises:
        ConfigError: Lightning refuses the arguments.
        OptimizationError: two optimizations set the same option differently.
    """
    given = {key: value for key, value in vars(config).items() if value is not None and key != "ddp"}
    arguments: dict[str, Any] = {key: _plain(value) for key, value in given.items()}
    arguments["strategy"] = strategy_of(config)
    arguments.update(_joint_options(attachments), **options)
    attached = [callback for attachment in attachments for callback in attachment.callbacks]
    keeps_checkpoints = any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks)
    try:
        trainer = pl.Trainer(
            **arguments,
            callbacks=[*([ranks] if ranks is not None else []), *attached, *callbacks],
            logger=list(loggers) or False,
            enable_model_summary=False,
            enable_checkpointing=keeps_checkpoints,
        )
    except (MisconfigurationException, TypeError, ValueError, RuntimeError, ImportError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"trainer: Lightning refuses these values: {message}") from error
    if keeps_checkpoints:
        _leave_sigterm_to_the_run(trainer)
    return trainer


def is_lightnings_refusal(error: Exception) -> bool:
    """Whether Lightning itself, and not code of the user's that it called, found fault with its arguments."""
    if isinstance(error, MisconfigurationException):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raised_in = last.tb_frame.f_globals.get("__name__", "") if last is not None else ""
    return isinstance(error, ValueError) and raised_in.startswith("lightning.pytorch.loops")


def make_loggers(names: Sequence[Any], folder: str) -> list[Logger]:
    """Return loggers by short name (`tensorboard`, `csv`) or by `class` and arguments.

    Raises:
        ConfigError: an unknown name or class, or arguments that it does not take.
    """
    loggers: list[Logger] = []
    for item in names:
        if item == "tensorboard":
            loggers.append(TensorBoardLogger(folder, name="", version="tensorboard"))
        elif item == "csv":
            loggers.append(CSVLogger(folder, name="", version="csv"))
        elif isinstance(item, (dict, DictConfig)) and "class" in item:
            arguments = {str(key): value for key, value in dict(_plain(item)).items() if key != "class"}
            logger_class = import_class(str(item["class"]), "loggers")
            try:
                loggers.append(logger_class(**arguments))
            except TypeError as error:
                raise ConfigError(f"loggers: {item['class']}: {error}.") from None
        else:
            raise ConfigError(
                f"loggers: {item!r} is unknown; use tensorboard, csv, or a mapping with the class of a Lightning "
                "logger, for instance {class: lightning.pytorch.loggers.WandbLogger, project: mine}."
            )
    return loggers


def transform_batches(trainer: pl.Trainer, transform: BatchTransform) -> None:
    """Apply `transform` to every batch after it has reached the device, in training and evaluation.

    Lightning has no public place for this that a callback may use: its data hooks belong to the module or the data
    module, of which only one is heard. Asked for twice with the same function it acts once.
    """
    transforms = _around_transfer(trainer).after
    if transform not in transforms:
        transforms.append(transform)


def exchange_batches(trainer: pl.Trainer, exchange: BatchTransform) -> Callable[[], None]:
    """Apply `exchange` to every batch before Lightning moves it to the device; return what ends that.

    It comes after `on_before_batch_transfer`. What it returns is moved as usual; tensors on the device stay.
    """
    exchanges = _around_transfer(trainer).before
    exchanges.append(exchange)
    return lambda: exchanges.remove(exchange) if exchange in exchanges else None


def layout_transforms(trainer: pl.Trainer) -> list[BatchTransform]:
    """Return those functions given to `transform_batches` that leave values as they are, in order."""
    return [each for each in _around_transfer(trainer).after if getattr(each, "changes_only_layout", False)]


def changes_only_layout(trainer: pl.Trainer) -> bool:
    """Whether a batch reaches the device with all its values, by nobody's doing but Lightning's and such transforms'.

    A transform says so by an attribute `changes_only_layout`.
    """
    around: _AroundTransfer | None = vars(trainer.strategy).get("_fasttrain_around_transfer")
    if around is None:
        return "batch_to_device" not in vars(trainer.strategy)
    return not around.before and all(getattr(each, "changes_only_layout", False) for each in around.after)


@dataclass
class _AroundTransfer:
    """What a strategy's `batch_to_device` does before and after Lightning's own part."""

    before: list[BatchTransform] = field(default_factory=list)
    after: list[BatchTransform] = field(default_factory=list)


def _around_transfer(trainer: pl.Trainer) -> _AroundTransfer:
    strategy: Any = trainer.strategy
    around: _AroundTransfer | None = vars(strategy).get("_fasttrain_around_transfer")
    if around is not None:
        return around
    made = strategy._fasttrain_around_transfer = _AroundTransfer()
    plain = strategy.batch_to_device

    def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        for each in made.before:
            batch = each(batch)
        batch = plain(batch, device=device, dataloader_idx=dataloader_idx)
        for each in made.after:
            batch = each(batch)
        return batch

    strategy.batch_to_device = batch_to_device
    return made


def build_ddp_on(trainer: pl.Trainer, stream: torch.cuda.Stream) -> None:
    """Have Lightning's DDP strategy wrap the model on a stream that is known; asked for before the model is set up.

    DDP makes the nodes that accumulate gradients, and they go on running on the stream on which it was built: a step is
    captured on that stream or not at all. Lightning builds on a side stream that it makes for this alone. Nor may DDP
    time itself, which it does at every hundredth forward: it asks events for it, and a capture that did would fail.
    """
    if not isinstance(trainer.strategy, DDPStrategy):
        return
    strategy: Any = trainer.strategy

    def setup_model(model: Any) -> DistributedDataParallel:
        device_ids = strategy.determine_ddp_device_ids()
        current = torch.cuda.current_stream(strategy.root_device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            wrapped = DistributedDataParallel(module=model, device_ids=device_ids, **strategy._ddp_kwargs)
        wrapped._set_ddp_runtime_logging_sample_rate(NEVER)
        current.wait_stream(stream)
        return wrapped

    strategy._setup_model = setup_model


def validation_is_due(trainer: pl.Trainer) -> bool:
    """Whether Lightning will validate right after the batch that is ending."""
    fit_loop = trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    return fetcher is not None and bool(fit_loop.epoch_loop._should_check_val_fx(fetcher))


def validate_after_this_batch(trainer: pl.Trainer, due: bool) -> None:
    """Say whether Lightning validates after the batch that begins, and at no other time by itself."""
    trainer.check_val_every_n_epoch = 1
    # Lightning validates where the number of batches is a multiple of this; `inf` would mean every epoch's end.
    trainer.val_check_batch = 1 if due else sys.maxsize


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the batch that is ending left gradients for a later batch's optimizer step."""
    return bool(trainer.fit_loop._should_accumulate())


def stop_now(trainer: pl.Trainer) -> None:
    """End the fit after this batch. Lightning would validate once more on its way out; that is left undone."""
    trainer.should_stop = True
    trainer.limit_val_batches = 0


def train_without_end(trainer: pl.Trainer) -> None:
    """Take away a fit's limits of epochs and steps once it has started; schedules have been made for them by then."""
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.epoch_loop.max_steps = -1


def epoch_is_complete(trainer: pl.Trainer) -> bool:
    """Whether the batches of the current epoch have all been seen, as opposed to a stop in the middle."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def load_pending_loader_state(trainer: pl.Trainer) -> None:
    """Give resumed loaders their position, if that is still to be done when training starts.

    Lightning does it when it makes the loaders. A module that asks for `estimated_stepping_batches` in
    `configure_optimizers` has them made before the checkpoint's loops are read, and the position would be lost.
    """
    fit_loop = trainer.fit_loop
    if fit_loop._combined_loader_states_to_load and fit_loop._data_fetcher is not None:
        fit_loop._load_combined_loader_states()
        iter(fit_loop._data_fetcher)


def fit_is_ending(trainer: pl.Trainer) -> bool:
    """Whether this epoch's end is the fit's. To be asked in `on_train_epoch_end`."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    epochs, max_epochs = progress.processed, trainer.max_epochs
    return (
        trainer.should_stop
        or (max_epochs is not None and 0 <= max_epochs <= epochs)
        or 0 <= trainer.max_steps <= trainer.global_step
    )


def is_between_batches(trainer: pl.Trainer) -> bool:
    """Whether every batch that training has taken is done with: true when fetching the next one fails."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return progress.ready == progress.completed > 0 and not trainer.validating


def logging_step(trainer: pl.Trainer) -> int:
    """Return the step under which Lightning logs at this moment: optimizer steps, counted from 0."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logging_interval(trainer: pl.Trainer) -> int:
    """Return the number of steps between two log entries."""
    return int(vars(trainer)["log_every_n_steps"])


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return a fit's training loaders; empty before Lightning has made them."""
    combined: Any = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def before_training_loaders(trainer: pl.Trainer, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` before Lightning makes a fit's training loaders and their iterators; return what ends that.

    That may be as early as in `configure_optimizers`, and a loader's processes begin to read when its iterator is made.
    """
    loop: Any = trainer.fit_loop
    plain = loop.setup_data

    def setup_data() -> None:
        if loop._combined_loader is None:
            act()
        plain()

    loop.setup_data = setup_data
    return lambda: vars(loop).pop("setup_data", None)


def optimizer_steps_per_epoch(trainer: pl.Trainer) -> float:
    """Return the optimizer steps of one epoch; infinite for a loader without a length.

    Makes the training loader if there is none yet, as `Trainer.estimated_stepping_batches` does.
    """
    trainer.fit_loop.setup_data()
    batches = float(trainer.num_training_batches)
    return -(-batches // trainer.accumulate_grad_batches)


def _leave_sigterm_to_the_run(trainer: pl.Trainer) -> None:
    """Take Lightning's own reaction to SIGTERM away; a handler set before the fit is called all the same.

    Lightning raises after the batch or in the evaluation, before the checkpoint that the run's handler asks for, and
    with several processes it asks before every batch. What stays is that the launcher's process passes the signal on.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    launcher: Any = trainer.strategy.launcher

    def pass_on(number: int, frame: Any) -> None:
        if trainer.world_size > 1 and launcher is not None:
            launcher.kill(number)

    connector._sigterm_notifier_fn = pass_on
    loop._broadcast_sigterm_tensor = lambda: None


def _joint_options(attachments: Sequence[Attachment]) -> dict[str, Any]:
    joint: dict[str, Any] = {}
    for attachment in attachments:
        for key, value in attachment.trainer_options.items():
            if key == "plugins" and key in joint:
                joint[key] = [*joint[key], *value]
            elif key in joint and joint[key] != value:
                raise OptimizationError(
                    f"two optimizations set the Trainer's '{key}', to {joint[key]!r} and {value!r}; leave one out."
                )
            else:
                joint[key] = value
    return joint


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
