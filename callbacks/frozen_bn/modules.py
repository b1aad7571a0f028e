"""What takes the place of torchvision's modules: the same submodules under the same names, with another forward."""

from typing import Any, TypeVar

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks.folded_norm import Folded, why_not_frozen
from fasttrain.callbacks.frozen_bn.fused import scale_bias_add_relu, scale_bias_dual_relu, scale_bias_relu, twin
from fasttrain.surgery import why_not_passed_by, with_state_of

M = TypeVar("M", bound=nn.Module)


class _FusedBlock:
    """Both kinds of block: what they have in common is how they end."""

    conv1: nn.Module
    downsample: nn.Module | None
    _forward_hooks: Any
    _folded: dict[str, Folded]
    _shortcut: Folded | None

    def _prepare(self) -> None:
        named: dict[str, nn.Module] = dict(self.named_children())  # type: ignore[attr-defined]
        self._folded = {
            name: Folded(module, "frozen_bn") for name, module in named.items() if why_not_frozen(module) is None
        }
        self._shortcut = None
        if type(self.downsample) is nn.Sequential and why_not_passed_by(self.downsample) is None:
            last = list(self.downsample)[-1:]
            self._shortcut = Folded(last[0], "frozen_bn") if last and why_not_frozen(last[0]) is None else None

    def _end(self, out: Tensor, norm: str, x: Tensor) -> Tensor:
        folded, z = self._folded[norm](), twin(x)
        twice = not self._forward_hooks  # a hook may keep the output, and ask for all of its gradient
        if self.downsample is None:
            return scale_bias_add_relu(out, folded, z, twice=twice)
        if self._shortcut is None:
            return scale_bias_add_relu(out, folded, self.downsample(z), twice=twice)
        assert isinstance(self.downsample, nn.Sequential)
        for module in list(self.downsample)[:-1]:
            z = module(z)
        return scale_bias_dual_relu(out, folded, z, self._shortcut(), twice=twice)


class FusedBottleneck(_FusedBlock, Bottleneck):  # type: ignore[misc]
    """torchvision's Bottleneck with three fused passes; made by `fused_from`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, which holds a twin for the next block's shortcut."""
        out = scale_bias_relu(self.conv1(x), self._folded["bn1"]())
        out = scale_bias_relu(self.conv2(out), self._folded["bn2"]())
        return self._end(self.conv3(out), "bn3", x)


class FusedBasicBlock(_FusedBlock, BasicBlock):  # type: ignore[misc]
    """torchvision's BasicBlock with two fused passes; made by `fused_from`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, which holds a twin for the next block's shortcut."""
        out = scale_bias_relu(self.conv1(x), self._folded["bn1"]())
        return self._end(self.conv2(out), "bn2", x)


class FrozenBatchNormReLU(FrozenBatchNorm2d):  # type: ignore[misc]
    """FrozenBatchNorm2d and the ReLU behind it; made by `fused_from`."""

    _folded: Folded

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(norm(x)) in x's dtype."""
        return scale_bias_relu(x, self._folded())


class BatchNormReLU(nn.BatchNorm2d):
    """A BatchNorm2d in eval mode without trainable parameters and the ReLU behind it; made by `fused_from`."""

    _folded: Folded

    def forward(self, input: Tensor) -> Tensor:
        """Return relu(norm(input)) in its dtype."""
        return scale_bias_relu(input, self._folded())


FUSED_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {Bottleneck: FusedBottleneck, BasicBlock: FusedBasicBlock}


def fused_block(block: nn.Module) -> nn.Module:
    """Return the fused form of a Bottleneck or BasicBlock, around the same submodules."""
    fused = with_state_of(block, FUSED_BLOCKS[type(block)])
    assert isinstance(fused, _FusedBlock)
    fused._prepare()
    return fused


def fused_norm(norm: nn.Module) -> nn.Module:
    """Return a frozen normalization with a ReLU behind it, around the same buffers."""
    kind = FrozenBatchNormReLU if isinstance(norm, FrozenBatchNorm2d) else BatchNormReLU
    fused = with_state_of(norm, kind)
    fused._folded = Folded(fused, "frozen_bn")  # type: ignore[assignment]
    return fused
