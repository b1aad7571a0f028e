"""channels_last: the body in any loop, the callback in a plain Trainer, and when the plan's door refuses."""

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.channels_last import (
    ChannelsLast,
    ChannelsLastConfig,
    ChannelsLastOptimization,
    batch_to_channels_last,
    to_channels_last,
)
from fasttrain.callbacks.channels_last.layout import convolutions_to_change, images_in, is_channels_last
from fasttrain.callbacks.channels_last.reference import TOLERANCE, reference
from fasttrain.environment import Hardware
from fasttrain.errors import DataError, OptimizationError
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Change, Context, ExampleBatch, Refuses

CPU = Hardware("cpu", "cpu", "a CPU", 2)
LAST = torch.channels_last


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4),
    )  # fmt: skip


def is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


def test_only_weights_whose_order_differs_are_changed() -> None:
    model = net()
    paths = ["0.weight", "3.weight", "5.weight"]  # a 1x1 and a depthwise weight have one order in both formats
    assert to_channels_last(model) == [Change(path, "channels_last") for path in paths]
    assert [name for name, p in model.named_parameters() if p.dim() == 4 and is_last(p)] == paths
    assert to_channels_last(model) == [], "a second time there is nothing left to change"
    assert is_channels_last(model)
    assert not is_channels_last(net())


def test_parameters_stay_the_same_objects_with_the_same_values() -> None:
    model = net()
    parameters, values = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    to_channels_last(model)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter, values[name])
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name])
    optimizer.step()
    assert not torch.equal(model[0].weight, values["0.weight"]), "an optimizer made earlier still trains them"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, ours = net().to(dtype), net().to(dtype)
    ours.load_state_dict(plain.state_dict())
    batch = torch.randn(4, 3, 16, 16, dtype=dtype)
    to_channels_last(ours)
    expected, found = reference(plain, batch), ours(batch_to_channels_last(batch))
    assert (expected - found).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    expected.square().mean().backward()
    found.square().mean().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters(), strict=True)]
    # Of all gradients: that of a bias before a batch norm is zero but for rounding.
    largest = max(float(one.abs().max()) for one, _ in gradients)
    for one, other in gradients:
        assert float((one - other).abs().max()) <= TOLERANCE[dtype] * largest


def test_weights_that_are_computed_are_left_alone() -> None:
    model = nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3)), nn.LazyConv2d(4, 3), nn.Conv1d(2, 2, 3), nn.Conv3d(2, 2, 3))
    assert convolutions_to_change(model) == []
    assert to_channels_last(model) == []


Pair = namedtuple("Pair", ["images", "labels"])


@dataclass
class Sample:
    images: Tensor
    name: str
    shape: Any = field(init=False, default=None)


class Bag(dict[str, Any]):
    """A mapping with more to it than its items."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin


def images() -> Tensor:
    return torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [x, "text", None],
        lambda x: (x,),
        lambda x: Pair(x, 3),
        lambda x: {"a": {"b": [x]}, "n": 3},
        lambda x: OrderedDict(a=x),
        lambda x: MappingProxyType({"a": x}),
        lambda x: Sample(x, "n"),
    ],
)
def test_images_are_found_in_any_batch(wrap: Any) -> None:
    batch = wrap(images())
    converted = batch_to_channels_last(batch)
    assert type(converted) is type(batch)
    (found,) = images_in(converted)
    assert is_last(found)
    assert torch.equal(found, images())
    (before,) = images_in(batch)
    assert before.is_contiguous(), "the batch itself is left as it was"


def test_mappings_keep_what_else_they_hold() -> None:
    grouped: defaultdict[str, Any] = defaultdict(list, images=images())
    converted = batch_to_channels_last(grouped)
    assert is_last(converted["images"])
    assert converted["other"] == []
    bag = Bag("camera")
    bag["images"] = images()
    assert batch_to_channels_last(bag).origin == "camera"
    assert is_last(batch_to_channels_last(bag)["images"])
    assert bag["images"].is_contiguous()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 1, 4, 4),  # one channel: both formats are one
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 4, 4, 4),
        torch.zeros(2, 3, 4, 4, dtype=torch.int64),
        torch.zeros(2, 3, 4, 4, dtype=torch.bool),
        "text",
        None,
    ],
)
def test_everything_else_is_handed_on_as_it_is(other: Any) -> None:
    assert batch_to_channels_last(other) is other
    assert list(images_in(other)) == []


def test_bytes_are_converted_too() -> None:
    assert is_last(batch_to_channels_last(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)))


class Classifier(pl.LightningModule):
    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.net = body or nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
        self.formats: list[tuple[str, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.formats.append(("train", is_last(batch[0])))
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.formats.append(("val", is_last(batch[0])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.channels = channels

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4, self.channels, 8, 8)), batch_size=2)

    val_dataloader = train_dataloader


def trainer(*callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, max_epochs=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip


def test_the_callback_in_a_plain_trainer() -> None:
    module, callback = Classifier(), ChannelsLast()
    trainer(callback).fit(module, datamodule=Data())
    assert set(module.formats) == {("train", True), ("val", True)}
    assert callback.changes == [Change("net.0.weight", "channels_last")]
    assert is_last(module.net[0].weight), "training kept the format"


def test_the_callback_works_for_a_second_trainer_and_a_second_module() -> None:
    module, callback = Classifier(), ChannelsLast()
    trainer(callback).fit(module, datamodule=Data())
    module.formats.clear()
    trainer(callback).validate(module, datamodule=Data(), verbose=False)
    trainer(ChannelsLast()).validate(module, datamodule=Data(), verbose=False)
    assert set(module.formats) == {("val", True)}
    other = Classifier()
    trainer(callback).fit(other, datamodule=Data())
    assert is_last(other.net[0].weight)


def test_the_callback_where_it_would_do_nothing() -> None:
    module = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2)))
    with pytest.raises(OptimizationError) as caught:
        trainer(ChannelsLast()).fit(module, datamodule=Data())
    assert str(caught.value) == (
        "channels_last: Classifier has no 2-d convolution whose weight would change; leave it out."
    )


def check(module: pl.LightningModule, data: pl.LightningDataModule | None, **config: Any) -> Any:
    example = ExampleBatch(data) if data is not None else None
    context = Context(module, data or Data(), CPU, example=example)
    return ChannelsLastOptimization(ChannelsLastConfig(**config)).check(context)


def probe_times(monkeypatch: pytest.MonkeyPatch, plain: float, ours: float) -> list[Any]:
    """Let the probe say that the plain step takes `plain` ms, and ours `ours`; return its calls."""
    calls: list[Any] = []

    def timed(self: StepProbe, prepare: Any = None, autocast: Any = None, **options: Any) -> list[float]:
        calls.append((prepare is not None, autocast))
        return [plain if prepare is None else ours]

    monkeypatch.setattr(StepProbe, "sample_ms", timed)
    return calls


def test_it_applies_where_it_measures_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = probe_times(monkeypatch, 10.0, 5.0)
    verdict = check(Classifier(), Data())
    assert verdict == Applies("1 convolution weights; measured 5 ms a step against 10 (2.00 times)")
    assert [ours for ours, _ in calls] == [False, True, True, False]


@pytest.mark.parametrize(("ours", "gain"), [(9.9, "+1%"), (10.0, "+0%"), (12.0, "-20%")])
def test_it_refuses_where_it_does_not(monkeypatch: pytest.MonkeyPatch, ours: float, gain: str) -> None:
    probe_times(monkeypatch, 10.0, ours)
    verdict = check(Classifier(), Data())
    assert verdict == Refuses(f"not faster here: {ours:.3g} ms a step against 10 ({gain}, at least +2% wanted)")
    probe_times(monkeypatch, 10.0, 9.9)
    assert isinstance(check(Classifier(), Data(), least_gain=0.005), Applies)


def test_it_measures_in_the_runs_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = probe_times(monkeypatch, 10.0, 5.0)
    context = Context(Classifier(), Data(), CPU, precision="bf16-mixed", example=ExampleBatch(Data()))
    ChannelsLastOptimization(ChannelsLastConfig()).check(context)
    assert [autocast for _, autocast in calls] == [torch.bfloat16] * 4


def test_a_real_measurement_gives_a_verdict_with_times() -> None:
    verdict = check(Classifier(), Data(), least_gain=-1e9)
    assert isinstance(verdict, Applies)
    assert "1 convolution weights; measured " in verdict.note
    verdict = check(Classifier(), Data(), least_gain=1.0)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith("not faster here: ")


class AsksItsTrainer(Data):
    def train_dataloader(self) -> Any:
        return self.trainer.world_size  # type: ignore[union-attr]


class StepAsksItsTrainer(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.tensor(float(self.trainer.global_step))


UNMEASURED = "set optimizations.channels_last.measure=false to use it unmeasured"


@pytest.mark.parametrize(
    ("module", "data", "begins", "ends"),
    [
        (
            Classifier(nn.Linear(2, 2)),
            Data(),
            "Classifier has no 2-d convolution whose weight would change",
            "would change",
        ),
        (Classifier(), None, "there is no batch to measure with; ", "measure=false to trust"),
        (Classifier(), Data(channels=1), "the batch holds no 4-d tensor of two or more channels", "fed to it"),
        (Classifier(), AsksItsTrainer(), "AsksItsTrainer gives no batch to measure with before there is a", UNMEASURED),
        (
            StepAsksItsTrainer(),
            Data(),
            "the step could not be measured outside of a Trainer (RuntimeError: ",
            UNMEASURED,
        ),
    ],
)
def test_refusals(module: pl.LightningModule, data: Any, begins: str, ends: str) -> None:
    verdict = check(module, data)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith(begins)
    assert verdict.reason.endswith(ends)


def test_bad_data_is_no_refusal() -> None:
    class Bad(Data):
        def train_dataloader(self) -> Any:
            raise DataError("a.jpg is broken")

    with pytest.raises(DataError, match=r"^a\.jpg is broken$"):
        check(Classifier(), Bad())


def test_unmeasured_as_asked() -> None:
    assert check(Classifier(), None, measure=False) == Applies("1 convolution weights; not measured, as asked")


def test_applied_is_what_the_callback_changed() -> None:
    optimization = ChannelsLastOptimization(ChannelsLastConfig(measure=False))
    module = Classifier()
    assert list(optimization.applied()) == []
    callbacks: Sequence[pl.Callback] = optimization.attach(Context(module, Data(), CPU)).callbacks
    trainer(*callbacks).fit(module, datamodule=Data())
    assert list(optimization.applied()) == [Change("net.0.weight", "channels_last")]
