"""Whether a step's graphs hold the optimizer's step too, as it turns out while training goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler
from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer
from fasttrain.epoch_loop import Window

MOST_WAITING_STEPS = 50
"""Eager steps in which an optimizer under a loss scaler may go on making state on the host, before it is left out."""

MOST_CHANGES = 3
"""Captures that may become useless because a built-in number of the optimizer changed, before it is left out."""


class OptimizerPart:
    """The optimizer's part in the graphs of a step.

    Args:
        optimizer: prepared for capture; None to leave it out from the beginning. One of a class that nobody here knows
            is out until it has taken an eager step, after which it is tried.
        plugin: the trainer's precision plugin.
        on_left_out: called with the reason when it leaves, before that happens.
    """

    def __init__(self, optimizer: CapturableOptimizer | None, plugin: Any, on_left_out: Callable[[str], None]) -> None:
        self.optimizer, self.plugin, self.on_left_out = optimizer, plugin, on_left_out
        self.is_in = optimizer is not None and optimizer.is_known
        self._generation = optimizer.generation if optimizer is not None else 0
        self._changes = self._waiting_steps = 0
        self._has_stepped = False

    def prepared(self) -> AbstractContextManager[None]:
        """Run a step within, eagerly or for a capture."""
        return self.optimizer.prepared() if self.is_in and self.optimizer is not None else nullcontext()

    def before_replay(self) -> None:
        """Write the host's values that changed to the device."""
        if self.is_in and self.optimizer is not None:
            self.optimizer.upload()

    def before_capture(self) -> None:
        """Take the numbers that are built in as they are now."""
        if self.is_in and self.optimizer is not None:
            self.optimizer.upload()
            self.optimizer.accept()

    def state_entries(self) -> int:
        """Return how many values the optimizer keeps as state; a capture must not make it more."""
        return self.optimizer.state_entries() if self.is_in and self.optimizer is not None else 0

    def change(self) -> str | None:
        """Say what the graphs have built in of the optimizer and is different now."""
        if not self.is_in or self.optimizer is None:
            return None
        if self.optimizer.generation != self._generation:
            self._generation = self.optimizer.generation
            return "the optimizer's state was loaded or its groups changed"
        changed = self.optimizer.constants_changed()
        if not changed:
            return None
        self._changes += 1
        if self.optimizer.device_values_problem() is None:
            self.optimizer.use_device_values()
            self._generation = self.optimizer.generation
        elif self._changes > MOST_CHANGES:
            self.leave_out(f"the optimizer's {changed[0]} changes again and again")
        return f"the optimizer changed {changed[0]}"

    def is_ready(self, window: Window) -> bool:
        """Whether optimizer and loss scaler have made on the host whatever they make there, before a capture."""
        if not (window.steps and self.is_in):
            return True
        scaler = getattr(self.plugin, "scaler", None)
        waits = scaler.waits_for_host if isinstance(scaler, DeviceGradScaler) else None
        if waits is None:
            return self._has_stepped
        # At the first loss scale steps overflow, and the optimizer makes its state at the first that does not.
        self._waiting_steps += 1
        if self._waiting_steps > MOST_WAITING_STEPS:
            self.leave_out(waits)
        return False

    def after_eager_step(self, window: Window) -> None:
        """Look at what an eager step has told about the optimizer."""
        if not window.steps or self.optimizer is None:
            return
        if self.is_in:
            self._has_stepped = True
            if self.optimizer.changed_inside:
                self.leave_out(f"its step itself changes {self.optimizer.changed_inside[0]} on the host")
        elif (reason := self.optimizer.problem()) is not None:
            self.leave_out(reason)
        else:
            self.is_in = True  # and has yet to take a prepared step

    def abandon_step(self) -> None:
        """Forget how far the loss scaler had come in a capture that failed."""
        scaler = getattr(self.plugin, "scaler", None)
        if isinstance(scaler, DeviceGradScaler):
            scaler.abandon_step()

    def leave_out(self, reason: str) -> None:
        """Leave the optimizer's step to Lightning from now on."""
        self.on_left_out(reason)
        self.release()

    def release(self) -> None:
        """Give the optimizer back as the user had it."""
        self.is_in = False
        if self.optimizer is not None:
            self.optimizer.release()
            self.optimizer = None
