"""The modules: one to build models with, and two that take the place of a model's own, around the same submodules."""

from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.callbacks.layer_norm_dropout.fused import dropout_add_layer_norm, twin
from fasttrain.surgery import why_not_passed_by, with_state_of

M = TypeVar("M", bound=nn.Module)


class DropoutAddLayerNorm(nn.LayerNorm):
    """nn.LayerNorm of residual + dropout(x + x_bias), with nn.LayerNorm's parameters under its names.

    An output that another of these takes as its residual has a gradient of its own for that, see `fused.twin`, unless
    a forward hook is on this module.

    Args:
        hidden: size of the last dimension.
        p: share of elements that are dropped in training.
        options: of nn.LayerNorm.
    """

    def __init__(self, hidden: int, p: float = 0.1, **options: Any) -> None:
        super().__init__(hidden, **options)
        self.p = p

    def forward(self, input: Tensor, residual: Tensor | None = None, x_bias: Tensor | None = None) -> Tensor:
        """Return the result for x of (..., hidden), a residual of its shape and a bias of (hidden,)."""
        p = self.p if self.training else 0.0
        return _normalized(self, input, residual, x_bias, p, twice=not self._forward_hooks)

    def extra_repr(self) -> str:
        """Return what nn.LayerNorm says, and p."""
        return f"{super().extra_repr()}, p={self.p}"


class DenseDropoutAddNorm(nn.Module):
    """A module whose forward is norm(dropout(dense(x)) + residual), fused; made by `fused_output`."""

    _roles: "Roles"

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the result; takes what the module did whose place this is."""
        roles = self._roles
        given = dict(zip(roles.arguments, inputs, strict=False)) | named
        x, x_bias = given[roles.x], None
        if roles.dense is not None:
            x, x_bias = _product_and_bias(self.get_submodule(roles.dense), x)
        return self.end(x, given[roles.residual], x_bias)

    def end(self, product: Tensor, residual: Tensor, x_bias: Tensor | None = None) -> Tensor:
        """Return norm(dropout(product + x_bias) + residual): what follows `dense`, for who computes that otherwise."""
        dropout, norm = self.get_submodule(self._roles.dropout), self.get_submodule(self._roles.norm)
        return _normalized(norm, product, residual, x_bias, _rate(dropout), twice=not self._forward_hooks)


class Roles:
    """Which child and which argument is what, in a module that `DenseDropoutAddNorm` takes the place of."""

    def __init__(
        self, arguments: tuple[str, ...], x: str, residual: str, dense: str | None, dropout: str, norm: str
    ) -> None:
        self.arguments, self.x, self.residual = arguments, x, residual
        self.dense, self.dropout, self.norm = dense, dropout, norm


class FusedTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer with norm_first=False, whose two ends are fused in training; made by `fused_layer`.

    In evaluation it is the plain layer, with its fast path.
    """

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return what nn.TransformerEncoderLayer does."""
        if not self.training or src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        attended = self.self_attn(
            src, src, src, attn_mask=src_mask, key_padding_mask=src_key_padding_mask, need_weights=False,
            is_causal=is_causal,
        )[0]  # fmt: skip
        x = _normalized(self.norm1, attended, src, None, _rate(self.dropout1), twice=True)
        product, bias = _product_and_bias(self.linear2, self.dropout(self.activation(self.linear1(x))))
        return _normalized(self.norm2, product, x, bias, _rate(self.dropout2), twice=not self._forward_hooks)


def fused_output(module: nn.Module, roles: Roles) -> nn.Module:
    """Return the fused form of a module that is norm(dropout(dense(x)) + residual)."""
    fused = with_state_of(module, DenseDropoutAddNorm)
    fused._roles = roles
    return fused


def fused_layer(layer: nn.TransformerEncoderLayer) -> nn.Module:
    """Return the fused form of a layer."""
    return with_state_of(layer, FusedTransformerEncoderLayer)


def _normalized(
    norm: nn.Module, x: Tensor, residual: Tensor | None, x_bias: Tensor | None, p: float, twice: bool
) -> Tensor:
    assert isinstance(norm, nn.LayerNorm)
    if residual is not None:
        residual = twin(residual)
    return dropout_add_layer_norm(
        x, norm.weight, norm.bias, residual, p=p, eps=norm.eps, x_bias=x_bias, twice=twice
    )  # fmt: skip


def _rate(dropout: nn.Module) -> float:
    assert isinstance(dropout, nn.Dropout)
    return dropout.p if dropout.training else 0.0


def _product_and_bias(dense: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what a module makes of x; a linear layer's bias is left for the normalization, which sums its gradient."""
    if type(dense) is nn.Linear and dense.bias is not None and why_not_passed_by(dense) is None:
        return F.linear(x, dense.weight), dense.bias
    product: Tensor = dense(x)
    return product, None
