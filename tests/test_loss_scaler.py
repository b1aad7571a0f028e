"""The loss scaler on the device equals torch's GradScaler bit for bit and waits for nothing."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from scaled_runs import FUSED, INF, LATER, NAN, OPTIMIZERS, OVERFLOWS, Run, bits, scaler_of
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler, take_over_precision
from fasttrain.errors import OptimizationError

STEPS = 60


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's value on the host, each of which is a wait for the device on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


CLIPPED = [(name, clip) for name in ("nesterov", "adamw", *FUSED) for clip in ("norm", "value")]


@pytest.mark.parametrize(("name", "clip"), [*((name, None) for name in [*OPTIMIZERS, *FUSED]), *CLIPPED])
def test_every_step_equals_torchs_scaler(name: str, clip: str | None) -> None:
    make = (OPTIMIZERS | FUSED)[name]
    plain, ours = Run(make, scaler_of(GradScaler)), Run(make, scaler_of(DeviceGradScaler))
    overflows = LATER if name in FUSED else OVERFLOWS
    scales = []
    for step in range(STEPS):
        for run in (plain, ours):
            clips = {
                "norm": lambda run=run: nn.utils.clip_grad_norm_(run.net.parameters(), 0.1),
                "value": lambda run=run: nn.utils.clip_grad_value_(run.net.parameters(), 0.01),
            }
            run.step(overflows.get(step, 1.0), clips.get(clip or ""))
        assert ours.held() == plain.held(), step
        scales.append(ours.scaler.get_scale())
    assert any(a < b for a, b in pairwise(scales)), "the scale never grew"
    assert any(a > b for a, b in pairwise(scales)), "the scale never shrank"


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS | FUSED if name not in ("steps_on_host", "keeps_a_list")])
def test_the_host_is_not_asked_once_there_is_state(name: str) -> None:
    run = Run((OPTIMIZERS | FUSED)[name], scaler_of(DeviceGradScaler))
    assert run.scaler.waits_for_host == "no step has been taken yet"
    run.step()
    with HostReads() as own:
        run.optimizer.step()  # Adam on a CPU reads its step count
    for factor in (1.0, INF, 1.0, NAN):
        before = run.held()
        with HostReads() as reads:
            run.step(factor, lambda: nn.utils.clip_grad_norm_(run.net.parameters(), 0.1))
        assert run.scaler.waits_for_host is None
        skipped = factor != 1.0
        assert (run.held()["params"] == before["params"]) == skipped
        assert reads.count == own.count


def test_what_makes_a_step_wait_is_said() -> None:
    reasons = {}
    for name in ("momentum", "steps_on_host", "keeps_a_list"):
        run = Run(OPTIMIZERS[name], scaler_of(DeviceGradScaler))
        for step in range(2):
            run.step()
            reasons[name, step] = run.scaler.waits_for_host
    hooked = Run(OPTIMIZERS["momentum"], scaler_of(DeviceGradScaler))
    hooked.optimizer.register_step_post_hook(lambda *_: None)
    hooked.step()
    assert hooked.scaler.waits_for_host == "it has step hooks, which must not run in a skipped step"
    assert reasons == {
        ("momentum", 0): "its last step made or replaced 'momentum_buffer' on the host",
        ("momentum", 1): None,
        ("steps_on_host", 0): "its last step made or replaced 'step', 'mean' on the host",
        ("steps_on_host", 1): "its last step made or replaced 'step', 'mean' on the host",
        ("keeps_a_list", 0): "its last step made or replaced 'history' on the host",
        ("keeps_a_list", 1): "it keeps 'history' in a list, of which no copy is made",
    }


@pytest.mark.parametrize("name", ["momentum", "dampening", "adamw", *FUSED])
def test_a_skipped_first_step_leaves_no_state(name: str) -> None:
    run = Run((OPTIMIZERS | FUSED)[name], scaler_of(DeviceGradScaler))
    run.step(INF)
    assert not run.optimizer.state
    assert run.scaler.waits_for_host is not None
    never_skipped = Run((OPTIMIZERS | FUSED)[name], scaler_of(GradScaler, init_scale=2.0**15))
    for _ in range(3):
        run.step()
        never_skipped.step()
        assert run.held()["params"] == never_skipped.held()["params"]
        assert run.held()["state"] == never_skipped.held()["state"]


def test_a_parameter_that_gets_its_first_gradient_late() -> None:
    runs = [Run(OPTIMIZERS["dampening"], scaler_of(kind)) for kind in (GradScaler, DeviceGradScaler)]
    plain, ours = runs
    for step, factor in enumerate((1.0, 1.0, INF, 1.0, INF, 1.0)):
        for run in runs:
            run.net[0].bias.requires_grad_(step >= 2)
            run.step(factor)
        assert (ours.scaler.waits_for_host is None) == (step not in (0, 2, 3))
        assert ours.held() == plain.held()


def test_bits_are_kept_not_computed() -> None:
    parameter = nn.Parameter(torch.tensor([-0.0, NAN, INF, 1e-45]))
    before = bits(parameter)
    scaler = scaler_of(DeviceGradScaler)
    optimizer = SGD([parameter], lr=0.1)
    scaler.scale((parameter * torch.tensor([1.0, 1.0, INF, 1.0])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bits(parameter) == before
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("steps", [0, 3])
def test_taking_over_and_handing_back(steps: int) -> None:
    settings = {"init_scale": 2.0**10, "growth_factor": 3.0, "backoff_factor": 0.25}
    untouched, plain = (Run(OPTIMIZERS["momentum"], scaler_of(GradScaler, **settings)) for _ in range(2))
    handed_over = plain.scaler
    for run in (untouched, plain):
        for _ in range(steps):
            run.step()
    ours = plain.scaler = DeviceGradScaler.taking_over(handed_over)
    assert ours.state_dict() == handed_over.state_dict()
    for factor in (1.0, INF, 1.0):
        plain.step(factor)
        untouched.step(factor)
    ours.hand_back(handed_over)
    assert "waits_for_host" not in vars(handed_over)
    plain.scaler = handed_over
    for _ in range(6):
        plain.step()
        untouched.step()
        assert plain.held() == untouched.held()
    assert ours.get_scale() != handed_over.get_scale(), "they share no memory"


def test_a_disabled_scaler_stays_disabled() -> None:
    ours = DeviceGradScaler.taking_over(GradScaler("cpu", enabled=False))
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    ours.step(SGD([parameter], lr=1.0))
    ours.update()
    assert not ours.is_enabled()
    assert parameter.item() == 0


def test_a_scaler_with_rules_of_its_own_is_not_taken_over() -> None:
    class Sharded(GradScaler):
        pass

    with pytest.raises(OptimizationError) as refusal:
        DeviceGradScaler.taking_over(Sharded("cpu"))
    assert str(refusal.value).startswith("cuda_graph_step: the loss scaler is a ")
    assert "Sharded, and only torch.amp.GradScaler has a counterpart" in str(refusal.value)
    plugin = MixedPrecision("16-mixed", "cpu", scaler := Sharded("cpu"))
    take_over_precision(plugin)()
    assert plugin.scaler is scaler
