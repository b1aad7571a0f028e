"""Which calls of an evaluation step are captured: those that are the device's alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric

METHOD = "evaluate_batch"


@dataclass(frozen=True)
class Place:
    """A method that a captured call stands in for."""

    path: str
    """How it is told to the user."""
    owner: nn.Module
    name: str
    """Of the method."""
    inside: tuple[tuple[str, nn.Module], ...]
    """Path and module of what it may call."""

    def hooked(self) -> str | None:
        """Return the path of a module inside with forward hooks, which a replay would not call."""
        for path, module in self.inside:
            if module._forward_hooks or module._forward_pre_hooks:
                return path
        return None


def places(module: pl.LightningModule) -> list[Place]:
    """Return the module's `evaluate_batch`, if it has one, or else the forward of each network that it holds.

    A network is a child with parameters, one in a ModuleList or ModuleDict too, that is no part of another child.
    """
    if callable(getattr(module, METHOD, None)):
        return [Place(METHOD, module, METHOD, tuple((path, part) for path, part in module.named_modules() if path))]
    networks = dict(_networks(module))
    parts = {id(part) for network in networks.values() for part in network.modules() if part is not network}
    return [
        Place(path, network, "forward", tuple((f"{path}.{at}", part) for at, part in network.named_modules() if at))
        for path, network in networks.items()
        if id(network) not in parts
    ]


def why_none(module: pl.LightningModule) -> str:
    """Return why a module has no such place."""
    name = type(module).__name__
    return f"{name} has no network to capture: no method {METHOD}(batch), and no child with parameters and a forward"


def _networks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _networks(child, f"{path}.")
        elif not isinstance(child, Metric) and next(child.parameters(), None) is not None and _can_be_called(child):
            yield path, child


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
