"""How long the steps of a module's own optimizers take, by torch's implementation of them, measured on copies."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from fasttrain.callbacks.optimizers.implementation import Implementation, optimizers_in, use, why_not
from fasttrain.errors import OptimizationError
from fasttrain.measure import StepProbe, Timing, sample_ms, summarize
from fasttrain.randomness import random_state_kept


class OptimizerProbe(StepProbe):
    """A probe whose step is that of the module's optimizers alone, all of them one after another.

    Each sample works on a deep copy of the module, on the device that the run will use, with gradients of the
    parameters' own shapes. What a sample's `prepare` gets as the batch is the list of optimizers.
    """

    def __init__(self, module: pl.LightningModule, device: str) -> None:
        super().__init__(module, None, device)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of a copy of the module, without gradients.

        Raises:
            OptimizationError: `configure_optimizers` does not run without a Trainer; the message begins a sentence.
        """
        name = type(self.module).__name__
        try:
            with random_state_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return list(optimizers_in(copy.deepcopy(self.module).configure_optimizers()))
        except Exception as error:  # a user's code may ask its Trainer for the number of steps, and there is none yet
            raise OptimizationError(
                f"{name} gives no optimizer to measure before there is a Trainer ({type(error).__name__}: "
                f"{' '.join(str(error).split())})"
            ) from error

    def compare_implementations(self, implementations: Sequence[Implementation]) -> dict[str, Timing]:
        """Return the timing of the step as it is, under `plain`, and by each implementation.

        All are taken once in this order and once in the reverse, so that a machine that slows down favours none.
        """
        times: dict[str, list[float]] = {name: [] for name in ("plain", *implementations)}
        prepares: dict[str, Callable[[Any, Any], Any] | None] = {"plain": None}
        prepares |= {each: _user(each) for each in implementations}
        for name in [*times, *reversed(times)]:
            times[name] += self.sample_ms(prepares[name], repeats=10)
        return {name: Timing(*summarize(values)) for name, values in times.items()}

    def _sample_ms(
        self,
        prepare: Callable[[pl.LightningModule, Any], Any] | None,
        autocast: torch.dtype | None,
        warmup: int,
        repeats: int,
    ) -> list[float]:
        if self.device.type == "cuda":
            torch.cuda.init()  # before that its random state can't be kept
        with random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = copy.deepcopy(self.module).to(self.device)
            optimizers = list(optimizers_in(module.configure_optimizers()))
            for param in (p for o in optimizers for group in o.param_groups for p in group["params"]):
                param.grad = param.detach() * 1e-3 if param.requires_grad else None
            if prepare is not None:
                prepare(module, optimizers)

            def step() -> None:
                for optimizer in optimizers:
                    optimizer.step()

            return sample_ms(step, self.device, warmup=warmup, repeats=repeats)


def _user(implementation: Implementation) -> Callable[[Any, Any], None]:
    def prepare(module: pl.LightningModule, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            if why_not(optimizer, implementation) is None:
                use(optimizer, implementation)

    return prepare
