"""Where gradients lie: made anew by each captured backward, or in static buffers that several graphs add to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Held = list[tuple[nn.Parameter, Tensor]]


class Gradients:
    """The gradients of an optimizer's parameters.

    Without accumulation a captured backward writes fresh tensors in its graph's memory: nothing is zeroed and nothing
    added, but after the step they belong to the graph. With accumulation the graphs of one window add to the same
    buffers, which are made here, outside of any graph.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: Any = optimizer
        self.static: Held = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that may have gradients."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def held(self) -> Held:
        """Return the parameters that have a gradient now, and those."""
        return [(p, p.grad) for p in self.parameters if p.grad is not None]

    def make_static(self) -> None:
        """Make a buffer for each parameter that has a gradient, with that gradient in it; those without stay without.

        A parameter that never gets one must not get a zero: optimizers leave None alone, and decay and move a zero.
        """
        known = {id(p) for p, _ in self.static}
        for parameter, gradient in self.held():
            if id(parameter) not in known:
                self.static.append((parameter, gradient.detach().clone()))
        self.bind()

    def bind(self) -> None:
        """Have each parameter's `grad` be its static buffer, with the values that it has now."""
        for parameter, buffer in self.static:
            gradient = parameter.grad
            if gradient is buffer:
                return  # they are set together, so that one look is enough
            if gradient is not None:
                buffer.copy_(gradient)
            parameter.grad = buffer

    def point_at(self, held: Held) -> None:
        """Have each parameter's `grad` be the given tensor."""
        for parameter, gradient in held:
            parameter.grad = gradient

    def keep_in(self, held: Held) -> None:
        """Have each parameter's `grad` be the held tensor, with the values that a backward wrote elsewhere.

        A graph writes where it wrote at its capture, and one look is enough; the stand-in's backward makes new tensors.
        """
        if held and held[0][0].grad is not held[0][1]:
            for parameter, buffer in held:
                if parameter.grad is not None and parameter.grad is not buffer:
                    buffer.copy_(parameter.grad)
                parameter.grad = buffer

    def drop(self) -> None:
        """Set every gradient to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Give the static buffers up, leaving the gradients where they are."""
        self.static = []

    @contextmanager
    def zeroed_in_place(self) -> Iterator[None]:
        """Within, the optimizer's `zero_grad` fills with zeros where it would set to None."""
        optimizer = self.optimizer

        def zero_grad(set_to_none: bool = True) -> None:
            type(optimizer).zero_grad(optimizer, set_to_none=False)

        optimizer.zero_grad = zero_grad
        try:
            yield
        finally:
            del optimizer.zero_grad
