"""The chain as one function of autograd: forward with bias and ReLU in the products, backward on two streams."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttrain.callbacks.gemm_relu import in_triton
from fasttrain.callbacks.gemm_relu.beside import Beside
from fasttrain.callbacks.gemm_relu.layers import Kind, Ways
from fasttrain.callbacks.relu_bias_backward import column_sums, relu_bias_backward
from fasttrain.errors import OptimizationError


def forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool, dtype: torch.dtype,
    kinds: Sequence[Kind], ways: Ways,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return the output of each layer (M, N), and the weights as the products took them.

    A product's bias and ReLU are done by cuBLAS while it writes its output.

    Args:
        x: (M, K), contiguous; in `dtype` if the first layer is a product.
        weights: (N, K) each, of any dtype.
        biases: (N,) each, likewise.
        relu_last: whether a ReLU follows the last layer, as it does the others.
        dtype: of the products' operands and of all outputs.
        kinds: of each layer.
        ways: to choose from.
    """
    parameters = _in_dtype(weights, biases, dtype, kinds, ways)
    used, y, ys = parameters[0::2], x, []
    for i, (kind, weight, bias) in enumerate(zip(kinds, used, parameters[1::2], strict=True)):
        if kind is Kind.NARROW_IN:
            y = in_triton.narrow_in(y, weight, bias, dtype)
        elif kind is Kind.NARROW_OUT:
            y = in_triton.narrow_out(y, weight, bias)
        elif relu_last or i < len(weights) - 1:
            y = torch._addmm_activation(bias, y, weight.t(), use_gelu=False)
        else:
            y = torch.addmm(bias, y, weight.t())
        ys.append(y)
    return ys, used


class LinearReLUChain(torch.autograd.Function):
    """`forward` for autograd; returns the last output.

    Parameters come in their own dtype, and so do their gradients, so that the casts to and from 16 bits are made for
    all layers at once, or not at all.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, relu_last: bool, dtype: torch.dtype, kinds: Sequence[Kind], ways: Ways, *parameters: Tensor
    ) -> Tensor:
        """Return the last output; keep each layer's. `parameters` are weight and bias of each layer in turn."""
        weights, biases = parameters[0::2], parameters[1::2]
        ys, used = forward(x, weights, biases, relu_last, dtype, kinds, ways)
        kept_weights = [None if kind is Kind.NARROW_IN else w for kind, w in zip(kinds, used, strict=True)]
        ctx.save_for_backward(x, *(ys if relu_last else [*ys[:-1], None]), *kept_weights)
        ctx.kinds, ctx.ways, ctx.parameters = kinds, ways, [(p.shape, p.dtype) for p in parameters]
        return ys[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the parameters."""
        if torch.is_grad_enabled():
            raise OptimizationError(
                "gemm_relu: a gradient that can be differentiated again was asked for (create_graph=True), and the "
                "fused backward can't be; undo the fusion, or compute by fasttrain.callbacks.gemm_relu.reference."
            )
        (g,) = gradients
        # Autocast, if backward is called within it, would change the products' dtypes.
        with torch.autocast(g.device.type, enabled=False), Beside(g.device, ctx.ways.side_stream) as beside:
            way_back = _WayBack(ctx, g.contiguous(), beside)
            for layer in reversed(range(way_back.lowest, len(ctx.kinds))):
                way_back.go_through(layer)
        return way_back.dx, None, None, None, None, *way_back.gradients


class _WayBack:
    """The gradient on its way from the last layer to the first."""

    def __init__(self, ctx: Any, g: Tensor, beside: Beside) -> None:
        layers = len(ctx.kinds)
        x, *saved = ctx.saved_tensors
        self.inputs, self.ys, self.weights = [x, *saved[: layers - 1]], saved[:layers], saved[layers:]
        self.ctx, self.beside = ctx, beside
        self.needs_dx, self.needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        self.gradients: list[Tensor | None] = [None] * (2 * layers)
        self.dx: Tensor | None = None
        self.lowest = 0 if self.needs_dx else next(i for i, needed in enumerate(self.needs) if needed) // 2
        # Of a layer's output; of what goes into its ReLU if it is masked, and then the bias's gradient is known.
        self.g, self.is_masked = g, False

    def go_through(self, layer: int) -> None:
        """Compute the gradients of a layer's parameters and, if there is need, of its input."""
        kind = self.ctx.kinds[layer]
        if kind is Kind.NARROW_OUT:
            self._narrow_out(layer)
        elif kind is Kind.NARROW_IN:
            self._narrow_in(layer)
        else:
            self._product(layer)

    def _product(self, layer: int) -> None:
        self._mask(layer)
        g, x, ways = self.g, self.inputs[layer], self.ctx.ways
        dw = self._new(2 * layer) if self.needs[2 * layer] else None
        ready = self.beside.ready()
        if not ways.data_gradient_first:
            self._weight_gradient(dw, g, x, ready)
        if layer > self.lowest:
            self._to_the_layer_below(layer)
        elif self.needs_dx:
            self.dx = torch.mm(g, self.weights[layer])
        if ways.data_gradient_first:
            self._weight_gradient(dw, g, x, ready)

    def _weight_gradient(self, dw: Tensor | None, g: Tensor, x: Tensor, ready: torch.cuda.Event | None) -> None:
        if dw is not None:
            at_once = self.ctx.ways.float32_gradients
            self.beside(lambda: _product_into(dw, g, x, at_once), dw, g, x, after=ready)

    def _to_the_layer_below(self, layer: int) -> None:
        weight, y = self.weights[layer], self.inputs[layer]
        self.is_masked = self.ctx.ways.mask == "epilogue" and in_triton.can_multiply(self.g, weight, y)
        if not self.is_masked:
            self.g = torch.mm(self.g, weight)
            return
        self.g, shares = in_triton.masked_product(self.g, weight, y)
        if self.needs[2 * layer - 1] and self.ctx.kinds[layer - 1] is Kind.PRODUCT:
            self._late(2 * layer - 1, self._sum(shares))

    def _mask(self, layer: int) -> None:
        if self.is_masked:
            return
        y = self.ys[layer]
        if y is not None:
            self.g, sums = relu_bias_backward(self.g, y)
        elif self.needs[2 * layer + 1]:
            sums = column_sums(self.g)
        else:
            return
        self._bias_gradient(layer, sums)

    def _narrow_out(self, layer: int) -> None:
        y, weight = self.inputs[layer], self.weights[layer]
        self.g, shares = in_triton.narrow_out_backward(self.g, y, weight)
        self.is_masked = True
        dw, below, db = self._sum(shares).split((y.shape[1], y.shape[1], 1))
        self._late(2 * layer, dw.view(1, -1))
        self._late(2 * layer + 1, db)
        self._late(2 * layer - 1, below)

    def _sum(self, shares: Tensor) -> Tensor:
        sums = torch.empty(shares.shape[1], dtype=torch.float32, device=shares.device)
        self.beside(lambda: torch.sum(shares, 0, out=sums), shares, sums)
        return sums

    def _narrow_in(self, layer: int) -> None:
        dw, db = self._new(2 * layer), self._new(2 * layer + 1)
        in_triton.narrow_in_backward(self.g, None if self.is_masked else self.ys[layer], self.inputs[layer], dw, db)

    def _bias_gradient(self, layer: int, sums: Tensor) -> None:
        if self.needs[2 * layer + 1]:
            self.gradients[2 * layer + 1] = sums.to(self.ctx.parameters[2 * layer + 1][1])

    def _late(self, parameter: int, sums: Tensor) -> None:
        """Let a parameter have a gradient that the second stream writes in float32."""
        if not self.needs[parameter]:
            return
        if self.ctx.parameters[parameter][1] == sums.dtype:
            self.gradients[parameter] = sums
            return
        gradient = self._new(parameter)
        self.beside(lambda: gradient.copy_(sums), gradient, sums)

    def _new(self, parameter: int) -> Tensor:
        shape, dtype = self.ctx.parameters[parameter]
        gradient = torch.empty(shape, dtype=dtype, device=self.g.device)
        if self.needs[parameter]:
            self.gradients[parameter] = gradient
        return gradient


def _in_dtype(
    weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype, kinds: Sequence[Kind], ways: Ways
) -> list[Tensor]:
    """Return weight and bias of each layer in turn; those of products in `dtype`. Narrow layers' kernels cast them."""
    result = [parameter for pair in zip(weights, biases, strict=True) for parameter in pair]
    others = [i for i, p in enumerate(result) if kinds[i // 2] is Kind.PRODUCT and p.dtype != dtype]
    if not others:
        return result
    sources = [result[i].detach() for i in others]
    if ways.cast == "triton" and in_triton.can_run(sources[0].device):
        copies = in_triton.cast(sources, dtype)
    else:
        copies = [torch.empty_like(source, dtype=dtype) for source in sources]
        torch._foreach_copy_(copies, sources)
    for i, copy in zip(others, copies, strict=True):
        result[i] = copy
    return result


def _product_into(dw: Tensor, g: Tensor, x: Tensor, at_once: bool) -> None:
    """Write g' x into dw, whatever its dtype."""
    if dw.dtype == g.dtype:
        torch.mm(g.t(), x, out=dw)
    elif at_once and g.is_cuda and dw.dtype == torch.float32:
        torch.ops.aten.mm.dtype_out(g.t(), x, dw.dtype, out=dw)
    else:
        dw.copy_(torch.mm(g.t(), x))
