"""What holds for every room that replaces modules: training goes on as before, and everything can be put back."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from everything import Data, Module, NothingToDo
from torch import nn

from fasttrain.callbacks import CATALOGUE
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Context, ExampleBatch, Refuses
from fasttrain.patches import PatchCallback, PatchOptimization
from fasttrain.plan import requested

# A device on which every room says yes, and that is here; a room that needs 16 bits is asked about a run with them.
HERE = Hardware("cpu", "cpu", "a CPU", 2, capability=(9, 0))
every_room = pytest.mark.parametrize(
    "name", [name for name, room in CATALOGUE.items() if issubclass(room, PatchOptimization)]
)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def optimization(name: str, **config: Any) -> PatchOptimization[Any]:
    ((made,), _) = requested({name: config}, CATALOGUE)
    assert isinstance(made, PatchOptimization)
    return made


def trained(callback: PatchCallback | None = None) -> tuple[Module, list[float]]:
    torch.manual_seed(0)
    module, losses = Module(dropout=0.0), Losses()
    callbacks = [losses, *([] if callback is None else [callback])]
    pl.Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, max_epochs=2, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(module, datamodule=Data())  # fmt: skip
    return module, losses.seen


def types_of(module: nn.Module) -> dict[str, type[nn.Module]]:
    return {path: type(part) for path, part in module.named_modules()}


@pytest.fixture(scope="module")
def plain() -> tuple[Module, list[float]]:
    return trained()


@every_room
def test_it_trains_the_same_and_can_be_undone(name: str, plain: tuple[Module, list[float]]) -> None:
    callback = optimization(name).callback
    module, losses = trained(callback)
    assert losses == pytest.approx(plain[1], rel=1e-4)
    assert len(set(losses)) == len(losses), "something is learned"
    changes = callback.changes
    assert changes
    assert all(type(module.get_submodule(change.path)).__name__ == change.what for change in changes)
    callback.setup(None, module, "validate")  # type: ignore[arg-type]
    assert callback.changes == changes, "a second stage finds them replaced"
    assert list(module.state_dict()) == list(plain[0].state_dict())
    for (key, one), other in zip(module.state_dict().items(), plain[0].state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    callback.undo()
    assert types_of(module) == types_of(plain[0])


@every_room
def test_the_callback_refuses_a_module_without_a_site(name: str) -> None:
    with pytest.raises(OptimizationError, match=rf"^{name}: NothingToDo has no .*; leave it out\.$"):
        optimization(name).callback.setup(None, NothingToDo(), "fit")  # type: ignore[arg-type]


@every_room
@pytest.mark.parametrize("ours_ms", [5.0, 9.9])
def test_its_door_believes_what_it_measures(name: str, ours_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(self: StepProbe, prepare: Any = None, autocast: Any = None, **options: Any) -> list[float]:
        if prepare is None:
            return [10.0]
        before = types_of(copied := Module())
        prepare(copied, None)
        assert types_of(copied) != before, "what is timed is the fused form"
        return [ours_ms]

    monkeypatch.setattr(StepProbe, "sample_ms", timed)
    asked = frozenset({"channels_last"})
    verdict = optimization(name).check(
        Context(Module(), Data(), HERE, "bf16-mixed", example=ExampleBatch(Data()), asked_for=asked)
    )
    if ours_ms == 5.0:
        assert isinstance(verdict, Applies)
        assert verdict.note.endswith("sites; measured 5 ms a step against 10 (2.00 times)")
    else:
        assert verdict == Refuses("not faster here: 9.9 ms a step against 10 (+1%, at least +2% wanted)")
