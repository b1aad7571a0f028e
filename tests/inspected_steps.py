"""A usual module with one thing changed, and what inspection finds in its step."""

import inspect
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasttrain.callbacks.cuda_graph_step.inspection.frozen_reads import frozen_reads, host_effects


class Lit(pl.LightningModule):
    """The usual module; tests change one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)
        self.scale = 1.0
        self.history: list[Tensor] = []
        self.save_hyperparameters({"weight": 0.5})

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Inspected:
    """Inspects steps whose body is a function, or an expression over these names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def step(
        self, body: Any, base: type[Lit] = Lit, parameters: str = "self, batch, batch_idx", **attributes: Any
    ) -> Any:
        """Return `training_step` of a module with this body and these attributes."""
        function = eval(f"lambda {parameters}: {body}", self.names) if isinstance(body, str) else body
        module = type("Given", (base,), {"training_step": function})()
        for name, value in attributes.items():
            setattr(module, name, value)
        return module.training_step

    def reads(self, body: Any, **given: Any) -> list[str]:
        """Return the names of what the step reads."""
        step = self.step(body, **given)
        return [read.name for read in frozen_reads(step, step.__self__)]

    def effects(self, body: Any, **given: Any) -> list[str]:
        """Return the names of what the step does on the host."""
        step = self.step(body, **given)
        return [effect.name for effect in host_effects(step, step.__self__)]


def line(thing: Any, text: str = "# <-") -> int:
    """Return the number of the line in `thing`'s source that holds `text`."""
    source, first = inspect.getsourcelines(thing)
    (offset,) = [offset for offset, each in enumerate(source) if text in each]
    return first + offset


def only(found: Any) -> Any:
    """Return the one finding."""
    (finding,) = found
    return finding
