"""The loss scaler on a GPU: torch's numbers, no wait for the host, and a whole step captured and replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler, take_over_precision
from fasttrain.errors import OptimizationError

pytestmark = pytest.mark.gpu

INF, NAN = float("inf"), float("nan")
# Not in the first steps, which leave torch's fused SGD with uninitialized memory.
OVERFLOWS = {4: INF, 5: NAN, 11: -INF, 20: NAN}
STEPS = 30

Make = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "fused_sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, capturable=True, foreach=True),
    "fused_adamw": lambda p: AdamW(p, lr=0.01, capturable=True, fused=True),
}


class Run:
    """A network of elementwise operations and sums, whose kernels are the same in a graph and out of it."""

    def __init__(self, make: Make, kind: type[GradScaler]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(n, generator=generator).cuda()) for n in (64, 64, 1)]
        self.inputs, self.factor = torch.randn(8, 64, generator=generator).cuda(), torch.ones((), device="cuda")
        self.optimizer, self.scaler = make(self.params), kind("cuda", growth_interval=3)

    def step(self) -> None:
        first, second, offset = self.params
        self.optimizer.zero_grad(set_to_none=True)
        loss = ((self.inputs * first).tanh() * second + offset).pow(2).mean() * self.factor
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.params, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def feed(self, step: int) -> None:
        self.inputs.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
        self.factor.fill_(OVERFLOWS.get(step, 1.0))

    def held(self) -> dict[str, Any]:
        """Everything that must be equal, tensors as bytes."""
        state = [
            (key, bits(value) if isinstance(value, Tensor) else value)
            for parameter in self.params
            for key, value in self.optimizer.state.get(parameter, {}).items()
        ]
        return {"params": [bits(p) for p in self.params], "state": state, "scaler": self.scaler.state_dict()}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def warm_up(run: Run, steps: int) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            run.step()
    torch.cuda.current_stream().wait_stream(stream)
    run.optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eager_steps_equal_torchs_without_waiting(name: str) -> None:
    plain, ours = Run(OPTIMIZERS[name], GradScaler), Run(OPTIMIZERS[name], DeviceGradScaler)
    for step in range(STEPS):
        for run in (plain, ours):
            run.feed(step)
        plain.step()
        if step == 0:
            ours.step()
        else:
            with no_waiting():
                ours.step()
            assert ours.scaler.waits_for_host is None
        assert ours.held() == plain.held(), step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_of_a_captured_step_equal_eager_steps_of_torchs(name: str) -> None:
    plain, ours = Run(OPTIMIZERS[name], GradScaler), Run(OPTIMIZERS[name], DeviceGradScaler)
    for run in (plain, ours):
        warm_up(run, 3)
    assert ours.scaler.waits_for_host is None
    before = ours.held()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    assert ours.held() == before, "a capture changes nothing on the device"
    scales = set()
    for step in range(STEPS):
        for run in (plain, ours):
            run.feed(step)
        plain.step()
        graph.replay()
        assert ours.held() == plain.held(), step
        scales.add(ours.scaler.get_scale())
    assert len(scales) > 2
    assert not ours.scaler._per_optimizer_states
    for run in (plain, ours):
        run.step()  # and eagerly on from here
    assert ours.held() == plain.held()


def test_state_that_would_be_made_in_a_capture_refuses_it() -> None:
    run = Run(OPTIMIZERS["momentum"], DeviceGradScaler)
    run.factor.fill_(INF)
    warm_up(run, 1)
    assert not run.optimizer.state, "a skipped first step"
    run.factor.fill_(1.0)
    with (
        pytest.raises(OptimizationError, match="made or replaced 'momentum_buffer'"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run.step()
    assert not run.optimizer.state
    run.step()
    assert all(torch.isfinite(run.optimizer.state[p]["momentum_buffer"]).all() for p in run.params)


def test_state_on_the_cpu_is_torchs_business() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        return AdamW(params, lr=0.01)  # its step counts lie on the CPU

    plain, ours = Run(make, GradScaler), Run(make, DeviceGradScaler)
    for step in range(8):
        for run in (plain, ours):
            run.feed(step)
            run.step()
        assert ours.held() == plain.held()
    reason = "it keeps 'step' on cpu and the loss scale is on cuda:0 (Adam: capturable=True)"
    assert ours.scaler.waits_for_host == reason


class Module(pl.LightningModule):
    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make = nn.Linear(16, 16), make

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean() * (INF if batch_idx in (0, 4) else 1.0)

    def configure_optimizers(self) -> Optimizer:
        return self.make(list(self.parameters()))


class TakesOver(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.put_back = take_over_precision(trainer.precision_plugin)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.put_back()


def fit(make: Make, callbacks: list[pl.Callback]) -> tuple[dict[str, bytes], dict[str, Any]]:
    module = Module(make)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, precision="16-mixed", gradient_clip_val=0.1, callbacks=callbacks, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(inputs), batch_size=8))
    state = {name: bits(value) for name, value in module.state_dict().items()}
    return state, trainer.precision_plugin.scaler.state_dict()


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_clipped_fit_equals_lightnings_own(name: str) -> None:
    assert fit(OPTIMIZERS[name], [TakesOver()]) == fit(OPTIMIZERS[name], [])


def test_a_fused_optimizer_is_clipped_as_the_plain_one_is() -> None:
    def of(**kind: bool) -> Make:
        return lambda p: SGD(p, lr=0.1, momentum=0.9, **kind)

    fused, scaler = fit(of(fused=True), [TakesOver()])
    plain, plain_scaler = fit(of(foreach=True), [])
    assert scaler == plain_scaler
    for name, value in plain.items():
        one, other = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (fused[name], value))
        # Fused kernels round products and sums once, the others twice.
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), name
