"""Calls of layer_norm_dropout for its tests: inputs, and the comparison with the reference in float64.

Where Triton is missing, who imports this is skipped.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain.callbacks.layer_norm_dropout import draw_seed, dropout_add_layer_norm, keep_mask
from fasttrain.callbacks.layer_norm_dropout.reference import TOLERANCE, reference

pytest.importorskip("triton")
from fasttrain.callbacks.layer_norm_dropout.kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
both_tiers = pytest.mark.parametrize("tier", ["torch", "triton"])


class Work:
    """Inputs of a call, and its comparison with the reference."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, parameters: torch.dtype = torch.float32,
        without: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        hidden = shape[-1:]
        made = {
            "x": torch.randn(shape, device=DEVICE).to(dtype),
            "weight": (1 + torch.randn(hidden, device=DEVICE)).to(parameters),
            "bias": torch.randn(hidden, device=DEVICE).to(parameters),
            "residual": torch.randn(shape, device=DEVICE).to(dtype),
            "x_bias": torch.randn(hidden, device=DEVICE).to(parameters),
        }
        self.inputs = {name: None if name in without else t.requires_grad_() for name, t in made.items()}

    def ours(self, **options: Any) -> Tensor:
        return dropout_add_layer_norm(**self.inputs, **options)  # type: ignore[arg-type]

    def in_double(self, keep: Tensor | None, p: float) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = {name: None if t is None else t.detach().double().requires_grad_() for name, t in self.inputs.items()}
        return reference(**inputs, keep=keep, p=p), {name: t for name, t in inputs.items() if t is not None}  # type: ignore[arg-type]

    def gradients(self, y: Tensor, dy: Tensor) -> dict[str, Tensor]:
        leaves = {name: t for name, t in self.inputs.items() if t is not None and t.requires_grad}
        return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))

    def assert_equals_reference(self, p: float, tier: Any) -> None:
        x = self.inputs["x"]
        assert x is not None
        seed = draw_seed(DEVICE)
        found = self.ours(p=p, tier=tier, seed=seed)
        wanted, leaves = self.in_double(keep_mask(seed, x.shape, p) if p else None, p)
        assert found.dtype == x.dtype
        assert_close(found.detach(), wanted.detach(), TOLERANCE[x.dtype])
        dy = torch.randn(x.shape, device=DEVICE).to(x.dtype)
        exact = torch.autograd.grad(wanted, list(leaves.values()), dy.double())
        for (name, gradient), one in zip(self.gradients(found, dy).items(), exact, strict=True):
            mine = self.inputs[name]
            assert mine is not None
            assert gradient.dtype == mine.dtype
            assert_close(gradient, one, max(TOLERANCE[x.dtype], TOLERANCE[gradient.dtype]), name)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float, name: str = "") -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-6, name
