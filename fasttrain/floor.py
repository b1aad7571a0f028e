"""What an H200 can do at most, and the time that work takes at that rate: the floor beside measured rows.

Both rates were measured on the card that the GPU rows come from: a large bf16 matrix product on random data, and a
large copy.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

H200_FLOP_PER_SECOND = 790e12
H200_BYTES_PER_SECOND = 4.3e12


def convolutions_floor_ms(model: nn.Module, run: Callable[[nn.Module], Any]) -> float:
    """Return the time of all passes of a model's convolutions in 16 bits, each bound by arithmetic or memory.

    Args:
        model: best on the meta device, where `run` costs nothing. Forward hooks stay on its convolutions.
        run: calls it once.
    """
    seconds: list[float] = []

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        (x,), weight = inputs, module.weight
        flop = 2 * output.numel() * weight[0].numel()
        moved = 2 * (x.numel() + output.numel() + weight.numel())
        passes = 1 + x.requires_grad + weight.requires_grad
        seconds.append(passes * max(flop / H200_FLOP_PER_SECOND, moved / H200_BYTES_PER_SECOND))

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    run(model)
    return sum(seconds) * 1e3
