"""The loss scaler on the device equals torch's GradScaler bit for bit, waits for nothing, and works in Lightning."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler, take_over_precision
from fasttrain.errors import OptimizationError

STEPS = 60
INF, NAN = float("inf"), float("nan")
OVERFLOWS = {0: INF, 1: NAN, 7: INF, 8: -INF, 30: NAN, 45: INF}
LATER = {step: factor for step, factor in OVERFLOWS.items() if step > 1}

Make = Callable[[list[nn.Parameter]], Optimizer]


class StepsOnHost(SGD):
    """Counts its steps as older optimizers do, in Python numbers of its state and its groups, and decays by them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = (state["mean"] if "mean" in state else torch.zeros_like(p)) + p.grad / group["k"]
                p.data.sub_(group["lr"] / state["step"] * state["mean"])


class LowersItsRate(SGD):
    """Keeps a number on the device in its groups, and changes it in every step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["lr"].mul_(0.9)


class KeepsAList(SGD):
    """Keeps tensors where the scaler makes no copies of them."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            history = self.state[p].setdefault("history", [])
            history.append(p.grad.clone())
            p.data.sub_(0.01 * history[-1])


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, foreach=False),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "tensor_lr": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "lowers_its_rate": lambda p: LowersItsRate(p, lr=torch.tensor(0.1)),
    "steps_on_host": lambda p: StepsOnHost(p, lr=0.01),
    "keeps_a_list": lambda p: KeepsAList(p, lr=0.01),
}
FUSED: dict[str, Make] = {
    "fused_sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "fused_adamw": lambda p: AdamW(p, lr=0.01, fused=True),
}


class Run:
    """A small network with a frozen and an unused parameter, trained by hand with a loss scaler."""

    def __init__(self, make: Make, scaler: GradScaler) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.net.unused = nn.Parameter(torch.ones(2))
        self.net[0].bias.requires_grad_(False)
        self.optimizer = make(list(self.net.parameters()))
        self.scaler = scaler
        self.inputs, self.factor = torch.randn(4, 5), torch.ones(())

    def backward(self) -> None:
        loss = self.net(self.inputs).pow(2).mean() * self.factor
        self.scaler.scale(loss).backward()

    def finish(self, clip: Callable[[], Any] | None = None) -> None:
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, factor: float = 1.0, clip: Callable[[], Any] | None = None) -> None:
        self.factor.fill_(factor)
        self.optimizer.zero_grad()
        self.backward()
        self.finish(clip)

    def held(self) -> dict[str, Any]:
        """Everything that must be equal, tensors as bytes."""
        params = {name: bits(p) for name, p in self.net.named_parameters()}
        state = {
            (name, key): value
            for name, p in self.net.named_parameters()
            for key, value in self.optimizer.state.get(p, {}).items()
        }
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {"params": params, "state": frozen(state), "groups": frozen(groups), "scaler": self.scaler.state_dict()}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items()}
    return [frozen(each) for each in value] if isinstance(value, list) else value


def scaler_of(kind: type[GradScaler], **options: Any) -> GradScaler:
    return kind("cpu", **{"growth_interval": 5, **options})


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


class Tape(TorchDispatchMode):
    """Records the operations of a function with the very tensors they touched, and does them again without its code.

    As in a CUDA graph, inputs are where they were, outputs land where they landed, and Python numbers are baked in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for there, now in zip(tensors_of(out), tensors_of(func(*args, **kwargs)), strict=True):
                if there.untyped_storage().data_ptr() != now.untyped_storage().data_ptr():
                    there.copy_(now)


def tensors_of(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [t for t in out if isinstance(t, Tensor)] if isinstance(out, list | tuple) else []


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "dampening", "rmsprop", *FUSED])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_recorded_step_done_again_without_its_code_equals_eager_ones(name: str, accumulate: int) -> None:
    make = (OPTIMIZERS | FUSED)[name]
    plain, ours = Run(make, scaler_of(GradScaler)), Run(make, scaler_of(DeviceGradScaler))
    for run in (plain, ours):
        for _ in range(2):
            run.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.inputs, run.factor = run.inputs.clone(), torch.ones(())

    def whole_step(run: Run) -> None:
        run.finish()
        run.optimizer.zero_grad(set_to_none=False)

    saved = ours.held()
    with Tape() as backward:
        ours.backward()
    with Tape() as finish:
        whole_step(ours)
    assert ours.held() != saved
    plain.backward()
    whole_step(plain)
    generator = torch.Generator().manual_seed(3)
    for step in range(30):
        for micro in range(accumulate):
            inputs = torch.randn(4, 5, generator=generator)
            factor = OVERFLOWS.get(step, 1.0) if micro == accumulate // 2 else 1.0
            for run in (plain, ours):
                run.inputs.copy_(inputs)
                run.factor.fill_(factor)
            plain.backward()
            backward.replay()
        whole_step(plain)
        finish.replay()
        assert ours.held() == plain.held(), step
    assert not ours.scaler._per_optimizer_states
    ours.step()  # and eagerly on from here
    plain.step()
    assert ours.held() == plain.held()


def test_a_capture_is_refused_while_a_step_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(OPTIMIZERS["momentum"], scaler_of(DeviceGradScaler))
    with monkeypatch.context() as capture:
        capture.setattr(DeviceGradScaler, "_is_capturing", lambda self: True)
        with pytest.raises(OptimizationError, match="the loss scale has no value yet"):
            run.step()
    run.step(INF)
    values = {name: value.clone() for name, value in run.net.state_dict().items()}
    with monkeypatch.context() as capture:
        capture.setattr(DeviceGradScaler, "_is_capturing", lambda self: True)
        with pytest.raises(OptimizationError) as refusal:
            run.step()
    assert str(refusal.value) == (
        "cuda_graph_step: a step of SGD can't be captured under 16-mixed: its last step made or replaced "
        "'momentum_buffer' on the host. Take another step before capturing, use a fused optimizer, or capture without "
        "it (scope: fwd_bwd)."
    )
    assert not run.optimizer.state, "a buffer made in a failed capture holds nothing"
    run.net.load_state_dict(values)  # in a real capture nothing would have run

    plain = Run(OPTIMIZERS["momentum"], scaler_of(GradScaler))
    plain.step(INF)
    for each in (plain, plain, run, run):
        each.step()
    assert run.held() == plain.held(), "what the refused step had done to its gradients is forgotten"
    assert run.scaler.waits_for_host is None
    with monkeypatch.context() as capture:
        capture.setattr(DeviceGradScaler, "_is_capturing", lambda self: True)
        run.step()


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


# In Lightning


class Module(pl.LightningModule):
    """Overflows in the steps asked for and notes the gradients that on_before_optimizer_step sees."""

    def __init__(self, make: Make, overflows: dict[int, float]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 3)
        self.make, self.overflows = make, overflows
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).float().pow(2).mean() * self.overflows.get(batch_idx, 1.0)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.seen.append(self.net.weight.grad.abs().max().item())

    def configure_optimizers(self) -> Optimizer:
        return self.make(list(self.parameters()))


class TakesOver(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.put_back = take_over_precision(trainer.precision_plugin)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.put_back()


BATCHES = torch.randn(20, 4, 4, generator=torch.Generator().manual_seed(2))


def fit(module: Module, plugin: Precision, take_over: bool = True, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", plugins=[plugin], callbacks=[TakesOver()] if take_over else [], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(BATCHES.flatten(0, 1)), batch_size=4))
    return trainer


def fp16(**options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", growth_interval=4, **options))


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]

CLIPPING = [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]


@pytest.mark.parametrize("clipping", CLIPPING, ids=["none", "norm", "value"])
@pytest.mark.parametrize(("name", "accumulate"), [("nesterov", 1), ("nesterov", 3), ("adamw", 1)])
def test_a_fit_equals_lightnings_own(name: str, accumulate: int, clipping: dict[str, Any]) -> None:
    results = []
    for take_over in (False, True):
        module, plugin = Module(OPTIMIZERS[name], OVERFLOWS), fp16()
        trainer = fit(module, plugin, take_over, accumulate_grad_batches=accumulate, **clipping)
        optimizer_state = frozen(trainer.optimizers[0].state_dict())
        results.append((frozen(dict(module.state_dict())), optimizer_state, plugin.state_dict(), repr(module.seen)))
        assert type(plugin.scaler) is GradScaler
    assert results[0] == results[1]


@pytest.mark.parametrize("clipping", CLIPPING[1:], ids=["norm", "value"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_are_clipped_after_unscaling(name: str, clipping: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Module(FUSED[name], LATER), fp16(), take_over=False, **clipping)
    module, plugin = Module(FUSED[name], LATER), fp16()
    fit(module, plugin, **clipping)

    by_hand, scaler, gradients = Module(FUSED[name], LATER), GradScaler("cpu", growth_interval=4), []
    optimizer = by_hand.configure_optimizers()
    for index, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.half, cache_enabled=False):
            loss = by_hand.training_step([batch], index)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients.append(by_hand.net.weight.grad.abs().max().item())
        if "gradient_clip_algorithm" in clipping:
            nn.utils.clip_grad_value_(by_hand.parameters(), clipping["gradient_clip_val"])
        else:
            nn.utils.clip_grad_norm_(by_hand.parameters(), clipping["gradient_clip_val"])
        scaler.step(optimizer)
        scaler.update()
    assert frozen(dict(module.state_dict())) == frozen(dict(by_hand.state_dict()))
    assert plugin.state_dict() == scaler.state_dict()
    assert repr(module.seen) == repr(gradients)


def test_without_clipping_a_fused_optimizers_hook_sees_what_it_saw() -> None:
    seen = []
    for take_over in (False, True):
        module = Module(FUSED["fused_adamw"], {})
        fit(module, fp16(), take_over)
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert seen[1][0] > 100, "scaled gradients"


def test_a_modules_own_clipping_reaches_unscaled_gradients() -> None:
    class ClipsItself(Module):
        def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            self.norm = nn.utils.get_total_norm(p.grad for p in self.parameters()).item()

    make = FUSED["fused_sgd"]
    module, wanted = ClipsItself(make, {}), Module(make, {})
    fit(module, fp16())
    fit(wanted, fp16(), gradient_clip_val=0.01)
    assert module.norm == pytest.approx(0.01, rel=1e-3)
    assert frozen(dict(module.state_dict())) == frozen(dict(wanted.state_dict()))


def test_a_manual_step_with_a_fused_optimizer_can_be_clipped() -> None:
    class Manual(Module):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            optimizer.step()

    module, wanted = Manual(FUSED["fused_sgd"], LATER), Module(FUSED["fused_sgd"], LATER)
    fit(module, fp16())
    fit(wanted, fp16(), gradient_clip_val=0.01)
    assert frozen(dict(module.state_dict())) == frozen(dict(wanted.state_dict()))


def test_bf16_with_a_fused_optimizer_is_clipped() -> None:
    module, plugin = Module(FUSED["fused_adamw"], {}), MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(module, plugin, take_over=False, gradient_clip_val=0.01)
    clipped, loose = (Module(lambda p: SGD(p, lr=1.0, fused=True), {}) for _ in range(2))
    before = clipped.net.weight.detach().clone()
    fit(clipped, plugin, gradient_clip_val=1e-4)
    fit(loose, plugin)
    assert 0 < (clipped.net.weight - before).norm() < 20 * 1.01e-4 < (loose.net.weight - before).norm()


def test_a_skipped_training_step_is_still_skipped() -> None:
    class Skips(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            return None if batch_idx in (0, 5) else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            pass

    def result_of(make: Make, take_over: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        module, plugin = Skips(make, {}), fp16()
        fit(module, plugin, take_over, gradient_clip_val=0.01)
        return dict(module.state_dict()), plugin.state_dict()

    plain, scaler = result_of(OPTIMIZERS["momentum"], False)
    ours, our_scaler = result_of(OPTIMIZERS["momentum"], True)
    assert (frozen(ours), our_scaler) == (frozen(plain), scaler)
    fused, fused_scaler = result_of(lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True), True)
    assert fused_scaler == scaler
    for name, value in plain.items():
        assert torch.allclose(fused[name], value, atol=1e-6), name  # fused kernels round less often


def test_the_plugin_is_put_back_and_its_checkpoint_key_stays() -> None:
    plugin = fp16()
    scaler, before, key = plugin.scaler, dict(vars(plugin)), type(plugin).__qualname__
    class_before = dict(vars(MixedPrecision))
    put_back = take_over_precision(plugin)
    assert isinstance(plugin.scaler, DeviceGradScaler)
    assert type(plugin).__qualname__ == key
    state = {**plugin.state_dict(), "scale": 4.0, "_growth_tracker": 3}
    plugin.load_state_dict(state)
    put_back()
    put_back()
    assert vars(plugin) == before
    assert plugin.scaler is scaler
    assert plugin.state_dict() == state
    assert dict(vars(MixedPrecision)) == class_before


def test_other_plugins_are_left_alone() -> None:
    plugin = Precision()
    take_over_precision(plugin)()
    assert not vars(plugin)


def test_a_subclasss_own_clipping_stays() -> None:
    class Own(MixedPrecision):
        def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

    plugin = Own("bf16-mixed", "cpu")
    put_back = take_over_precision(plugin)
    with pytest.raises(NotImplementedError):
        plugin.clip_gradients()
    put_back()
