"""The loss scaler in Lightning's precision plugin: fits as before, fused optimizers clipped, all put back."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from scaled_runs import FUSED, LATER, OPTIMIZERS, OVERFLOWS, Make, frozen
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler, take_over_precision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]


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
