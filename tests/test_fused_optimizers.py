"""torch's fused and foreach steps for optimizers already made: same numbers, plain checkpoints, chosen by timing."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.optimizers import (
    LAMB,
    FusedOptimizers,
    FusedOptimizersConfig,
    FusedOptimizersOptimization,
)
from fasttrain.callbacks.optimizers.implementation import optimizers_in, use, why_not
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Change, Context, Refuses

CPU = Hardware("cpu", "cpu", "a CPU", 2)


class Model(pl.LightningModule):
    def __init__(self, make: Any = lambda params: AdamW(params, lr=0.01), **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, lambda epoch: 0.5**epoch)}


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(8, 4, generator=generator)), batch_size=2)


def fit(module: pl.LightningModule, *callbacks: pl.Callback, checkpoint: Any = None, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        **{"max_epochs": 2, **options}, accelerator="cpu", callbacks=list(callbacks), logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(), ckpt_path=checkpoint)
    return trainer


class Seen(pl.Callback):
    """Keeps what the optimizers' groups and saved state are while training."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.fused = [group["fused"] for group in trainer.optimizers[0].param_groups]
        self.saved = copy.deepcopy(trainer.optimizers[0].state_dict())


FUSIBLE = [
    lambda params: AdamW(params, lr=0.01),
    lambda params: Adam(params, lr=0.01, amsgrad=True),
    lambda params: SGD(params, lr=0.1),
    lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("make", FUSIBLE)
def test_the_callback_trains_and_saves_as_the_plain_optimizer_does(make: Any, implementation: Any) -> None:
    plain, ours, plain_seen, seen = Model(make), Model(make), Seen(), Seen()
    callback = FusedOptimizers(implementation)
    fit(plain, plain_seen)
    trainer = fit(ours, callback, seen)
    name = type(trainer.optimizers[0]).__name__
    assert callback.changes == [Change("trainer.optimizers[0]", f"{name}, {implementation}")]
    assert seen.fused == [True if implementation == "fused" else None]
    torch.testing.assert_close(dict(ours.named_parameters()), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)
    assert seen.saved["param_groups"] == plain_seen.saved["param_groups"]
    torch.testing.assert_close(seen.saved["state"], plain_seen.saved["state"], rtol=1e-5, atol=1e-6)
    assert trainer.optimizers[0].param_groups[0]["fused"] is None, "given back as it was made"


@pytest.mark.parametrize("make", FUSIBLE)
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_checkpoints_resume_with_and_without_it(make: Any, first: bool, second: bool, tmp_path: Any) -> None:
    whole, part, rest = Model(make), Model(make), Model(make)
    fit(whole)
    fit(part, *([FusedOptimizers()] if first else []), max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    seen = Seen()
    fit(rest, *([FusedOptimizers()] if second else []), seen, checkpoint=tmp_path / "one.ckpt")
    assert seen.fused == [True if second else None]
    torch.testing.assert_close(dict(rest.named_parameters()), dict(whole.named_parameters()), rtol=1e-5, atol=1e-6)


def test_clipping_under_mixed_precision_works_unlike_with_optimizers_made_fused() -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 0.01}
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Model(lambda params: AdamW(params, lr=0.01, fused=True)), **options)
    plain, ours = Model(), Model()
    fit(plain, **options)
    fit(ours, FusedOptimizers(), **options)
    torch.testing.assert_close(dict(ours.named_parameters()), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_comes_late_finds_its_fused_buffer() -> None:
    made = []
    for is_fused in (True, False):
        params = parameters()
        optimizer = SGD(params, lr=0.1, momentum=0.9)
        if is_fused:
            use(optimizer, "fused")
        for step in range(4):
            for index, param in enumerate(params):
                param.grad = None if step < 2 and index == 1 else torch.full_like(param, 1.0 + step)
            optimizer.step()
        made.append([p.detach() for p in params])
    torch.testing.assert_close(made[0], made[1], rtol=1e-6, atol=1e-6)


FEW = ((3, 2), (2,), (1, 1))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in FEW]


def frozen(params: list[nn.Parameter], **options: Any) -> SGD:
    params[0].requires_grad_(False)
    return SGD(params, lr=0.1, **options)


@pytest.mark.parametrize(
    ("make", "implementation", "reason"),
    [
        (lambda p: RMSprop(p), "fused", "RMSprop is none of torch's SGD, Adam and AdamW"),
        (lambda p: LAMB(p), "fused", "LAMB is none of torch's SGD, Adam and AdamW"),
        (
            lambda p: AdamW(p, foreach=False),
            "fused",
            "AdamW was made with an implementation of the user's choice (fused, foreach or differentiable)",
        ),
        (
            lambda p: SGD(p, momentum=0.9, dampening=0.1),
            "fused",
            "SGD has dampening, with which torch's first fused step can't be prepared for late gradients",
        ),
        (
            lambda p: frozen(p, momentum=0.9),
            "fused",
            "SGD has momentum and frozen parameters, whose first gradient torch's fused step could not take",
        ),
        (
            lambda p: Adam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]),
            "fused",
            "Adam has complex parameters, and the fused kernels take real ones",
        ),
        (
            lambda p: Adam([{"params": p, "lr": torch.tensor(0.1)}]),
            "foreach",
            "Adam's lr is a tensor, which foreach takes with capturable=True only",
        ),
        (lambda p: frozen(p), "fused", None),
        (lambda p: frozen(p, momentum=0.9), "foreach", None),
    ],
)
def test_which_optimizers_can_have_an_implementation(make: Any, implementation: Any, reason: str | None) -> None:
    assert why_not(make(parameters()), implementation) == reason


def test_optimizers_are_found_in_every_form_that_lightning_takes() -> None:
    one, two = (SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    scheduler = LambdaLR(one, lambda epoch: 1.0)
    as_mapping = {"optimizer": one, "lr_scheduler": {"scheduler": scheduler}}
    for form in (one, [one], (one,), as_mapping, ([one], [scheduler])):
        assert list(optimizers_in(form)) == [one]
    assert list(optimizers_in(({"optimizer": one}, {"optimizer": two}))) == [one, two]
    assert list(optimizers_in(None)) == []


def check(module: pl.LightningModule, **config: Any) -> Any:
    optimization = FusedOptimizersOptimization(FusedOptimizersConfig(**config))
    verdict = optimization.check(Context(module, Data(), CPU))
    return verdict, optimization.callback.implementation


def step_times(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Let the probe's samples in one direction be these: plain, then each implementation."""
    order = [*times, *reversed(times)]
    monkeypatch.setattr(StepProbe, "sample_ms", lambda self, prepare=None, **options: [order.pop(0)])


def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    step_times(monkeypatch, 4.0, 1.0, 2.0)
    note = "measured plain 4 ms, fused 1 ms, foreach 2 ms a step of the optimizer"
    assert check(Model()) == (Applies(f"fused; {note}"), "fused")
    step_times(monkeypatch, 4.0, 3.0, 2.0)
    assert check(Model())[1] == "foreach"
    step_times(monkeypatch, 4.0, 2.0)
    note = "foreach; measured plain 4 ms, foreach 2 ms a step of the optimizer"
    assert check(Model(), fused=False) == (Applies(note), "foreach")


@pytest.mark.parametrize(("fused", "gain"), [(3.8, "+5%"), (6.0, "-50%")])
def test_it_refuses_where_none_is_faster(monkeypatch: pytest.MonkeyPatch, fused: float, gain: str) -> None:
    step_times(monkeypatch, 4.0, fused, 8.0)
    assert check(Model())[0] == Refuses(
        f"not faster here: plain 4 ms, fused {fused:.3g} ms, foreach 8 ms a step of the optimizer ({gain}, at least "
        "+10% wanted)"
    )
    step_times(monkeypatch, 4.0, fused, 8.0)
    assert isinstance(check(Model(), least_gain=-1.0)[0], Applies)


def test_a_real_measurement_gives_a_verdict_with_times() -> None:
    verdict, _ = check(Model(FUSIBLE[3]), least_gain=-1e9)
    assert isinstance(verdict, Applies)
    assert "measured plain " in verdict.note


class AsksItsTrainer(Model):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1 / float(self.trainer.estimated_stepping_batches))


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2, sparse=True)


class HasNone(pl.LightningModule):
    pass


@pytest.mark.parametrize(
    ("module", "config", "begins", "ends"),
    [
        (HasNone(), {}, "HasNone has no configure_optimizers, ", "there is no optimizer to speed up"),
        (Model(lambda params: RMSprop(params)), {}, "RMSprop is none of torch's", "SGD, Adam and AdamW"),
        (
            AsksItsTrainer(),
            {},
            "AsksItsTrainer gives no optimizer to measure before there is a Trainer (RuntimeError: ",
            "; set optimizations.optimizers.measure=false to use it unmeasured",
        ),
        (Sparse(), {"foreach": False}, "the embedding 'words' has sparse gradients", "which no fused step takes"),
    ],
)
def test_refusals(module: pl.LightningModule, config: dict[str, Any], begins: str, ends: str) -> None:
    verdict, _ = check(module, **config)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith(begins)
    assert verdict.reason.endswith(ends)


def test_unmeasured_as_asked_it_acts_on_what_asks_its_trainer() -> None:
    assert check(AsksItsTrainer(), measure=False) == (Applies("fused; not measured, as asked"), "fused")
    callback = FusedOptimizers()
    fit(AsksItsTrainer(), callback)
    assert callback.changes == [Change("trainer.optimizers[0]", "SGD, fused")]


def test_asked_for_where_it_can_do_nothing() -> None:
    with pytest.raises(OptimizationError) as caught:
        fit(Model(lambda params: RMSprop(params)), FusedOptimizers())
    assert str(caught.value) == (
        "optimizers: no step can be fused here: RMSprop is none of torch's SGD, Adam and AdamW; leave it out."
    )
    with pytest.raises(
        ConfigError, match=r"^optimizations\.optimizers: fused and foreach are both false, which leaves"
    ):
        FusedOptimizersConfig(fused=False, foreach=False)
