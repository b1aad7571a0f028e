"""The body: a stage of frozen bottleneck blocks, whose children it keeps. Works in any loop."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fasttrain.callbacks.bottleneck import in_torch
from fasttrain.callbacks.bottleneck.constants import Constants
from fasttrain.callbacks.bottleneck.operators import Geometry, Operators
from fasttrain.callbacks.bottleneck.stage_function import Block, Call, StageFunction, run
from fasttrain.environment import triton_runs
from fasttrain.twin import twin_of, with_twin

Tier = Literal["auto", "triton", "torch"]
ROOM = "bottleneck"
# Convolution and normalization of a block, in the order of their weights.
PATH = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))


class FusedStage(nn.Sequential):
    """torchvision's bottleneck blocks one after another as one function, forward and backward.

    Made of the blocks of an nn.Sequential for which `sites.why_not_fused` has no objection. They stay its children,
    under their names, and are not called: hooks on what lies inside of the stage do not run.
    """

    calls_no_child = True

    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        self.side_streams = 1
        """For scaling weights and for weight gradients; 0 to have both on the main stream."""
        self.tier: Tier = "auto"
        """"auto" takes the kernels on NVIDIA GPUs, else PyTorch's operators; "triton" is for the interpreter."""
        self._constants: dict[str, Constants] = {}

    def forward(self, input: Tensor) -> Tensor:
        """Return the last block's output, (N, C, H, W) in channels_last, in the dtype of input or of autocast.

        Under torch.compile, or where the input's dtype isn't the weights', the blocks are called instead.

        Raises:
            OptimizationError: a normalization is not frozen any more; in the backward, if it is to be differentiated
                again.
        """
        if torch.compiler.is_compiling() or not len(self) or input.dim() != 4 or not input.is_floating_point():
            return self._block_by_block(input)
        dtype = torch.get_autocast_dtype(input.device.type) if _is_cast(input) else input.dtype
        weights, blocks, norms = self._parts()
        if any(weight.dtype != dtype and not _is_cast(weight) for weight in weights):
            return self._block_by_block(input)  # which says so
        x = twin(input).to(dtype=dtype, memory_format=torch.channels_last)
        keep = torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights))
        constants = tuple(self._constant(name, norm)(dtype) for name, norm in norms)
        call = Call(self._operators(x), blocks, constants, self.side_streams, keep)
        if not keep:
            with torch.no_grad():
                return run(call, x, weights)[0]
        y, other = StageFunction.apply(call, x, *weights)
        return with_twin(y, other, ROOM)

    def _block_by_block(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x

    def _parts(self) -> tuple[list[Tensor], tuple[Block, ...], list[tuple[str, nn.Module]]]:
        """Return the weights, what is known of each block, and the normalizations by name, one for each weight."""
        weights: list[Tensor] = []
        norms: list[tuple[str, nn.Module]] = []
        blocks = []
        for name, block in self._modules.items():  # one that is there twice, too
            parts: Any = block
            pairs = [(getattr(parts, conv), f"{name}.{norm}", getattr(parts, norm)) for conv, norm in PATH]
            step = None
            if parts.downsample is not None:
                conv, norm = parts.downsample
                pairs.append((conv, f"{name}.downsample.1", norm))
                step = conv.stride[0]
            conv2 = parts.conv2
            blocks.append(Block(Geometry(conv2.stride, conv2.padding, conv2.dilation, conv2.groups), step))
            weights += [conv.weight for conv, _, _ in pairs]
            norms += [(path, norm) for _, path, norm in pairs]
        return weights, tuple(blocks), norms

    def _constant(self, name: str, norm: nn.Module) -> Constants:
        kept = self._constants.get(name)
        if kept is None or kept.norm is not norm:
            kept = self._constants[name] = Constants(norm)
        return kept

    def _operators(self, x: Tensor) -> Operators:
        if self.tier == "torch" or (self.tier == "auto" and not _takes_triton(x)):
            return in_torch
        from fasttrain.callbacks.bottleneck import in_triton  # where Triton isn't installed it can't be imported

        return in_triton


def twin(y: Tensor) -> Tensor:
    """Return a stage's output for a second use of it: the same values, with a gradient of its own.

    The next stage takes its input like this. A tensor's two gradients, from there and from a feature pyramid for
    instance, are otherwise added by a pass over memory before the backward of the tensor begins.
    """
    return twin_of(y, ROOM)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast would cast a convolution's operand."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _takes_triton(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float64 and triton_runs()
