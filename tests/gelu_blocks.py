"""Inputs for the tests of gemm_gelu, and their comparison with the reference in float64.

Where Triton is missing, who imports this is skipped.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from fasttrain.callbacks.gemm_gelu.ways import Ways

pytest.importorskip("triton")
from fasttrain.callbacks.gemm_gelu import in_triton, tiling
from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED

DEVICE = "cpu" if INTERPRETED.value else "cuda"
BOTH_WAYS = (Ways(gelu="pass"), Ways(gelu="epilogue"))
SMALL = tiling.Tiling(rows=32, columns=32, depth=16, group=2)


def set_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "FORWARD", SMALL)
    monkeypatch.setattr(in_triton, "BACKWARD", dataclasses.replace(SMALL, group=0))
    monkeypatch.setattr(in_triton, "PASS", tiling.PassTiling(elements=256))
    monkeypatch.setattr(tiling, "BY_POINTERS", SMALL)


def tensors(
    tokens: int, width: int, hidden: int, out: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> list[Tensor]:
    """Return x, weight, bias, weight_2, bias_2; both biases if any."""
    torch.manual_seed(0)
    shapes = ((tokens, width), (hidden, width), (hidden,), (out, hidden), (out,))
    made = [torch.randn(shape, device=DEVICE).to(dtype) * (shape[-1] ** -0.5 if at else 1)
            for at, shape in enumerate(shapes)]  # fmt: skip
    return [tensor.detach().requires_grad_() for tensor in made] if bias else [
        *(made[at].detach().requires_grad_() for at in (0, 1, 3))]  # fmt: skip


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert float((found.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max()) + 1e-7
