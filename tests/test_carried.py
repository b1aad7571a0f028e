"""State that a step carries to the next one in attributes, containers, objects and callbacks."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.carried import CarriedState, hanging_tensors
from fasttrain.errors import OptimizationError


class Carries(nn.Module):
    """Keeps state in every way but a buffer that changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.mean = torch.zeros(2)
        self.count = torch.zeros(())
        self.constant = torch.ones(())
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("in_place", torch.zeros(2))
        self.metric = MeanMetric()

    def step(self, x: Tensor) -> None:
        self.mean = 0.5 * self.mean + x
        self.count += 1
        self.average = 0.5 * self.average + x
        self.in_place.add_(x)
        self.metric.update(x)


def carried(module: Any, x: Tensor) -> CarriedState:
    state = CarriedState(module)
    state.before()
    module.step(x)
    state.after()
    return state


def test_what_is_set_anew_or_written_to_is_carried() -> None:
    module, x = Carries(), torch.tensor([1.0, 2.0])
    state = carried(module, x)
    assert set(state.static) == {"mean", "count", "average", "metric.mean_value", "metric.weight"}
    state.bind()
    assert module.mean is state.static["mean"]
    assert module.average is state.static["average"]
    assert module._buffers["average"] is state.static["average"]
    with state.metrics_kept():
        module.step(x)
        state.carry_over()
    assert module.mean is state.static["mean"], "which holds the new value"
    assert module.mean.tolist() == [1.5, 3.0]
    assert module.metric._update_count == 1
    state.count_updates()
    assert module.metric._update_count == 2
    assert module.metric.compute() == 1.5
    assert module.count == 2


def test_what_was_reset_in_between_starts_anew_at_the_same_address() -> None:
    module = Carries()
    state = carried(module, torch.ones(2))
    state.bind()
    address = module.mean.data_ptr()
    module.mean, module.count = torch.full((2,), 7.0), torch.tensor(3.0)
    module.metric.reset()
    state.bind()
    assert module.mean.data_ptr() == address
    assert module.mean.tolist() == [7.0, 7.0]
    assert module.count == 3
    assert module.metric.mean_value == 0
    module.mean = torch.zeros(2)
    state.bind(as_they_were=True)
    assert module.mean.tolist() == [7.0, 7.0]


def test_a_state_that_changes_its_shape_is_refused() -> None:
    module = Carries()
    state = carried(module, torch.ones(2))
    state.bind()
    module.mean = torch.zeros(3)
    with pytest.raises(OptimizationError) as caught:
        state.carry_over()
    assert str(caught.value) == (
        "the step turns mean from torch.float32 [2] into torch.float32 [3], and a captured step has one shape"
    )


def test_a_metric_that_keeps_everything_is_refused() -> None:
    class Keeps(Carries):
        def __init__(self) -> None:
            super().__init__()
            self.curve = BinaryAUROC()

        def step(self, x: Tensor) -> None:
            self.curve.update(x, x.int())

    with pytest.raises(OptimizationError) as caught:
        carried(Keeps(), torch.ones(2))
    assert str(caught.value) == (
        "the metric's state BinaryAUROC.preds is a list that grows with every step, which a replay can't do; give the "
        "metric `thresholds`, so that it counts in bins, or update it in on_train_batch_end"
    )


def test_a_tensor_on_the_host_is_refused() -> None:
    class OnTheHost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))
            self.stats = {"count": torch.zeros(())}

        def step(self, x: Tensor) -> None:
            self.stats["count"] += 1

    with pytest.raises(OptimizationError) as caught:
        carried(OnTheHost(), torch.ones(2))
    assert str(caught.value) == (
        "the step writes to stats['count'], which lies on the cpu, where a replay would not write; make it a buffer "
        "(register_buffer), or write to it in on_train_batch_end"
    )


class Ema:
    """Averages weights as many projects do by themselves."""

    def __init__(self, net: nn.Module, through_data: bool = False) -> None:
        self.net, self.through_data = net, through_data
        self.shadow = [parameter.detach().clone() for parameter in net.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        for mine, new in zip(self.shadow, self.net.parameters(), strict=True):
            if self.through_data:
                mine.data = mine.data.mul_(0.75).add_(0.25 * new.data)
            else:
                mine.lerp_(new, 0.25)


class Averages(Small):
    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.ema = Ema(self.net, through_data)
        self.seen = {"rows": [torch.zeros(())]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["rows"][0].add_(1)
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.ema.update()


class AveragesToo(pl.Callback):
    """Keeps a second network, of which the module knows nothing."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.copy = copy.deepcopy(pl_module.net)

    @torch.no_grad()
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        for mine, new in zip(self.copy.parameters(), pl_module.net.parameters(), strict=True):
            mine.lerp_(new, 0.5)


@pytest.mark.parametrize("through_data", [False, True])
def test_checking_a_replay_updates_nothing_twice(through_data: bool) -> None:
    ours, plain = same_start(lambda: Averages(through_data))
    graph, callbacks = CUDAGraphStep(stand_in=True), [AveragesToo(), AveragesToo()]
    assert_same_state(
        fit(ours, batches(9), graph, callbacks=callbacks[:1]), fit(plain, batches(9), callbacks=callbacks[1:])
    )
    assert graph.pool.hits > 10, graph.notes
    assert ours.seen["rows"] == plain.seen["rows"] == [torch.tensor(18.0)]
    for one, other in zip(ours.ema.shadow, plain.ema.shadow, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(callbacks[0].copy.parameters(), callbacks[1].copy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_hanging_tensors_are_found_by_their_paths() -> None:
    module = Carries()
    module.hidden = [nn.Linear(1, 1, bias=False)]
    module.ema = Ema(nn.Linear(2, 1, bias=False))
    module.loop = module.ema
    module.ema.loop = [module.ema, module, {"deep": (torch.ones(1),)}]
    module.optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module.long = list(range(100_000))
    assert set(hanging_tensors(module)) == {
        "hidden[0].weight", "loop.net.weight", "loop.shadow[0]", "loop.loop[2]['deep'][0]",
    }  # fmt: skip
