"""A loss scaler that skips overflowed steps on the device, and Lightning's mixed precision made to use it.

torch's GradScaler asks the device before every step whether a gradient overflowed, and leaves the step out on the host.
That wait can't be captured (pytorch/pytorch#80167). Here the step is always taken, and undone on the device where a
gradient was not finite. Source of what is kept equal: torch/amp/grad_scaler.py of torch 2.11 to 2.14.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from fasttrain.errors import OptimizationError

TORCHS_OWN = (GradScaler, torch.cuda.amp.grad_scaler.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)


class DeviceGradScaler(GradScaler):
    """torch's GradScaler with the same numbers, step for step, and the same state dict, that can be captured.

    An optimizer that takes `found_inf` itself (the fused ones) is stepped as torch does it. Any other one is always
    stepped; after a step that torch would have skipped, the parameters with a gradient, their state and the tensors in
    the groups hold the bits from before, at the price of a copy of them in memory while the step runs. Gradients and
    whatever else the step wrote to are not put back.

    A step still waits for the host if it changes something there, above all the first one, in which optimizers make
    their state; `waits_for_host` tells. A skipped first step leaves no state: torch leaves fused SGD with a momentum
    buffer of uninitialized memory (`_fused_sgd` in torch/optim/sgd.py, 2.14), which is not imitated.
    """

    waits_for_host: str | None = "no step has been taken yet"
    """Why the last step waited for the device; None when it did not, so that the next one can be captured."""

    @classmethod
    def taking_over(cls, scaler: GradScaler) -> "DeviceGradScaler":
        """Return a scaler with the settings and the state of `scaler`, which is left as it is.

        Raises:
            OptimizationError: `scaler` is of a class with rules of its own.
        """
        if not _is_torchs_own(scaler):
            raise OptimizationError(
                f"cuda_graph_step: the loss scaler is a {type(scaler).__qualname__}, and only torch.amp.GradScaler has "
                "a counterpart on the device; give the precision plugin that one, or capture without the optimizer "
                "(scope: fwd_bwd)."
            )
        ours = cls(scaler._device, enabled=False)
        _copy_state(scaler, ours)
        return ours

    def hand_back(self, scaler: GradScaler) -> None:
        """Give `scaler` the settings and the state of this one, in memory of its own."""
        _copy_state(self, scaler)

    def abandon_step(self) -> None:
        """Forget how far an unfinished step had come, so that the next one can begin."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient is not finite; see `GradScaler.step`.

        Raises:
            OptimizationError: while capturing, when the step has to wait for the host; the step is abandoned.
        """
        if not (self._enabled and _takes_found_inf(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        before = _HostState(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        self._settle(before)
        return result

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._is_capturing():
            raise OptimizationError(
                "cuda_graph_step: the loss scale has no value yet, and one given while capturing would come back with "
                "every replay; take a step before capturing."
            )
        super()._lazy_init_scale_growth_tracker(dev)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        scale, _ = self._check_scale_growth_tracker("step")
        reason = _reason_to_ask_first(optimizer, scale.device)
        if reason is not None:
            self._wait(optimizer, reason)
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        before = _HostState(optimizer)
        tensors = before.tensors_on(scale.device)
        copies = [torch.empty_like(tensor) for tensor in tensors]
        with torch.no_grad():
            torch._foreach_copy_(copies, tensors)
        result: float | None = optimizer.step(*args, **kwargs)
        skipped = self._skipped(optimizer)
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                # A choice, not arithmetic: a product with zero would let a NaN through and lose the sign of zeros.
                torch.where(skipped, copy, tensor, out=tensor)
        self._settle(before)
        return result

    def _skipped(self, optimizer: Optimizer) -> Tensor:
        """Return a 0-d bool on the scale's device: whether a gradient was not finite."""
        scale, _ = self._check_scale_growth_tracker("step")
        found = self._found_inf_per_device(optimizer).values()
        return torch.stack([each.to(scale.device, non_blocking=True) for each in found]).any()

    def _settle(self, before: "_HostState") -> None:
        """Put back what a skipped step changed on the host. Only if it changed anything is the device asked."""
        change = before.change()
        if change is None:
            self.waits_for_host = None
            return
        if self._is_capturing():
            before.put_back()  # what was made in the capture never got a value
        self._wait(before.optimizer, change)
        if self._found_inf_per_device(before.optimizer) and bool(self._skipped(before.optimizer).item()):
            before.put_back()

    def _wait(self, optimizer: Optimizer, reason: str) -> None:
        self.waits_for_host = reason
        if self._is_capturing():
            self.abandon_step()
            raise OptimizationError(
                f"cuda_graph_step: a step of {type(optimizer).__name__} can't be captured under 16-mixed: {reason}. "
                "Take another step before capturing, use a fused optimizer, or capture without it (scope: fwd_bwd)."
            )

    def _is_capturing(self) -> bool:
        return self._device == "cuda" and torch.cuda.is_current_stream_capturing()


def take_over_precision(plugin: Precision) -> Callable[[], None]:
    """Make a `MixedPrecision` plugin's steps capturable and let fused optimizers be clipped; return what undoes it.

    Acts on this instance only; the class, under whose name checkpoints keep the scaler's state, stays.

    - A GradScaler of torch's own is replaced by a `DeviceGradScaler`; another class of scaler stays.
    - `clip_gradients` no longer refuses optimizers that unscale in their step: they get unscaled gradients to clip.
      With `Trainer(gradient_clip_val=...)` these are unscaled before `on_before_optimizer_step`, like those of any
      other optimizer; without clipping, that hook sees them scaled, as in Lightning.

    The returned function restores the plugin, with the scaler's state carried back into the object that was there.
    Other plugins are left alone. A subclass's own `clip_gradients` stays.
    """
    if not isinstance(plugin, MixedPrecision):
        return lambda: None
    methods: dict[str, Callable[..., Any]] = {}
    plain = plugin.scaler
    if plain is not None and _is_torchs_own(plain):
        plugin.scaler = DeviceGradScaler.taking_over(plain)
    ours = plugin.scaler
    if ours is not None:
        methods["optimizer_step"] = _unscaling_before_clipping(plugin, ours)
    if type(plugin).clip_gradients is MixedPrecision.clip_gradients:
        methods["clip_gradients"] = _clipping_any_optimizer(plugin, ours)
    earlier = {name: value for name, value in vars(plugin).items() if name in methods}
    vars(plugin).update(methods)

    def put_back() -> None:
        for name in methods:
            vars(plugin).pop(name, None)
        vars(plugin).update(earlier)
        if isinstance(ours, DeviceGradScaler) and plain is not None:
            ours.hand_back(plain)
        plugin.scaler = plain

    return put_back


def _unscaling_before_clipping(plugin: MixedPrecision, scaler: GradScaler) -> Callable[..., Any]:
    plain_step = plugin.optimizer_step

    def optimizer_step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        backward_was_skipped = False

        def closure_then_unscale() -> Any:
            nonlocal backward_was_skipped
            result = closure()
            backward_was_skipped = result is None and model.automatic_optimization
            if (model.trainer.gradient_clip_val or 0) > 0:
                _unscale_where_left_to_the_step(scaler, optimizer)
            return result

        result = plain_step(optimizer, model=model, closure=closure_then_unscale, **kwargs)
        if backward_was_skipped:
            # Lightning clips here all the same, and there is no update() to forget that this unscaled.
            scaler._per_optimizer_states.pop(id(optimizer), None)
        return result

    return optimizer_step


def _clipping_any_optimizer(plugin: MixedPrecision, scaler: GradScaler | None) -> Callable[..., None]:
    def clip_gradients(
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if scaler is not None and clip_val > 0:
            # Not done yet where an overridden configure_gradient_clipping brings its own value.
            _unscale_where_left_to_the_step(scaler, optimizer)
        Precision.clip_gradients(plugin, optimizer, clip_val, gradient_clip_algorithm)

    return clip_gradients


def _unscale_where_left_to_the_step(scaler: GradScaler, optimizer: Any) -> None:
    """Unscale the gradients of an optimizer that would do so in its step, if that was not done in this step."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    if not _takes_found_inf(optimizer) or not scaler.is_enabled() or scaler._scale is None:
        return
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)


class _HostState:
    """What the host knows of an optimizer: which tensors are its state, and the numbers in its state and groups.

    Covers the parameters that have a gradient when this is made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._state = {p: dict(optimizer.state[p]) if p in optimizer.state else None for p in _stepped(optimizer)}
        self._groups = [dict(group) for group in optimizer.param_groups]

    def tensors_on(self, device: torch.device) -> list[Tensor]:
        """Return what a step may change on the device: the parameters, their state, and the tensors in the groups."""
        kept = [value for state in self._state.values() for value in (state or {}).values()]
        kept += [value for group in self._groups for value in group.values()]
        return [*self._state, *(value for value in kept if isinstance(value, Tensor) and value.device == device)]

    def change(self) -> str | None:
        """Name what is no longer as it was on the host; None if nothing is."""
        now = [self.optimizer.state.get(parameter, {}) for parameter in self._state]
        before = [state or {} for state in self._state.values()]
        for there, here in zip([*now, *self.optimizer.param_groups], [*before, *self._groups], strict=True):
            keys = [key for key in {**here, **there} if not _is_same(here.get(key), there.get(key))]
            if keys:
                return f"its last step made or replaced {', '.join(map(repr, keys))} on the host"
        return None

    def put_back(self) -> None:
        """Undo the changes: state that was made is dropped, tensors and numbers that were replaced come back."""
        for parameter, state in self._state.items():
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = state
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)


def _stepped(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _is_same(one: Any, other: Any) -> bool:
    # Only numbers are compared by value: to compare tensors, or what may contain some, would wait for the device.
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _takes_found_inf(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _reason_to_ask_first(optimizer: Optimizer, device: torch.device) -> str | None:
    """Say why a step of this optimizer could not be undone on the device, or return None."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has step hooks, which must not run in a skipped step"
    for parameter in _stepped(optimizer):
        state = optimizer.state.get(parameter, {})
        if not isinstance(state, dict):
            return f"it keeps a {type(state).__name__} for a parameter, of which no copy is made"
        for key, value in {"params": parameter, **state}.items():
            if isinstance(value, Tensor) and value.device != device:
                return f"it keeps {key!r} on {value.device} and the loss scale is on {device} (Adam: capturable=True)"
            if not (value is None or isinstance(value, Tensor | int | float | str)):
                return f"it keeps {key!r} in a {type(value).__name__}, of which no copy is made"
    return None


def _is_torchs_own(scaler: GradScaler) -> bool:
    return type(scaler) in TORCHS_OWN or isinstance(scaler, DeviceGradScaler)


def _copy_state(source: GradScaler, target: GradScaler) -> None:
    """Copy settings and state, tensors into new memory, without waiting for the device."""
    fields = {key: value for key, value in vars(source).items() if key != "waits_for_host"}
    tensors = {key: value.clone() for key, value in fields.items() if isinstance(value, Tensor)}
    vars(target).update(fields | tensors)
