"""The precision room: candidates by device, the choice among measured times, and when it refuses."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.precision import PrecisionConfig, PrecisionOptimization, candidates_for, fastest_precision
from fasttrain.callbacks.precision.choice import BF16, FP16, FP32
from fasttrain.callbacks.precision.reference import TOLERANCE, reference
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, DataError
from fasttrain.measure import StepProbe, Timing
from fasttrain.optimization import Applies, Change, Context, ExampleBatch, Refuses

CPU = Hardware("cpu", "cpu", "a CPU", 2)
BOTH = ("bf16-mixed", "16-mixed")


def gpu(*capability: int) -> Hardware:
    return Hardware("gpu", "cuda:0", "a GPU", 8, (capability[0], capability[1]))


@pytest.mark.parametrize(
    ("hardware", "allowed", "expected"),
    [
        (gpu(9, 0), BOTH, [FP32, BF16, FP16]),
        (gpu(8, 0), BOTH, [FP32, BF16, FP16]),
        (gpu(7, 5), BOTH, [FP32, FP16]),
        (gpu(6, 1), BOTH, [FP32]),
        (CPU, BOTH, [FP32, BF16]),
        (gpu(9, 0), ("16-mixed",), [FP32, FP16]),
        (gpu(9, 0), (), [FP32]),
    ],
)
def test_candidates(hardware: Hardware, allowed: Any, expected: Any) -> None:
    assert candidates_for(hardware, allowed) == expected


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().square().mean()  # type: ignore[no-any-return]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 16)), batch_size=8)


def test_times_are_sorted_and_the_module_is_left_alone() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    timed = fastest_precision(module, [torch.randn(8, 16)], CPU)
    assert {candidate.name for candidate, _ in timed} == {"32-true", "bf16-mixed"}
    assert timed[0][1].median_ms <= timed[1][1].median_ms
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_step_in_bf16_is_near_the_reference() -> None:
    torch.manual_seed(0)
    module, batch = Net(), [torch.randn(8, 16)]
    expected = torch.autograd.grad(reference(module, batch), list(module.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = module.training_step(batch, 0)
    found = torch.autograd.grad(loss, list(module.parameters()))
    largest = max(float(grad.abs().max()) for grad in expected)
    for one, other in zip(expected, found, strict=True):
        assert float((one - other).abs().max()) <= TOLERANCE[torch.bfloat16] * largest


def optimization(**config: Any) -> PrecisionOptimization:
    return PrecisionOptimization(PrecisionConfig(**config))


def context(hardware: Hardware = CPU, data: Any = None, module: Any = None, **options: Any) -> Context:
    data = data or Data()
    return Context(module or Net(), data, hardware, **{"example": ExampleBatch(data), **options})


def says(monkeypatch: pytest.MonkeyPatch, **ms: float) -> None:
    """Let the probe report these times: fp32, bf16, fp16."""
    by_type = {None: ms["fp32"], torch.bfloat16: ms.get("bf16"), torch.float16: ms.get("fp16")}

    def timed(self: StepProbe, autocast: Any = None, **options: Any) -> Timing:
        value = by_type[autocast]
        assert value is not None
        return Timing(value, value, value, 7)

    monkeypatch.setattr(StepProbe, "__call__", timed)


@pytest.mark.parametrize(
    ("times", "config", "chosen"),
    [
        ({"fp32": 10.0, "bf16": 5.0, "fp16": 5.0}, {}, "bf16-mixed"),
        ({"fp32": 10.0, "bf16": 5.0, "fp16": 4.9}, {}, "bf16-mixed"),  # fp16 has to be worth its loss scaling
        ({"fp32": 10.0, "bf16": 5.0, "fp16": 4.0}, {}, "16-mixed"),
        ({"fp32": 10.0, "bf16": 20.0, "fp16": 4.0}, {}, "16-mixed"),
        ({"fp32": 10.0, "bf16": 5.0, "fp16": 4.0}, {"allowed": ["bf16-mixed"]}, "bf16-mixed"),
        ({"fp32": 10.0, "bf16": 9.7, "fp16": 9.8}, {"least_gain": 0.01}, "bf16-mixed"),
        ({"fp32": 10.0, "bf16": 9.7, "fp16": 9.8}, {}, None),
        ({"fp32": 10.0, "bf16": 20.0, "fp16": 20.0}, {}, None),
    ],
)
def test_the_choice(monkeypatch: pytest.MonkeyPatch, times: Any, config: Any, chosen: str | None) -> None:
    says(monkeypatch, **times)
    room = optimization(**config)
    verdict = room.check(context(gpu(9, 0)))
    if chosen is None:
        assert isinstance(verdict, Refuses)
        assert verdict.reason.startswith("fp32 is the fastest here, or as fast: ")
        assert list(room.applied()) == []
        return
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith(f"{chosen}; measured ")
    assert room.attach(context()).trainer_options == {"precision": chosen}
    assert list(room.applied()) == [Change("trainer.precision", chosen)]


def test_the_words_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, fp32=10.0, bf16=85.5)
    assert optimization().check(context()) == Refuses(
        "fp32 is the fastest here, or as fast: 32-true 10 ms, bf16-mixed 85.5 ms a step"
    )


def test_what_someone_wrote_is_not_overridden() -> None:
    verdict = optimization().check(context(precision="bf16-true"))
    assert verdict == Refuses("trainer.precision=bf16-true is set by the configuration already")


class AsksItsTrainer(Data):
    def train_dataloader(self) -> Any:
        return self.trainer.world_size  # type: ignore[union-attr]


class StepAsksItsTrainer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.tensor(float(self.trainer.global_step))


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({"example": None}, "there is no batch to measure with; set trainer.precision instead"),
        ({"data": AsksItsTrainer()}, "AsksItsTrainer gives no batch to measure with before there is a Trainer ("),
        ({"module": StepAsksItsTrainer()}, "the step could not be measured outside of a Trainer (RuntimeError: "),
    ],
)
def test_refusals(options: Any, begins: str) -> None:
    verdict = optimization().check(context(**options))
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith(begins)
    assert verdict.reason.endswith("set trainer.precision instead")


def test_bad_data_is_no_refusal() -> None:
    class Bad(Data):
        def train_dataloader(self) -> Any:
            raise DataError("a.jpg is broken")

    with pytest.raises(DataError, match=r"^a\.jpg is broken$"):
        optimization().check(context(data=Bad()))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("fp8", "known: 16-mixed, bf16-mixed"), ("bf16-mixd", "did you mean 'bf16-mixed'?"), ("32-true", "known: ")],
)
def test_a_precision_that_is_none(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PrecisionConfig(allowed=[name])
    said = str(caught.value)
    assert said.startswith(f"optimizations.precision.allowed: '{name}' is no mixed precision; ")
    assert hint in said or name == "32-true"
