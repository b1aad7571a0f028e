"""FP8 on a GPU: casts as PyTorch's operators make them, layers near float32, and the step in a graph."""

import pytest
import torch
from torch.nn.functional import gelu, linear

from fasttrain.callbacks.fp8_linear import Scales, Scaling, fp8_feed_forward, in_torch, in_triton, no_scales
from fasttrain.callbacks.fp8_linear.cast import Request
from fasttrain.callbacks.fp8_linear.reference import ROUNDING
from fasttrain.measure import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no FP8 products here"
    ),
]


def scales(tensors: int, kind: str = "delayed") -> Scales:
    return Scales(no_scales(tensors).cuda(), set(), Scaling(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_casts_are_pytorch_s(source: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    ours, plain = scales(1, kind), scales(1, kind)
    for step in range(3):
        parts = [torch.randn(4096, 1024, device="cuda", dtype=source) * (step + 1) for _ in range(3)]
        found = in_triton.cast(Request(parts, ours, 0, dtype, 1, sums=True))
        wanted = in_torch.cast(Request(parts, plain, 0, dtype, 1, sums=True))
        for one, other in ((found.rows, wanted.rows), (found.turned, wanted.turned)):
            assert one is not None
            assert other is not None
            differ = one.view(torch.uint8) != other.view(torch.uint8)
            assert differ.float().mean() <= 1e-5, "a scale's last bit may be another, and decide at a tie"
        assert torch.equal(ours.values, plain.values)
        torch.testing.assert_close(found.sums, wanted.sums, rtol=1e-4, atol=1e-2)


def test_a_block_in_a_graph_is_near_float32_and_its_scales_go_on() -> None:
    torch.manual_seed(0)
    shapes = ((4096, 1024), (4096,), (1024, 4096), (1024,))
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    leaves = [x, *(torch.randn(shape, device="cuda").mul(0.03).requires_grad_() for shape in shapes)]
    dy, ours = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16) * 1e-3, scales(6)
    results: list[torch.Tensor] = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = fp8_feed_forward(*leaves, ours, "tanh")  # type: ignore[arg-type]
        results[:] = [y, *torch.autograd.grad(y, leaves, dy)]

    replay = captured(step)
    before = ours.values.clone()
    with torch.no_grad():
        x.mul_(2)
    replay()
    assert ours.values[0, 0] > before[0, 0]
    replay()
    single, w, b, w_2, b_2 = (leaf.detach().float().requires_grad_() for leaf in leaves)
    y = linear(gelu(linear(single, w, b), approximate="tanh"), w_2, b_2)
    wanted = [y, *torch.autograd.grad(y, [single, w, b, w_2, b_2], dy.float())]
    for found, other in zip(results, wanted, strict=True):
        assert float((found.float() - other).norm() / other.norm()) < ROUNDING["feed_forward"] + 0.03
