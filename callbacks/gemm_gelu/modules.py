"""The fused forms as modules: an nn.Sequential in which feed-forward blocks run as one, and the block by itself."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fasttrain.callbacks.gemm_gelu.feed_forward import Tier, linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.form import Approximate
from fasttrain.surgery import why_not_passed_by


class FusedSequential(nn.Sequential):
    """An nn.Sequential that runs Linear, GELU, Linear as one function where they follow one another.

    Its children, their names and the state dict are those of the nn.Sequential. It looks at them at each call, so a
    child that is replaced or watched by a hook later is called as usual.
    """

    tier: Tier = "auto"

    def forward(self, input: Tensor) -> Tensor:
        """Return what nn.Sequential would."""
        children = list(self._modules.values())
        at = 0
        while at < len(children):
            length = block_length(children, at)
            if length:
                input = _run_block(children[at], children[at + 1], children[at + length - 1], input, self.tier)
                at += length
            else:
                child: Any = children[at]
                input = child(input)
                at += 1
        return input


class FeedForward(FusedSequential):
    """A transformer's feed-forward block: nn.Sequential(Linear, GELU, Linear), run as one function.

    Its state dict has the names of that nn.Sequential: 0.weight, 0.bias, 2.weight, 2.bias.

    Args:
        in_features: of a token.
        hidden_features: four times as many, in most transformers.
        out_features: as many as go in, if None.
        bias: of both linear layers.
        approximate: GELU's form, as torch names it: "none" (erf) or "tanh".
        tier: see `linear_gelu_linear`.
    """

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, *, bias: bool = True,
        approximate: Approximate = "none", tier: Tier = "auto",
    ) -> None:  # fmt: skip
        super().__init__(
            nn.Linear(in_features, hidden_features, bias=bias),
            nn.GELU(approximate=approximate),
            nn.Linear(hidden_features, in_features if out_features is None else out_features, bias=bias),
        )
        self.tier = tier


def fused_sequential(plain: nn.Sequential) -> FusedSequential:
    """Return the fused form of an nn.Sequential, around the same children, with its attributes and hooks.

    The dictionaries that hold them are shared, so that moving one module to a device moves the other.
    """
    fused = FusedSequential.__new__(FusedSequential)
    vars(fused).update(vars(plain))
    return fused


def block_length(children: Sequence[nn.Module | None], at: int) -> int:
    """Return how many children from `at` on are one block: Linear, GELU, what does nothing, Linear; 0 if none are."""
    if not _is_passable(children[at], nn.Linear) or at + 2 >= len(children):
        return 0
    if not _is_passable(children[at + 1], nn.GELU):
        return 0
    for length, child in enumerate(children[at + 2 :], start=3):
        if _is_passable(child, nn.Linear):
            return length
        if not does_nothing(child):
            return 0
    return 0


def does_nothing(module: nn.Module | None) -> bool:
    """Whether a module returns what it gets, in training too: nn.Identity, or nn.Dropout with p=0."""
    return _is_passable(module, nn.Identity) or (_is_passable(module, nn.Dropout) and getattr(module, "p", None) == 0)


def _is_passable(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    # Of exactly this class: a subclass may do anything, a parametrization computes the weight.
    return type(module) is kind and module is not None and why_not_passed_by(module) is None


def _run_block(first: Any, gelu: Any, second: Any, x: Tensor, tier: Tier) -> Tensor:
    return linear_gelu_linear(x, first.weight, first.bias, second.weight, second.bias, gelu.approximate, tier)
