"""graph_evaluation on a CPU, where a replay runs the call again: the bookkeeping, and that training never notices."""

import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.graph_evaluation import GraphedEvaluation
from fasttrain.callbacks.graph_evaluation.captured_call import CapturedCall
from fasttrain.callbacks.graph_evaluation.places import places
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.randomness import random_state
from fasttrain.recipes.retinanet import bench_evaluation
from fasttrain.recipes.retinanet.model import RetinaNetConfig
from fasttrain.recipes.retinanet.module import RetinaNetTraining, TrainingConfig

CPU = torch.device("cpu")
ROWS = torch.randn(22, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 6))


class Plain(pl.LightningModule):
    """A user's module: networks as children, the step's result kept and logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.found = Net(), list[Tensor]()
        self.kept: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        result = self.net(batch[0])
        self.kept.append(result)
        self.log("val", result.mean())

    def on_validation_epoch_end(self) -> None:
        self.found += [each.clone() for each in self.kept]
        self.kept.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(module: pl.LightningModule, *callbacks: pl.Callback, epochs: int = 3, **options: Any) -> pl.Trainer:
    torch.manual_seed(1)
    training = DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True, drop_last=True)
    evaluation = DataLoader(TensorDataset(ROWS), batch_size=5)  # the last batch has two rows
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, training, evaluation)
    return trainer


def made(kind: type[Plain] = Plain) -> Plain:
    torch.manual_seed(0)
    return kind()


def assert_same_states(one: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert list(state) == list(one.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluations_find_the_same_and_training_never_notices(inference_mode: bool) -> None:
    plain, ours, graphs = made(), made(), GraphedEvaluation(stand_in=True)
    fitted(plain, inference_mode=inference_mode)
    state = random_state()
    fitted(ours, graphs, inference_mode=inference_mode)
    assert torch.equal(state["torch"], random_state()["torch"])
    assert_same_states(plain, ours)
    assert len(ours.found) == 2 + 3 * 5
    assert all(map(torch.equal, ours.found, plain.found)), "what a step keeps is its own, whatever is replayed later"
    assert {name: [row[2:] for row in graphs.table().rows] for name in ("net",)} == {
        "net": [(12 - 2 - 1, 2, 1), (1, 1, 1)]
    }
    assert not graphs.notes
    assert "forward" not in vars(ours.net)


def test_a_fit_without_evaluation_trains_to_the_same_weights() -> None:
    """The loader of an evaluation draws a seed, so it is given a generator of its own."""
    with_evaluation, without = made(), made()
    for module, options in ((with_evaluation, {}), (without, {"limit_val_batches": 0})):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(5)
        training = DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True, drop_last=True)
        evaluation = DataLoader(TensorDataset(ROWS), batch_size=5, generator=generator)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=3, callbacks=[GraphedEvaluation(stand_in=True)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(module, training, evaluation)
    assert_same_states(with_evaluation, without)


class Averaged(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def test_averaged_weights_that_are_swapped_in_are_evaluated() -> None:
    plain, ours, graphs = made(), made(), GraphedEvaluation(stand_in=True)
    fitted(plain, Averaged())
    fitted(ours, Averaged(), graphs)
    assert all(map(torch.equal, ours.found, plain.found))
    assert sum(row[2] for row in graphs.table().rows) > 5


def installed(module: pl.LightningModule, **options: Any) -> tuple[CapturedCall, list[str]]:
    notes: list[str] = []
    (place,) = places(module)
    call = CapturedCall(place, CPU, options.pop("max_graphs", 4), True, True, notes.append, [])
    call.install()
    return call, notes


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("without_gradients")
def test_weights_at_other_addresses_modes_and_autocast_have_graphs_of_their_own() -> None:
    module = made().eval()
    call, notes = installed(module)
    replays = [call.pool.hits]

    def several() -> int:
        results = [module.net(ROWS) for _ in range(4)]
        replays.append(call.pool.hits)
        assert all(torch.equal(result, call.plain(ROWS)) for result in results)
        return replays[-1] - replays[-2]

    assert several() == 4 - 2 - 1
    own = [parameter.data for parameter in module.net.parameters()]
    for parameter in module.net.parameters():
        parameter.data = parameter.data * 2
    assert several() == 4 - 1 - 1
    for parameter, before in zip(module.net.parameters(), own, strict=True):
        parameter.data = before
    assert several() == 4, "the first ones' graph is there still"
    with torch.autocast("cpu", torch.bfloat16):
        several()
    module.net[1].train()
    several()
    assert call.pool.captures == 4
    assert not notes


@pytest.mark.usefixtures("without_gradients")
def test_an_attribute_that_changes_between_evaluations_is_not_built_in() -> None:
    module = made().eval()
    call, _ = installed(module)
    for _ in range(4):
        module.net(ROWS)
    call.remove()
    assert len(call.pool) == 1
    module.net[1].eps = 0.5
    call.install()
    assert len(call.pool) == 0
    assert torch.equal(module.net(ROWS), call.plain(ROWS))


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(())


class DrawsOnTheHost(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random() + np.random.rand()


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class TakesAnything(nn.Linear):
    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        return super().forward(x)


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize(
    ("net", "given", "reason"),
    [
        (Draws(6, 6), {}, "net runs eagerly, since it draws random numbers (torch)"),
        (DrawsOnTheHost(6, 6), {}, "net runs eagerly, since it draws random numbers (python, numpy)"),
        (Counts(6, 6), {}, "net runs eagerly, since it changes the attribute 0.calls"),
        (TakesAnything(6, 6), {"how": object()}, "since its input [1]['how'] is a builtins.object, which a graph"),
    ],
)
def test_what_a_replay_would_not_repeat_stays_eager(net: nn.Module, given: dict[str, Any], reason: str) -> None:
    module = made().eval()
    module.net = net  # type: ignore[assignment]
    call, notes = installed(module)
    wanted_calls = 5
    for number in range(1, wanted_calls + 1):
        result = module.net(ROWS, **given)
        if isinstance(net, Counts):
            assert torch.equal(result, nn.Linear.forward(net, ROWS) * number)
    (note,) = notes
    assert reason in note
    assert call.pool.hits == call.pool.captures == 0


@pytest.mark.usefixtures("without_gradients")
def test_hooks_inside_stay_heard_and_so_do_those_on_the_network() -> None:
    module, heard = made().eval(), list[str]()
    module.net.register_forward_hook(lambda *_: heard.append("outside"))
    _, notes = installed(module)
    for _ in range(4):
        module.net(ROWS)
    assert heard == ["outside"] * 4
    assert not notes
    watched = made().eval()
    watched.net[0].register_forward_hook(lambda *_: heard.append("inside"))
    _, notes = installed(watched)
    assert notes == ["net runs eagerly, since 'net.0' is watched by hooks, which a replay would not call"]
    watched.net(ROWS)
    assert heard[-1] == "inside"


def test_gradients_are_never_captured_away() -> None:
    module = made().eval()
    call, _ = installed(module)
    for _ in range(5):
        module.net(ROWS).sum().backward()
    assert module.net[0].weight.grad is not None
    assert not call.pool.tallies


def test_networks_are_found() -> None:
    class Several(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.heads = nn.Sequential(self.net), nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 2)])
            self.loss = nn.MSELoss()

    assert [place.path for place in places(made(Several))] == ["whole", "heads.0", "heads.1"]
    with pytest.raises(OptimizationError, match=r"LightningModule has no network .* evaluate_batch\(batch\).*leave it"):
        GraphedEvaluation().setup(pl.Trainer(accelerator="cpu", logger=False), pl.LightningModule(), "fit")
    with pytest.raises(ConfigError, match=r"graph_evaluation\.max_graphs is 0; it must be at least 1"):
        GraphedEvaluation(max_graphs=0)


class Breaks(Plain):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking and batch_idx == 4:
            raise RuntimeError("the disk is full")


def test_after_an_exception_the_module_is_its_own() -> None:
    module = made(Breaks)
    with pytest.raises(RuntimeError, match="the disk is full"):
        fitted(module, GraphedEvaluation(stand_in=True))
    assert "forward" not in vars(module.net)


def test_on_a_cpu_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graphs = GraphedEvaluation()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fitted(made(), graphs, epochs=1)
    assert not graphs.calls
    assert "GraphedEvaluation: this run is on the cpu, without CUDA graphs; nothing changes." in caplog.text


def test_a_retinanets_rows_are_the_same() -> None:
    config = RetinaNetConfig(
        num_classes=3, backbone="small", image_size=(64, 64), fpn_channels=16, head_depth=1, score_threshold=0.0,
        topk_candidates=20, detections_per_image=15,
    )  # fmt: skip
    torch.manual_seed(0)
    module = RetinaNetTraining(TrainingConfig(config)).eval()
    batches = [
        {
            "images": torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8),
            "image_id": torch.tensor([2 * index, 2 * index + 1]),
            "original_size": torch.tensor([[128, 96], [64, 64]]),
            "bad_image_id": torch.tensor([-1, 7 if index == 3 else -1]),
        }
        for index in range(5)
    ]

    def rows() -> list[Any]:
        for index, batch in enumerate(batches):
            module.validation_step(batch, index)
        return module.validation_rows()

    with torch.inference_mode():
        plain = rows()
        call, notes = installed(module)
        ours = rows()
    assert call.pool.hits == 2
    assert not notes
    assert min(len(each) for each in plain) > 5
    assert set(plain[3][:, 0]) == {6.0}, "nothing is found in an image that can't be used"
    for one, other in zip(plain, ours, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_bench_of_an_evaluation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_evaluation, "BATCHES", 3)
    monkeypatch.setattr(bench_evaluation, "PASSES", 1)
    config = RetinaNetConfig(
        num_classes=3, backbone="small", image_size=(64, 64), fpn_channels=8, head_depth=1, topk_candidates=20,
        detections_per_image=15,
    )  # fmt: skip
    rows = list(bench_evaluation.rows_on(CPU, config, size=2, candidates=40, repeats=1))
    assert [row.variant for row in rows] == ["plain", "batched_nms", "graph_evaluation", "ours"]
    assert len({row.note.rsplit(",", 1)[1] for row in rows}) == 1, "the same number of detections"
    assert " 0 detections" not in rows[0].note
