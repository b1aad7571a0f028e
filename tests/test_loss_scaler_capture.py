"""A step with the loss scaler can be recorded and done again without its code, or is refused with the reason."""

from typing import Any

import pytest
import torch
from scaled_runs import FUSED, INF, OPTIMIZERS, OVERFLOWS, Run, scaler_of
from torch import Tensor
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler
from fasttrain.errors import OptimizationError


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
