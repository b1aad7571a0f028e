"""The short way from batch to batch, against Lightning's own: the same hooks, in its order, told the same things."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, assert_same_state, batches, fit, same_start
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.inspection.hooks import CAPTURED_HOOKS

Told = list[tuple[Any, ...]]
"""One entry for each call of a hook: its name, where the fit was, what it was told."""

# A checkpoint's content is compared elsewhere; state_dict is called for it.
LEFT_OUT = {*CAPTURED_HOOKS, "on_save_checkpoint", "on_load_checkpoint", "on_fit_start", "on_exception"}
CALLBACK_HOOKS = [n for n in dir(pl.Callback) if n.startswith(("on_", "setup", "teardown")) and n not in LEFT_OUT]
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
MODULE_HOOKS = [
    name
    for name in dir(pl.LightningModule)
    if name.startswith("on_") and name not in (*LEFT_OUT, *TRANSFER_HOOKS, "on_gpu")
] + ["lr_scheduler_step"]
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def described(value: Any) -> Any:
    """Return a value such that equal ones are told equally, in every fit."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def state_of(trainer: pl.Trainer, reads: bool) -> tuple[Any, ...]:
    loop = trainer.fit_loop.epoch_loop
    module = trainer.lightning_module
    progress = vars(loop.batch_progress.current)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    metrics = described(trainer.callback_metrics) if reads else None
    shown = described(trainer.progress_bar_metrics) if reads else None
    return (
        trainer.global_step, trainer.current_epoch, str(trainer.state.stage), dict(progress), trainer.is_last_batch,
        trainer.should_stop, module._current_fx_name, rates, metrics, shown,
    )  # fmt: skip


def recorder(base: type, hooks: list[str], told: Told, reads: bool) -> type:
    """Return a subclass whose hooks tell of their calls."""

    def hook_of(name: str) -> Callable[..., Any]:
        inherited = getattr(base, name)

        def hook(self: Any, *arguments: Any, **named: Any) -> Any:
            trainer = self.trainer if isinstance(self, pl.LightningModule) else arguments[0]
            told.append((f"{base.__name__}.{name}", state_of(trainer, reads), described(arguments), described(named)))
            return inherited(self, *arguments, **named)

        return hook

    return type(f"Recording{base.__name__}", (base,), {name: hook_of(name) for name in hooks})


class Rows(Logger):
    """Tells of every row that is logged."""

    name, version = "rows", ""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told = told

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.told.append(("log_metrics", step, dict(metrics)))

    def save(self) -> None:
        self.told.append(("save",))


class Net(Small):
    """Logs something for everybody."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        self.log("both", 2 * loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), prog_bar=True)


class Skipping(Net):
    """Ends its epochs early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 8 - self.current_epoch else None


class Stopping(pl.Callback):
    """Stops the fit in the middle of an epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == 15


class StoppingEarlier(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == 15


class WithoutLength:
    """A stream of batches."""

    def __init__(self, made: Batches) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


def step_lr(optimizer: Any, **options: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": "step", **options}


def plateau(optimizer: Any, **options: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return {"scheduler": scheduler, "reduce_on_plateau": True, **options}


def early() -> pl.Callback:
    return pl.callbacks.EarlyStopping("loss", patience=0, mode="max", check_on_train_epoch_end=True)


Case = dict[str, Any]
CASES: dict[str, Case] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 3},
    "skips the rest": {"net": Skipping},
    "skips, accumulating": {"net": Skipping, "accumulate_grad_batches": 4},
    "no length": {"no_length": True},
    "no length, accumulating": {"no_length": True, "accumulate_grad_batches": 3},
    "no length, limited": {"no_length": True, "limit_train_batches": 7},
    "no length, validating": {"no_length": True, "val_check_interval": 4},
    "limited": {"limit_train_batches": 7},
    "half": {"limit_train_batches": 0.5},
    "quarters": {"val_check_interval": 0.25},
    "across epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "max_steps": {"max_steps": 17, "max_epochs": -1},
    "max_steps, accumulating": {"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 3},
    "stops": {"callbacks": [Stopping]},
    "stops before a step": {"callbacks": [StoppingEarlier]},
    "stops too early": {"callbacks": [Stopping], "min_epochs": 3},
    "stops without validation": {"callbacks": [Stopping], "validates": False},
    "early stopping": {"callbacks": [early]},
    "steps": {"schedule": partial(step_lr, frequency=3)},
    "steps, accumulating": {"schedule": step_lr, "accumulate_grad_batches": 3},
    "epochs": {"schedule": partial(step_lr, interval="epoch", frequency=2)},
    "plateau": {"schedule": partial(plateau, monitor="val_loss")},
    "plateau of steps": {"schedule": partial(plateau, monitor="loss", interval="step", frequency=2)},
    "overfit": {"overfit_batches": 2, "max_epochs": 5},
    "fast_dev_run": {"fast_dev_run": 6},
    "every step": {"log_every_n_steps": 1},
    "never": {"log_every_n_steps": 0},
    "not the sanity check": {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2},
}


def recorded(case: Case, graph: CUDAGraphStep | None, hears_batches: bool, reads: bool) -> tuple[Told, pl.Trainer]:
    """Fit and return what was told in it."""
    told: Told = []
    options: dict[str, Any] = {"log_every_n_steps": 4, "max_epochs": 3, **case}
    base = options.pop("net", Net)
    callback_hooks, module_hooks = (
        [name for name in hooks if hears_batches or name not in BATCH_HOOKS] for hooks in (CALLBACK_HOOKS, MODULE_HOOKS)
    )
    torch.manual_seed(1)
    module = recorder(base, module_hooks, told, reads)(schedule=options.pop("schedule", None))
    callbacks = [make() for make in options.pop("callbacks", ())]
    callbacks.append(recorder(pl.Callback, callback_hooks, told, reads)())
    data: Any = batches(10, rows=(6, 6, 6, 6, 6, 6, 6, 6, 6, 3))
    if options.pop("no_length", False):
        data = WithoutLength(data)
    validation = batches(2, seed=5) if options.pop("validates", True) else None
    trainer = fit(module, data, graph, callbacks=callbacks, validation=validation, logger=Rows(told), **options)
    told.append(("in the end", described(trainer.callback_metrics), described(trainer.logged_metrics)))
    return told, trainer


def assert_same_told(mine: Told, plain: Told) -> None:
    for number, (one, other) in enumerate(zip(mine, plain, strict=False)):
        assert one == other, f"call {number}, after {[each[0] for each in plain[:number][-5:]]}"
    assert len(mine) == len(plain), (mine[len(plain) :], plain[len(mine) :])


@pytest.mark.parametrize(("hears_batches", "reads"), [(True, True), (False, False)], ids=["all", "quiet"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hooks_are_called_as_lightning_does(case: Case, hears_batches: bool, reads: bool) -> None:
    graph = CUDAGraphStep(stand_in=True)
    mine, ours = recorded(case, graph, hears_batches, reads)
    expected, plain = recorded(case, None, hears_batches, reads)
    assert graph.pool.hits >= 2, graph.notes
    assert_same_told(mine, expected)
    assert_same_state(ours, plain)


def test_hooks_around_batches_force_nobody_to_read() -> None:
    told = [recorded({"log_every_n_steps": 7}, graph, True, False) for graph in (CUDAGraphStep(stand_in=True), None)]
    assert_same_told(told[0][0], told[1][0])


class ChangesBatches(pl.Callback):
    """Augments in place, and replaces a part of the batch."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batch[0].mul_(1 + 0.1 * batch_idx)
        batch[1] = batch[1].flip(0)


class Freezes(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            pl_module.net[0].requires_grad_(trainer.current_epoch == 1)


class ChangesDecay(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 8.0


class ChangesRate(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 2.0 ** -(3 + batch_idx)


class WhichReplayed(pl.Callback):
    """Notes the optimizer steps that were replayed."""

    def __init__(self, graph: CUDAGraphStep) -> None:
        self.graph, self.steps, self._hits = graph, list[int](), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.graph.pool.hits > self._hits:
            self.steps.append(trainer.global_step - 1)
        self._hits = self.graph.pool.hits


@pytest.mark.parametrize(
    ("callback", "eager_at"), [(ChangesBatches, None), (ChangesRate, None), (Freezes, 7), (ChangesDecay, 8)]
)
def test_what_a_start_hook_changes_counts_for_this_batch(callback: type[pl.Callback], eager_at: int | None) -> None:
    def data() -> Batches:
        return Batches([[x.clone(), y] for x, y in batches(12).made])

    ours, plain = same_start(Small)
    graph = CUDAGraphStep(stand_in=True)
    which = WhichReplayed(graph)
    mine = fit(ours, data(), graph, callbacks=[callback(), which])
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if callback is ChangesDecay else {}  # the decay moves to the device
    assert_same_state(mine, fit(plain, data(), callbacks=[callback()]), **tolerance)
    assert graph.pool.hits >= 10, graph.notes
    if eager_at is not None:  # the stand-in sees the change even in a replay, which a graph would not
        assert {eager_at - 1} <= set(which.steps)
        assert eager_at not in which.steps


def test_a_batch_that_is_none_is_passed_over() -> None:
    made = [*batches(7).made, None, *batches(2, seed=3).made]
    told = []
    for graph in (CUDAGraphStep(stand_in=True), None):
        calls: Told = []
        torch.manual_seed(1)
        module = recorder(Net, MODULE_HOOKS, calls, True)()
        trainer = fit(module, Batches(made), graph, logger=Rows(calls), log_every_n_steps=1)
        told.append((calls, trainer))
    assert_same_told(told[0][0], told[1][0])
    assert_same_state(told[0][1], told[1][1])


class Keeper:
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def keep(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize(
    "make",
    [lambda keeper: keeper.keep, lambda keeper: lambda *arguments: keeper.keep(*arguments)],
    ids=["method", "function"],
)
def test_what_a_users_function_keeps_stays_as_it_was(make: Callable[[Keeper], Any]) -> None:
    """Lightning's LambdaCallback is Lightning's, and what it calls is not."""
    keepers = [Keeper(), Keeper()]
    graphs = (CUDAGraphStep(stand_in=True), None)
    for module, graph, keeper in zip(same_start(Small), graphs, keepers, strict=True):
        hook = pl.callbacks.LambdaCallback(on_train_batch_end=make(keeper))
        fit(module, batches(9), graph, callbacks=[hook])
    losses = [[float(output["loss"]) for output in keeper.outputs] for keeper in keepers]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 18


def test_a_hook_that_was_set_to_none_is_not_called() -> None:
    class Without(pl.Callback):
        on_train_batch_start: Any = None
        on_train_batch_end: Any = None

    graph = CUDAGraphStep(stand_in=True)
    fit(Small(), batches(9), graph, callbacks=[Without()])
    assert graph.pool.hits > 10


class CountsTransfers(Net):
    """Changes the batch on its way, which must happen once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        return [batch[0] + 1, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return [2 * batch[0], batch[1]]


class DataOfHooks(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def train_dataloader(self) -> Any:
        return batches(9)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return [2 * batch[0], batch[1]]


def test_transfer_hooks_are_called_once_for_each_batch() -> None:
    ours, plain = same_start(CountsTransfers)
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(9), graph), fit(plain, batches(9)))
    assert ours.calls == plain.calls == 18 * ["before", "transfer", "after"]
    assert graph.pool.hits >= 10
    others, data = same_start(Small), [DataOfHooks(), DataOfHooks()]
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(others[0], data[0], graph), fit(others[1], data[1]))
    assert data[0].calls == data[1].calls == 18 * ["after"]
    assert graph.pool.hits > 10


class OfTheBatchAlone(Small):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_step_without_an_index() -> None:
    ours, plain = same_start(OfTheBatchAlone)
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(9), graph), fit(plain, batches(9)))
    assert graph.pool.hits > 10


class OfTheIterator(Small):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        (x, y), _, _ = next(dataloader_iter)
        return nn.functional.cross_entropy(self.net(x), y)


def test_a_step_that_fetches_its_batch_itself_is_lightnings() -> None:
    ours, plain = same_start(OfTheIterator)
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(9), graph), fit(plain, batches(9)))
    assert graph.pool.hits == 0


class Marks(pl.profilers.Profiler):
    """A user's own profiler, which wants to see everything."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def start(self, action_name: str) -> None:
        self.started.append(action_name)

    def stop(self, action_name: str) -> None: ...


def test_a_users_profiler_sees_all_that_lightning_does() -> None:
    inside = (*(f".{hook}" for hook in CAPTURED_HOOKS), "CUDAGraphStep")
    seen = []
    for module, graph in zip(same_start(Small), (CUDAGraphStep(stand_in=True), None), strict=True):
        profiler = Marks()
        fit(module, batches(9), graph, profiler=profiler)
        assert graph is None or graph.pool.hits > 10
        seen.append([name for name in profiler.started if not any(part in name for part in inside)])
    assert seen[0] == seen[1]


class BarAtTheEnd(pl.Callback):
    """Notes where the bar stands at the end of each epoch."""

    def __init__(self) -> None:
        self.stood: list[int] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        bar: Any = trainer.progress_bar_callback
        if isinstance(bar, pl.callbacks.TQDMProgressBar):
            self.stood.append(bar.train_progress_bar.n)
        else:
            self.stood.append(int(bar.train_progress_bar.completed))


@pytest.mark.parametrize("case", [{}, {"no_length": True}, {"max_steps": 17}, {"callbacks": [Stopping]}], ids=str)
@pytest.mark.parametrize(
    "bar",
    [partial(pl.callbacks.TQDMProgressBar, refresh_rate=rate) for rate in (1, 3, 20)] + [pl.callbacks.RichProgressBar],
    ids=["1", "3", "20", "rich"],
)
def test_lightnings_bar_ends_where_it_should(
    bar: Callable[[], pl.Callback], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttrain.short_path.SECONDS_BETWEEN_DRAWS", float("inf"))  # as if steps took no time
    stood = []
    for graph in (CUDAGraphStep(stand_in=True), None):
        options = dict(case)
        callbacks = [bar(), *(make() for make in options.pop("callbacks", ())), end := BarAtTheEnd()]
        made = batches(11)
        data = WithoutLength(made) if options.pop("no_length", False) else made
        fit(Net(), data, graph, callbacks=callbacks, enable_progress_bar=True, log_every_n_steps=50, **options)
        stood.append(end.stood)
    assert stood[0] == stood[1]


def test_a_bar_is_drawn_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    plain = pl.callbacks.TQDMProgressBar.on_train_batch_end
    now = 0.0

    def noted(self: Any, *arguments: Any) -> None:
        drawn.append(arguments[-1])
        plain(self, *arguments)

    def clock() -> float:
        nonlocal now
        now += 0.03  # a step's time
        return now

    monkeypatch.setattr(pl.callbacks.TQDMProgressBar, "on_train_batch_end", noted)
    monkeypatch.setattr("fasttrain.short_path.time.perf_counter", clock)
    monkeypatch.setattr(noted, "__module__", plain.__module__)
    bar = pl.callbacks.TQDMProgressBar()
    fit(Net(), batches(30), CUDAGraphStep(stand_in=True), callbacks=[bar], enable_progress_bar=True, max_epochs=1)
    assert drawn[:4] == [0, 1, 2, 3], "eager steps take their time anyway"
    assert drawn[-1] == 29
    assert 6 <= len(drawn[4:]) <= 9


def test_lightnings_own_path_comes_back() -> None:
    trainer = fit(Small(), batches(9), CUDAGraphStep(stand_in=True))
    loop = trainer.fit_loop.epoch_loop
    assert "advance" not in vars(loop)
    assert type(loop.automatic_optimization).__module__.startswith("lightning.")
    assert type(loop._results).__module__.startswith("lightning.")
