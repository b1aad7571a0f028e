"""What a captured step has built in, watched from outside, so that a change leads to a new capture."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from fasttrain.callbacks.cuda_graph_step.host_state import changed, host_random_state, plain_attributes, random_changed
from fasttrain.errors import OptimizationError


class Watch:
    """The parts of a module that a captured step takes as given.

    `glance` is for every step; `look` is for the moments when others have had their turn: a new epoch, an evaluation.
    """

    def __init__(self, module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self._accept_parameters()
        self._accept_all()

    def glance(self) -> str | None:
        """Say which parameter has been frozen, unfrozen or added since the last time; None if none was."""
        if [p.requires_grad for p in self._parameters] == self._trained and self._count() == self._groups:
            return None
        names = self._names
        before = dict(zip(map(id, self._parameters), self._trained, strict=True))
        self._accept_parameters()
        for parameter, now in zip(self._parameters, self._trained, strict=True):
            if before.get(id(parameter)) != now:
                name = names.get(id(parameter), "a parameter")
                state = "was given to the optimizer" if id(parameter) not in before else "was frozen"
                return f"{name} {state if not now or id(parameter) not in before else 'was unfrozen'}"
        return "the optimizer's parameter groups changed"

    def look(self) -> str | None:
        """Say what else has changed: a tensor's address, a module's mode, a plain attribute."""
        addresses, modes, attributes = self._addresses, self._modes, self._attributes
        self._accept_all()
        if moved := changed(addresses, self._addresses):
            return f"{moved[0]} lies at another address"
        if switched := changed(modes, self._modes):
            return f"{switched[0] or 'the module'} was switched to {'train' if self._modes[switched[0]] else 'eval'}"
        if other := changed(attributes, self._attributes):
            before, now = (_told(values, other[0]) for values in (attributes, self._attributes))
            return f"the attribute {other[0]} changed from {before} to {now}"
        return None

    def _count(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def _accept_parameters(self) -> None:
        self._groups = self._count()
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._trained = [p.requires_grad for p in self._parameters]
        self._names = {id(p): name for name, p in self.module.named_parameters()}

    def _accept_all(self) -> None:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        self._addresses: Mapping[str, Any] = {name: tensor.data_ptr() for name, tensor in tensors}
        self._modes: Mapping[str, Any] = {name: each.training for name, each in self.module.named_modules()}
        self._attributes = plain_attributes(self.module)


def _told(attributes: Mapping[str, Any], path: str) -> str:
    """Return an attribute of a snapshot as words; snapshots hold plain values and containers alone."""
    return repr(attributes[path]) if path in attributes else "what is no plain value"


class HostWatch:
    """Sees what eager steps do on the host that a replay would not do again."""

    def __init__(self, module: pl.LightningModule, device: torch.device) -> None:
        self.module, self.device = module, device
        self._numbers: dict[str, float] = {}
        self._told: set[str] = set()
        self._has_seen_one = False

    def before(self) -> None:
        """Note the state before a step."""
        self._random, self._attributes = host_random_state(), plain_attributes(self.module)

    def after(self, numbers: Mapping[str, float]) -> None:
        """Compare with the state after it.

        Args:
            numbers: Python numbers given to `self.log`.

        Raises:
            OptimizationError: with a sentence for the user.
        """
        name = type(self.module).__name__
        # On the CPU torch's generator is the device's.
        if drawn := [each for each in random_changed(self._random) if (each, self.device.type) != ("torch", "cpu")]:
            raise OptimizationError(
                f"{name}.training_step draws random numbers on the host ({', '.join(drawn)}), which a replay would "
                "repeat; draw them on the device (torch.rand(..., device=self.device)) or in the loader"
            )
        now = plain_attributes(self.module)
        is_first, self._has_seen_one = not self._has_seen_one, True
        # What a step makes once, at its first time, is there when it is captured.
        if not is_first and (other := changed(self._attributes, now)):
            raise OptimizationError(
                f"{name}.training_step changes the attribute {other[0]} (from {self._attributes.get(other[0])!r} to "
                f"{now.get(other[0])!r}), which a replay would not; keep it in a tensor (register_buffer), or change "
                "it in on_train_batch_end"
            )
        for key, number in numbers.items():
            if self._numbers.setdefault(key, number) != number:
                raise OptimizationError(
                    f"self.log({key!r}) is given a Python number that changes from step to step, and a replay would "
                    "log the first one for ever; log a tensor, or log it in on_train_batch_end"
                )

    def numbers_to_tell(self) -> list[tuple[str, float]]:
        """Return the names and values of logged Python numbers that have not been told of yet."""
        new = [(name, number) for name, number in self._numbers.items() if name not in self._told]
        self._told.update(name for name, _ in new)
        return new
