"""What making batches draws from the process's random generators, so that it can be drawn without making them."""

from typing import Any

import torch
from torch import Tensor

from fasttrain.randomness import random_state


def seeds_drawn(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    """Return how many seeds, none or one, were drawn from torch's generator between two states; None for all else.

    One is what torch's DataLoader draws for each iterator that it makes without a generator of its own.
    """
    others = [name for name in after if name != "torch"]
    if not all(_same(before.get(name), after[name]) for name in others):
        return None
    if torch.equal(before["torch"], after["torch"]):
        return 0
    generator = torch.Generator()
    generator.set_state(before["torch"])
    _draw(generator)
    return 1 if torch.equal(generator.get_state(), after["torch"]) else None


def draw_seeds(count: int) -> None:
    """Draw so many from the global generator."""
    for _ in range(count):
        _draw(None)


def _draw(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one[key], other[key]) for key in other)
    if isinstance(one, list) and isinstance(other, list):
        return all(map(_same, one, other))
    return bool(one == other)


def now() -> dict[str, Any]:
    """Return the state to give to `seeds_drawn`."""
    return random_state()
