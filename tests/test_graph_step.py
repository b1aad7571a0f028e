"""The graph step's bookkeeping in real fits on the CPU, through the stand-in that runs the captured function again."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Kept, OptimizerMaker, Small, adamw, assert_same_state, batches, fit, same_start, sgd
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fasttrain.callbacks import CapturedFunction, CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.reference import reference
from fasttrain.errors import OptimizationError


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}


def every_step(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": "step"}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=60)
    return {"scheduler": scheduler, "interval": "step"}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("schedule", [step_lr, one_cycle])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_fit_gives_the_same_weights_metrics_and_counts(
    make: OptimizerMaker, schedule: Callable[[Any], Any], clip: float | None, accumulate: int
) -> None:
    ours, plain = same_start(lambda: Small(make, schedule))
    options: dict[str, Any] = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "max_epochs": 3}
    data = batches(10, rows=(6, 6, 6, 6, 6, 6, 6, 6, 6, 3))  # a last partial batch, and a last short window
    graph, kept, expected = CUDAGraphStep(stand_in=True), Kept(), Kept()
    ours_trainer = fit(ours, data, graph, callbacks=[kept], **options)
    plain_trainer = fit(plain, data, callbacks=[expected], **options)
    assert graph.pool.hits > 5, graph.notes
    # A cycled momentum needs the update whose numbers are all on the device, which rounds in another order.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if schedule is one_cycle else {}
    assert_same_state(ours_trainer, plain_trainer, **tolerance)
    assert kept.steps == expected.steps
    assert kept.rates == expected.rates
    assert kept.losses == pytest.approx(expected.losses, rel=1e-4 if tolerance else 0)
    for step, (mine, theirs) in enumerate(zip(kept.metrics, expected.metrics, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-4 if tolerance else 0), f"batch {step}"
    assert ours_trainer.global_step == plain_trainer.global_step


@pytest.mark.parametrize("short_path", [True, False])
def test_a_logger_gets_the_same_rows(tmp_path: Path, short_path: bool) -> None:
    ours, plain = same_start(Small)
    data = batches(9)
    rows = {}
    for name, module, graph in (
        ("ours", ours, CUDAGraphStep(stand_in=True, short_path=short_path)),
        ("plain", plain, None),
    ):
        logger = CSVLogger(tmp_path, name=name, version="")
        fit(module, data, graph, logger=logger, log_every_n_steps=2, validation=batches(2), max_epochs=3)
        rows[name] = (tmp_path / name / "metrics.csv").read_text()
    assert rows["ours"] == rows["plain"]


def test_dropout_follows_the_same_sequence() -> None:
    ours, plain = same_start(lambda: Small(dropout=0.5))
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(12), graph), fit(plain, batches(12)))
    assert graph.pool.hits > 10


def test_without_a_gpu_it_says_so_and_changes_nothing() -> None:
    ours, plain = same_start(Small)
    graph = CUDAGraphStep()
    assert_same_state(fit(ours, batches(6), graph), fit(plain, batches(6)))
    assert graph.step is None
    assert graph.changes == []
    assert graph.pool.hits == 0


class Nested(NamedTuple):
    inputs: dict[str, Tensor]
    extra: list[Any]


@dataclass
class Holder:
    nested: Nested
    name: str


class OfStructures(Small):
    """Takes a dataclass with a named tuple with a dict in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step((batch.nested.inputs["x"], batch.nested.extra[0]), batch_idx)
        return {"loss": loss * batch.nested.extra[1], "predictions": loss.detach() + 1}


def test_batches_and_outputs_of_any_structure() -> None:
    def structured(scale: float) -> list[Any]:
        return [Holder(Nested({"x": x}, [y, scale]), "batch") for x, y in batches(5).made]

    data = Batches([*structured(1.0), *structured(0.5), *structured(1.0), *structured(0.5)])
    ours, plain = same_start(OfStructures)
    graph, kept = CUDAGraphStep(stand_in=True), KeptOutputs()
    expected = KeptOutputs()
    assert_same_state(fit(ours, data, graph, callbacks=[kept]), fit(plain, data, callbacks=[expected]))
    assert graph.pool.captures == 2  # one for each value of the constant
    assert [o["predictions"] for o in kept.outputs] == [o["predictions"] for o in expected.outputs]


class KeptOutputs(pl.Callback):
    """Keeps every output it is given, as users do who plot at the end of an epoch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)


def test_a_batch_that_holds_an_unknown_object_is_named() -> None:
    data = Batches([(x, y, object()) for x, y in batches(4).made])

    class Tolerant(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[:2], batch_idx)

    with pytest.warns(UserWarning, match=r"since batch\[2\] is a builtins.object, which is neither a tensor nor"):
        fit(Tolerant(), data, CUDAGraphStep(stand_in=True))


def test_five_shapes_need_five_captures_and_give_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(4, 5, 6, 7, 8)[int(i)] for i in torch.randint(5, (60,), generator=generator)]
    data = Batches([batches(1, (n,), seed=i).made[0] for i, n in enumerate(sizes)])
    ours, plain = same_start(lambda: Small(adamw))
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, data, graph), fit(plain, data))
    assert graph.pool.captures == 5
    assert graph.pool.evictions == 0
    replays = {row[0]: row[1] for row in graph.table().rows}
    assert sum(replays.values()) == graph.pool.hits >= 100


def test_a_small_pool_evicts_and_stays_right() -> None:
    data = batches(40, rows=(3, 4, 5))
    ours, plain = same_start(Small)
    graph = CUDAGraphStep(stand_in=True, max_graphs=2)
    assert_same_state(fit(ours, data, graph), fit(plain, data))
    assert graph.pool.evictions > 0
    assert len(graph.pool) == 0


def test_padding_makes_one_shape_of_many() -> None:
    class Masked(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch["x"], batch["y"]
            loss = nn.functional.cross_entropy(self.net[0](x), y, ignore_index=-100)
            self.log("loss", loss)
            return loss

    data = Batches([{"x": x, "y": y} for x, y in batches(20, rows=(3, 4, 5, 6)).made])
    ours, plain = same_start(Masked)
    pad = {"values": {"x": 0.0, "y": -100.0}, "sizes": (8,), "dimension": 0}
    from fasttrain.callbacks.cuda_graph_step import PadConfig

    graph = CUDAGraphStep(stand_in=True, pad=PadConfig(**pad))
    assert_same_state(fit(ours, data, graph), fit(plain, data), rtol=1e-5, atol=1e-6)
    assert graph.pool.captures == 1


class Unfreezing(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch >= 1)


class WeightDecayOnTheWay(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 7:
            trainer.optimizers[0].param_groups[0]["weight_decay"] *= 2


class RateOnTheWay(pl.Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 3 == 0:
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class DropoutOnTheWay(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[3].p = 0.1 * trainer.current_epoch


class NewGroup(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [pl_module.extra], "lr": 2**-7})


class WithExtra(Small):
    """Has a parameter that the optimizer does not know at first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self.extra - 1).square().sum()

    def configure_optimizers(self) -> Any:
        return sgd(self.net.parameters())


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Unfreezing, "net.0.weight was unfrozen"),
        (WeightDecayOnTheWay, "the optimizer changed weight_decay"),
        (RateOnTheWay, ""),
        (DropoutOnTheWay, "the attribute net.3.p changed from 0.0 to 0.1"),
        (NewGroup, "extra was given to the optimizer"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_a_callback_changes_is_honoured(callback: type[pl.Callback], said: str) -> None:
    ours, plain = same_start(WithExtra if callback is NewGroup else Small)
    graph = CUDAGraphStep(stand_in=True)
    ours_trainer = fit(ours, batches(12), graph, callbacks=[callback()], max_epochs=3)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if callback is WeightDecayOnTheWay else {}
    assert_same_state(ours_trainer, fit(plain, batches(12), callbacks=[callback()], max_epochs=3), **tolerance)
    assert graph.pool.hits > 10
    assert any(said.lower() in note.lower() for note in graph.notes) if said else graph.pool.captures == 1, graph.notes


class Remembering(Small):
    """Carries state in ways that a graph does not see by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("average", torch.zeros(()))
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("constant", 0.5)
        return loss + self.average


def test_state_in_attributes_and_metrics_goes_on(tmp_path: Path) -> None:
    ours, plain = same_start(Remembering)
    rows = {}
    trainers = []
    for name, module, graph in (("ours", ours, CUDAGraphStep(stand_in=True)), ("plain", plain, None)):
        logger = CSVLogger(tmp_path, name=name, version="")
        trainers.append(fit(module, batches(9), graph, logger=logger, log_every_n_steps=2, max_epochs=3))
        rows[name] = (tmp_path / name / "metrics.csv").read_text()
        assert graph is None or graph.pool.hits > 20, graph.notes
    assert rows["ours"] == rows["plain"]
    assert_same_state(*trainers)
    assert torch.equal(ours.average, plain.average)


def test_a_logged_number_is_told_of() -> None:
    graph = CUDAGraphStep(stand_in=True)
    fit(Remembering(), batches(8), graph)
    assert [note for note in graph.notes if "constant" in note] == [
        "self.log('constant') is given a Python number, and replays go on logging 0.5; log a tensor, or log it in "
        "on_train_batch_end"
    ]


class Counting(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class Drawing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        import random

        return super().training_step(batch, batch_idx) * random.choice([1.0, 2.0])


TEMPERATURES = itertools.count()


class LoggingNumbers(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("temperature", float(next(TEMPERATURES)))
        return super().training_step(batch, batch_idx)


class LookingAtTheIndex(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else 2 * loss


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Counting, "calls"),
        (Drawing, "random"),
        (LoggingNumbers, r"self.log\('temperature'\) is given a Python number that changes"),
        (LookingAtTheIndex, "batch_idx"),
    ],
)
def test_a_step_that_a_replay_could_not_repeat_runs_eagerly(module: type[Small], sentence: str) -> None:
    ours, plain = same_start(lambda: module() if module is Counting else module(schedule=every_step))
    # Where its code tells, it is not even tried; what the code does not tell is seen in the first steps.
    trusted = ("LoggingNumbers.training_step",)
    graph = CUDAGraphStep(stand_in=True, trusted=trusted)
    with pytest.warns(UserWarning, match=f"steps run eagerly, since .*{sentence}"):
        ours_trainer = fit(ours, batches(12), graph)
    assert_same_state(ours_trainer, fit(plain, batches(12)))
    assert graph.pool.hits == 0
    with pytest.raises(OptimizationError, match=f"cuda_graph_step: .*{sentence}"):
        fit(module(), batches(12), CUDAGraphStep(stand_in=True, on_failure="error", trusted=trusted))


def test_averaged_weights_are_the_same() -> None:
    trainers = []
    for module, graph in zip(same_start(Small), (CUDAGraphStep(stand_in=True), None), strict=True):
        average = pl.callbacks.EMAWeightAveraging(decay=0.9, update_starting_at_step=4)
        trainers.append(fit(module, batches(12), graph, callbacks=[average], validation=batches(2)))
    assert_same_state(*trainers)


def test_a_fit_without_its_optimizer_in_the_graph() -> None:
    ours, plain = same_start(lambda: Small(adamw, one_cycle))
    graph = CUDAGraphStep(stand_in=True, scope="fwd_bwd")
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    assert_same_state(fit(ours, batches(11), graph, **options), fit(plain, batches(11), **options))
    assert graph.pool.hits > 10


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    whole, _ = same_start(lambda: Small(adamw, step_lr))
    expected = fit(whole, batches(10), max_epochs=4)
    for first_has_graph in (True, False):
        start, resumed = same_start(lambda: Small(adamw, step_lr))
        graphs = [CUDAGraphStep(stand_in=True), None] if first_has_graph else [None, CUDAGraphStep(stand_in=True)]
        first = fit(start, batches(10), graphs[0], max_epochs=2)
        path = tmp_path / f"{first_has_graph}.ckpt"
        first.save_checkpoint(path)
        second = fit(resumed, batches(10), graphs[1], max_epochs=4, ckpt_path=path)
        assert_same_state(second, expected)
        assert second.global_step == expected.global_step


def test_a_checkpoint_in_the_middle_is_what_plain_lightning_writes(tmp_path: Path) -> None:
    saved = {}
    for name, module, graph in zip(
        ("ours", "plain"), same_start(lambda: Small(adamw, step_lr)), (CUDAGraphStep(stand_in=True), None), strict=True
    ):
        keeper = pl.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        fit(module, batches(10), graph, callbacks=[keeper], enable_checkpointing=True)
        saved[name] = torch.load(tmp_path / name / "step=14.ckpt", weights_only=False)
    assert saved["ours"].keys() == saved["plain"].keys()
    assert saved["ours"]["loops"] == saved["plain"]["loops"]
    ours, plain = (saved[name]["optimizer_states"][0] for name in ("ours", "plain"))
    assert ours["param_groups"] == plain["param_groups"]
    for index, values in plain["state"].items():
        assert {key: (type(v), v.device, v.dtype) for key, v in values.items()} == {
            key: (type(v), v.device, v.dtype) for key, v in ours["state"][index].items()
        }


def test_an_exception_in_a_step_leaves_lightning_as_it_was() -> None:
    class Failing(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 8:
                raise RuntimeError("as planned")

    graph = CUDAGraphStep(stand_in=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[graph, Failing()],
    )
    loop = trainer.fit_loop.epoch_loop
    before = type(loop.automatic_optimization), type(loop._results)
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.fit(Small(), batches(12))
    assert (type(loop.automatic_optimization), type(loop._results)) == before
    assert "advance" not in vars(loop)
    assert graph.pool.hits > 0


def test_a_second_fit_with_the_same_trainer_goes_on() -> None:
    ours, plain = same_start(Small)
    results = []
    for module, graph in ((ours, CUDAGraphStep(stand_in=True)), (plain, None)):
        trainer = fit(module, batches(8), graph, max_epochs=1)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, batches(8))
        results.append(trainer)
    assert_same_state(*results)


class Manual(Small):
    """Optimizes by itself, through a captured function."""

    def __init__(self, warm_up: int) -> None:
        super().__init__(adamw)
        self.automatic_optimization = False
        self.warm_up = warm_up

    def on_train_start(self) -> None:
        self.function = CapturedFunction(
            self.one_step, optimizers=self.optimizers(), warm_up=self.warm_up, stand_in=True
        )

    def on_train_end(self) -> None:
        self.function.release()

    def one_step(self, x: Tensor, y: Tensor) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.function(*batch))


def test_a_captured_function_in_manual_optimization() -> None:
    ours, eager = same_start(lambda: Manual(3))
    eager.warm_up = 10**9
    trainers = [fit(module, batches(12, rows=(6, 6, 6, 4))) for module in (ours, eager)]
    assert ours.function.pool.hits == 18
    assert ours.function.pool.captures == 2
    assert [trainer.global_step for trainer in trainers] == [24, 24]
    assert_same_state(*trainers)


def test_a_captured_function_needs_no_lightning() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    other = nn.Linear(8, 4)
    other.load_state_dict(net.state_dict())
    pairs = [(net, torch.optim.SGD(net.parameters(), 0.1)), (other, torch.optim.SGD(other.parameters(), 0.1))]

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return {"loss": loss.detach()}

        return step

    captured = CapturedFunction(step_of(*pairs[0]), optimizers=pairs[0][1], module=net, stand_in=True)
    for index, (x, y) in enumerate(batches(12).made):
        pairs[0][1].param_groups[0]["lr"] = pairs[1][1].param_groups[0]["lr"] = 0.1 / (1 + index)
        mine = captured({"x": x, "y": y})
        theirs = reference(lambda batch: nn.functional.cross_entropy(other(batch[0]), batch[1]), pairs[1][1], (x, y))
        assert torch.equal(mine["loss"], theirs)
    assert captured.pool.hits == 8
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match="give the device of the inputs"):
        CapturedFunction(net.forward)


@pytest.mark.parametrize("options", [{"scope": "fwd_bwd"}, {"keep_gradients": True}], ids=str)
def test_gradients_that_stay_after_the_step(options: dict[str, Any]) -> None:
    class Norms(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.seen.append(sum(float(p.grad.norm()) for p in pl_module.parameters()))

    ours, plain = same_start(lambda: Small(adamw, step_lr))
    graph, norms, expected = CUDAGraphStep(stand_in=True, **options), Norms(), Norms()
    data = batches(12, rows=(6, 6, 5))
    ours_trainer = fit(ours, data, graph, callbacks=[norms])
    assert_same_state(ours_trainer, fit(plain, data, callbacks=[expected]))
    assert norms.seen == expected.seen
    assert graph.pool.hits > 10
    assert not graph.step


def test_clipping_by_value() -> None:
    ours, plain = same_start(Small)
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, batches(12), graph, **options), fit(plain, batches(12), **options))
    assert graph.pool.hits > 10


def test_a_plateau_scheduler_steps_on_what_was_logged() -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        return {"scheduler": scheduler, "monitor": "mean_loss"}

    ours, plain = same_start(lambda: Small(schedule=plateau))
    graph, kept, expected = CUDAGraphStep(stand_in=True), Kept(), Kept()
    ours_trainer = fit(ours, batches(8), graph, callbacks=[kept], max_epochs=5)
    assert_same_state(ours_trainer, fit(plain, batches(8), callbacks=[expected], max_epochs=5))
    assert kept.rates == expected.rates
    assert len(set(kept.rates)) > 2, "the learning rate was reduced"
    assert graph.pool.captures == 1


class CountingSteps(torch.optim.Optimizer):
    """Counts its steps in Python, as optimizers outside of torch do; a graph would have the first count built in."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad / state["step"])


def test_a_captured_function_refuses_an_optimizer_that_a_replay_would_not_advance() -> None:
    torch.manual_seed(0)
    net, other = nn.Linear(8, 4), nn.Linear(8, 4)
    other.load_state_dict(net.state_dict())
    ours, plain = CountingSteps(net.parameters()), CountingSteps(other.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return reference(lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1]), ours, (x, y))

    with pytest.warns(UserWarning, match="CapturedFunction: calls run eagerly, since CountingSteps's state 'step' is"):
        captured = CapturedFunction(step, optimizers=ours, module=net, stand_in=True)
    for x, y in batches(8).made:
        captured(x, y)
        reference(lambda batch: nn.functional.cross_entropy(other(batch[0]), batch[1]), plain, (x, y))
    assert captured.pool.hits == captured.pool.captures == 0
    assert torch.equal(net.weight, other.weight)
