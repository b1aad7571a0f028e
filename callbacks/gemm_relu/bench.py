"""Forward and backward of DLRM's two MLPs under fp16 autocast: eager, compiled, ours, and the floor of arithmetic."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.bench import Case
from fasttrain.callbacks.gemm_relu import bench_apex
from fasttrain.callbacks.gemm_relu.fused import linear_relu_chain
from fasttrain.callbacks.gemm_relu.layers import Ways
from fasttrain.floor import H200_FLOP_PER_SECOND
from fasttrain.measure import Row, captured, make_row, sample_ms
from fasttrain.peers import runs_beside

# DLRM of MLPerf Training v2.0 on one node: 55,296 samples over 8 GPUs. NVIDIA pads the interaction's 479 features.
BATCH = 6912
IN_GRAPH = "fp16 autocast with fp32 parameters, replays of a CUDA graph"
Step = Callable[[], Any]


@dataclass(frozen=True)
class MLP:
    """One of the two networks: its widths, and what it stands between."""

    widths: tuple[int, ...]
    relu_last: bool
    follows_layers: bool
    """Whether its input is computed by others, in fp16, and wants a gradient; otherwise it is data, in fp32."""


BOTTOM = MLP((13, 512, 256, 128), relu_last=True, follows_layers=False)
TOP = MLP((480, 1024, 1024, 512, 256, 1), relu_last=False, follows_layers=True)
WAYS = {
    "ours": Ways(),
    "ours_one_stream": Ways(side_stream=False),
    "ours_products_only": Ways(narrow=False),
}


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case("gemm_relu", "dlrm_bottom_6912", "DLRM's bottom MLP 13-512-256-128", lambda: dlrm("bottom", BOTTOM), True),
        Case("gemm_relu", "dlrm_top_6912", "DLRM's top MLP 480-1024-1024-512-256-1", lambda: dlrm("top", TOP), True),
    ]


def dlrm(name: str, mlp: MLP) -> Iterator[Row]:
    """Yield milliseconds of forward and backward, and the rate of arithmetic, by way of computing it."""
    case = f"dlrm_{name}_{BATCH}"
    work = Work(mlp)
    flop = flop_of_step(mlp)
    for variant, step in work.steps().items():
        times = sample_ms(captured(step), "cuda", warmup=10, repeats=50)
        yield make_row("gemm_relu", case, variant, "fwd_bwd_ms", "ms", times, IN_GRAPH)
        rates = [flop / ms / 1e9 for ms in times]
        yield make_row("gemm_relu", case, variant, "tflop_per_second", "TFLOP/s", rates, IN_GRAPH)
    floor_ms = flop / H200_FLOP_PER_SECOND * 1e3
    yield make_row("gemm_relu", case, "floor", "fwd_bwd_ms", "ms", [floor_ms], "matrix products alone at 790 TFLOP/s")


def flop_of_step(mlp: MLP, batch: int = BATCH) -> int:
    """Return the operations of all products: forward, weights' gradients, and inputs' where they are wanted."""
    sizes = [2 * batch * inputs * outputs for inputs, outputs in pairwise(mlp.widths)]
    return 3 * sum(sizes) - (0 if mlp.follows_layers else sizes[0])


class Work:
    """Input, network and output gradient of a case, and a step of forward and backward for each variant."""

    def __init__(self, mlp: MLP, batch: int = BATCH, dtype: torch.dtype = torch.float16, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.mlp, self.dtype, self.device = mlp, dtype, device
        self.net = sequential(mlp).to(device)
        x = torch.rand(batch, mlp.widths[0], device=device)
        self.x = x.to(dtype).requires_grad_() if mlp.follows_layers else x
        self.dy = torch.randn(batch, mlp.widths[-1], device=device).to(dtype)
        self.leaves = [*([self.x] if mlp.follows_layers else []), *self.net.parameters()]

    def steps(self) -> dict[str, Step]:
        """Return the variants' steps by name."""
        compiled: Any = torch.compile(self.net, dynamic=False, fullgraph=True)
        steps = {variant: self.step(self.ours(ways)) for variant, ways in WAYS.items()}
        steps |= {"compile": self.step(lambda: compiled(self.x)), "eager": self.step(lambda: self.net(self.x))}
        if runs_beside(bench_apex.TRIAL):
            chain = bench_apex.linear_relu_chain
            steps["apex"] = self.step(lambda: chain(self.x, *self._parameters(), self.mlp.relu_last))
        return steps

    def ours(self, ways: Ways) -> Callable[[], Tensor]:
        """Return the forward of the fused chain."""
        weights, biases = self._parameters()
        return lambda: linear_relu_chain(self.x, weights, biases, self.mlp.relu_last, ways=ways)

    def _parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = [module for module in self.net if isinstance(module, nn.Linear)]
        return [layer.weight for layer in layers], [layer.bias for layer in layers]

    def step(self, forward: Callable[[], Tensor]) -> Step:
        """Return forward and backward; all gradients are new tensors, and casts are made in every step."""

        def step() -> tuple[Tensor, ...]:
            with torch.autocast(self.device, self.dtype, cache_enabled=False):
                y = forward()
            return torch.autograd.grad(y, self.leaves, self.dy)

        return step


def sequential(mlp: MLP) -> nn.Sequential:
    """Return the network as a model has it."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(mlp.widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if mlp.relu_last else layers[:-1]))
