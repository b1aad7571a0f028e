"""Every overridden hook of a captured step gets a verdict, and those around the step are found in Lightning's order."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from inspected_steps import Lit, line
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks.cuda_graph_step.inspection.hooks import (
    CAPTURED_HOOKS,
    OUTSIDE_HOOKS,
    HookVerdict,
    outside_hooks,
    reads_gradients,
    step_hooks,
)
from fasttrain.overriding import overridden


def refusal(trainer: pl.Trainer, module: pl.LightningModule) -> HookVerdict:
    """Return the one verdict that is a refusal."""
    (verdict,) = [verdict for verdict in step_hooks(trainer, module) if not verdict.captured]
    return verdict


# Verdicts


def trainer_with(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


class GradNormMonitor(pl.Callback):
    """Logs the gradients' norm, by hand and every 50 steps."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step % 50 == 0:  # <-
            norms = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
            trainer.logger.log_metrics({"norm": torch.stack(norms).norm()})


class Clips(Lit):
    """Touches the device only, in every hook."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        torch._foreach_mul_(list(self.parameters()), 1.0)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("scaled", loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.nan_to_num()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


def test_hooks_that_touch_the_device_only_are_captured() -> None:
    verdicts = step_hooks(trainer_with(), Clips())
    assert [v.hook for v in verdicts] == ["training_step", "forward", *CAPTURED_HOOKS[1:]]
    assert {(v.owner, v.captured, v.reason) for v in verdicts} == {
        ("Clips", True, "only touches the device, as far as its code shows")
    }
    assert verdicts[-1].source.startswith("def optimizer_step(")
    assert (verdicts[-1].file, verdicts[-1].line) == (__file__, line(Clips, "def optimizer_step"))


def test_a_callback_is_refused_by_name_and_line() -> None:
    verdict = refusal(trainer_with(GradNormMonitor()), Lit())
    assert (verdict.owner, verdict.hook) == ("GradNormMonitor (callback)", "on_after_backward")
    assert verdict.reason == (
        f"GradNormMonitor.on_after_backward reads trainer.global_step (test_graph_hooks.py:{line(GradNormMonitor)}), "
        "which changes from step to step while a replay keeps the captured value; fill a tensor in place in "
        "on_train_batch_start and read that (and 1 more such place)"
    )
    assert verdict.source == "if trainer.global_step % 50 == 0:  # <-"
    assert (verdict.file, verdict.line) == (__file__, line(GradNormMonitor))


def test_what_the_user_vouches_for_is_captured() -> None:
    trainer, trusted = trainer_with(GradNormMonitor()), {"GradNormMonitor.on_after_backward"}
    (verdict,) = [v for v in step_hooks(trainer, Lit(), trusted) if v.hook == "on_after_backward"]
    assert (verdict.captured, verdict.reason) == (True, "vouched for")


def test_forward_is_judged_where_a_hook_calls_it_and_vouched_for_by_itself() -> None:
    class Loud(Lit):
        def forward(self, x: Tensor) -> Tensor:
            print(x.shape)  # <-
            return super().forward(x)

    class Elsewhere(Loud):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch).sum()

    step, forward = step_hooks(trainer_with(), Loud())
    assert (step.hook, step.captured) == ("training_step", True)
    assert (forward.hook, forward.captured, forward.line) == ("forward", False, line(Loud))
    assert all(v.captured for v in step_hooks(trainer_with(), Loud(), {"Loud.forward"}))
    assert [v.hook for v in step_hooks(trainer_with(), Elsewhere())] == ["training_step"]


def test_a_finding_in_what_a_hook_calls_says_so() -> None:
    class Helped(Lit):
        def helper(self) -> None:
            print("x")  # <-

        def on_after_backward(self) -> None:
            self.helper()

    verdict = refusal(trainer_with(), Helped())
    assert verdict.reason == (
        f"within Helped.on_after_backward, Helped.helper calls print() (test_graph_hooks.py:{line(Helped)}), which a "
        "replay would not do again; do it in on_train_batch_end"
    )


def test_a_callback_calls_the_modules_own_methods() -> None:
    class Norms(Lit):
        def norms(self) -> Any:
            return self.history.append(torch.zeros(()))

    class Asks(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module.log("norm", pl_module.norms())

    verdict = refusal(trainer_with(Asks()), Norms())
    assert verdict.reason.startswith(
        "within Asks.on_before_optimizer_step, Norms.norms calls pl_module.history.append()"
    )


def test_functions_given_to_a_lambda_callback_are_looked_into() -> None:
    quiet = LambdaCallback(on_after_backward=lambda trainer, module: module.log("one", torch.ones(())))
    loud = LambdaCallback(on_before_backward=lambda trainer, module, loss: print(trainer.global_step))
    verdicts = step_hooks(trainer_with(quiet, loud), Lit())[2:]
    assert [(v.owner, v.hook, v.captured) for v in verdicts] == [
        ("LambdaCallback (callback)", "on_after_backward", True),
        ("LambdaCallback (callback)", "on_before_backward", False),
    ]


def test_what_is_no_python_function_is_refused() -> None:
    callback = pl.Callback()
    callback.on_after_backward = torch.zeros(1).add  # type: ignore[method-assign]
    verdict = refusal(trainer_with(callback), Lit())
    assert verdict.reason == (
        "Callback.on_after_backward is no Python function, and can't be looked into; name it in `trusted` if it may "
        "stay"
    )


def test_averaging_of_models_in_ddp_is_refused() -> None:
    trainer = trainer_with(strategy=DDPStrategy())
    assert all(v.captured for v in step_hooks(trainer, Lit()))
    trainer.strategy._model_averager = object()  # type: ignore[attr-defined]
    *_, verdict = step_hooks(trainer, Lit())
    assert (verdict.owner, verdict.hook, verdict.captured) == ("DDPStrategy (strategy)", "optimizer_step", False)
    assert verdict.reason.endswith("which it counts on the host; leave model_averaging_period out")


# Whose hooks


def every_lightning_callback() -> Iterator[type[pl.Callback]]:
    todo = [pl.Callback]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__.startswith("lightning.pytorch."):
            yield cls


def test_no_callback_of_lightnings_own_overrides_a_captured_hook() -> None:
    classes = list(every_lightning_callback())
    assert {lightning_callbacks.WeightAveraging, lightning_callbacks.TQDMProgressBar} < set(classes)
    found = {(cls.__name__, hook) for cls in classes for hook in CAPTURED_HOOKS if hook in vars(cls)}
    assert found - {("Callback", hook) for hook in CAPTURED_HOOKS} == set()


def test_overridden() -> None:
    class Mixin:
        def on_after_backward(self) -> None: ...

    class Mixed(Mixin, Lit):
        pass

    class Restored(GradNormMonitor):
        on_after_backward = pl.Callback.on_after_backward

    assert not overridden(Lit(), "on_after_backward")
    assert overridden(Mixed(), "on_after_backward")
    assert not overridden(Restored(), "on_after_backward")
    assert overridden(GradNormMonitor(), "on_after_backward")
    assert not overridden(GradNormMonitor(), "optimizer_step"), "a callback has no such hook"
    assert overridden(Lit(), "forward")
    assert not overridden(pl.LightningModule(), "forward")

    callback = pl.Callback()
    callback.on_after_backward = lambda *args: None  # type: ignore[method-assign]
    assert overridden(callback, "on_after_backward")
    callback.on_after_backward = MethodType(pl.Callback.on_after_backward, callback)  # type: ignore[method-assign]
    assert not overridden(callback, "on_after_backward")
    callback.on_after_backward = partial(pl.Callback.on_after_backward, callback)  # type: ignore[method-assign]
    assert not overridden(callback, "on_after_backward")
    callback.on_after_backward = None  # type: ignore[assignment, method-assign]
    assert not overridden(callback, "on_after_backward"), "Lightning leaves it out"


def test_outside_hooks_come_in_lightnings_order() -> None:
    class Module(Lit):
        def on_train_batch_end(self, *args: Any) -> None: ...

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    class Data(pl.LightningDataModule):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    module, data, timer = Module(), Data(), lightning_callbacks.Timer()
    trainer = trainer_with(GradNormMonitor(), timer)
    assert outside_hooks(trainer, Lit()) == {"on_train_batch_end": (timer,)}
    assert outside_hooks(trainer, module) == {
        "transfer_batch_to_device": (module,), "lr_scheduler_step": (module,), "on_train_batch_end": (timer, module),
    }  # fmt: skip
    trainer._data_connector.attach_data(module, datamodule=data)  # type: ignore[attr-defined]
    found = outside_hooks(trainer, module)
    assert found["transfer_batch_to_device"] == (data,)
    assert found["on_after_batch_transfer"] == (data,)
    assert list(found) == [hook for hook in OUTSIDE_HOOKS if hook in found]


def norm_by_hand(module: nn.Module) -> Tensor:
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        (lambda self, outputs, batch, batch_idx: self.log("norm", norm_by_hand(self)), True),
        (lambda self, outputs, batch, batch_idx: grad_norm(self, norm_type=2), True),
        (lambda self, outputs, batch, batch_idx: nn.utils.clip_grad_norm_(self.parameters(), 1.0), True),
        (lambda self, outputs, batch, batch_idx: [getattr(p, "grad") for p in self.parameters()], True),  # noqa: B009
        (lambda self, outputs, batch, batch_idx: self.clip_gradients(self.optimizers()), True),
        (lambda self, outputs, batch, batch_idx: [p.norm() for p in self.parameters() if p.requires_grad], False),
        (lambda self, outputs, batch, batch_idx: self.log("loss", outputs["loss"]), False),
    ],
)
def test_reads_gradients(body: Any, reads: bool) -> None:
    module = type("Given", (Lit,), {"on_train_batch_end": body})()
    assert reads_gradients(module.on_train_batch_end, module) is reads


def test_lightnings_default_callbacks_give_no_refusal(tmp_path: Path) -> None:
    verdicts: list[HookVerdict] = []

    class Looks(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            verdicts.extend(step_hooks(trainer, pl_module))

    more = [lightning_callbacks.LearningRateMonitor(), lightning_callbacks.EMAWeightAveraging(), Looks()]
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, default_root_dir=tmp_path, callbacks=[*more])
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    trainer.fit(Lit(), DataLoader(data, batch_size=4))
    assert len(trainer.callbacks) > len(more), "the bar, the summary and the checkpoints"  # type: ignore[attr-defined]
    assert [(v.owner, v.hook, v.captured) for v in verdicts] == [
        ("Lit", "training_step", True),
        ("Lit", "forward", True),
    ]


# Attributes that are set between the steps


class Anneals(Lit):
    """Trains with a factor that somebody else may change."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scale * super().training_step(batch, batch_idx)  # <-


def test_a_plain_attribute_set_after_each_batch_is_frozen() -> None:
    class Cools(Anneals):
        def on_train_batch_end(self, *args: Any) -> None:
            self.scale *= 0.99

    assert refusal(trainer_with(), Cools()).reason == (
        f"within Cools.training_step, Anneals.training_step reads self.scale (test_graph_hooks.py:{line(Anneals)}), "
        "which Cools.on_train_batch_end sets, while a replay keeps the captured value; keep it in a tensor that "
        "changes in place"
    )


def test_a_callback_may_be_the_one_who_sets_it() -> None:
    class Cools(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.scale = 1 / (batch_idx + 1)

    assert "which Cools.on_train_batch_start sets" in refusal(trainer_with(Cools()), Anneals()).reason
    assert all(verdict.captured for verdict in step_hooks(trainer_with(Cools()), Lit())), "nobody reads it"
    assert all(verdict.captured for verdict in step_hooks(trainer_with(), Anneals())), "nobody sets it"


def test_a_tensor_filled_between_the_steps_is_the_cure() -> None:
    class Cured(Anneals):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(())  # type: ignore[assignment]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.scale.fill_(self.global_step)  # type: ignore[attr-defined]

    assert all(verdict.captured for verdict in step_hooks(trainer_with(), Cured()))
