"""What takes the place of an nn.Sequential of linear layers and ReLUs: the same children under the same names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fasttrain.callbacks.gemm_relu.fused import linear_relu_chain


@dataclass(frozen=True)
class Chain:
    """Linear layers that follow each other, with a ReLU between them."""

    layers: tuple[nn.Linear, ...]
    relu_last: bool
    """Whether a ReLU follows the last one too."""


class FusedMLP(nn.Sequential):
    """An nn.Sequential that computes its chains of linear layers and ReLUs as one function each.

    Made like an nn.Sequential, or from one by `fused_mlp`. All other children are called as they are, and so are linear
    layers and ReLUs with hooks, of other classes, or without a bias.
    """

    def forward(self, input: Any) -> Any:
        """Return what nn.Sequential returns."""
        for part in parts(list(self)):
            if isinstance(part, Chain):
                weights = [layer.weight for layer in part.layers]
                biases: list[Tensor] = [layer.bias for layer in part.layers]
                input = linear_relu_chain(input, weights, biases, part.relu_last)
            else:
                input = part(input)
        return input


def fused_mlp(plain: nn.Sequential) -> FusedMLP:
    """Return a FusedMLP of the same children, hooks and attributes; the dictionaries that hold them are shared."""
    fused = FusedMLP.__new__(FusedMLP)
    vars(fused).update(vars(plain))
    return fused


def parts(children: Sequence[nn.Module]) -> Iterator[Chain | nn.Module]:
    """Yield what a Sequential runs, in order: its chains, each with at least one ReLU, and other children."""
    at = 0
    while at < len(children):
        layers: list[nn.Linear] = []
        relu_last = False
        start = at
        while at < len(children) and is_linear(children[at]):
            layers.append(children[at])  # type: ignore[arg-type]
            relu_last = at + 1 < len(children) and is_relu(children[at + 1])
            at += 1 + relu_last
            if not relu_last:
                break
        if len(layers) > 1 or relu_last:
            yield Chain(tuple(layers), relu_last)
        else:
            at = start + 1
            yield children[start]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that need not be called itself."""
    return type(module) is nn.Linear and module.bias is not None and why_called_itself(module) is None


def is_relu(module: nn.Module) -> bool:
    """Whether a module is a ReLU that need not be called itself."""
    return type(module) is nn.ReLU and why_called_itself(module) is None


def why_called_itself(module: nn.Module) -> str | None:
    """Return why a module must be called as it is, where its forward would not be called any more."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "watched by hooks"
    return "patched in its forward" if "forward" in vars(module) else None
