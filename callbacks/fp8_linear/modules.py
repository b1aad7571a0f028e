"""The modules in the places of a model's own, around the same parameters."""

from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn

from fasttrain.callbacks.fp8_linear import feed_forward, linear
from fasttrain.callbacks.fp8_linear.backend import Tier
from fasttrain.callbacks.fp8_linear.cast import Approximate
from fasttrain.callbacks.fp8_linear.functions import fp8_feed_forward, fp8_linear
from fasttrain.callbacks.fp8_linear.scaling import Scales, Scaling, no_scales
from fasttrain.callbacks.gemm_gelu.bert import form_of
from fasttrain.callbacks.joined_linear import JoinedLinear
from fasttrain.surgery import with_state_of

M = TypeVar("M", bound=nn.Module)
BUFFER = "fp8_scales"


class HasScales(nn.Module):
    """What modules with FP8 products have in common: scales, in a buffer that is not in the state dict."""

    tier: Tier = "auto"
    _scaling: Scaling
    _begun: set[int]

    @property
    def scales(self) -> Scales:
        """The scales of this module's tensors."""
        return Scales(getattr(self, BUFFER), self._begun, self._scaling)

    def scale_state(self) -> list[list[int]] | None:
        """Return the scales for a checkpoint; None before the first step."""
        values: list[list[int]] = self.scales.values.tolist()
        return values if self._begun else None

    def load_scale_state(self, values: list[list[int]]) -> None:
        """Go on with scales of a checkpoint."""
        buffer = self.scales.values
        buffer.copy_(buffer.new_tensor(values))
        self._begun.update(range(len(values)))


class FP8Linear(HasScales, nn.Linear):
    """nn.Linear, in training by FP8 products where the device and the sizes allow it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what nn.Linear does, of rounded operands."""
        if not self.training:
            return super().forward(input)
        return fp8_linear(input, [self.weight], [self.bias], self.scales, self.tier)[0]


class FP8JoinedLinear(HasScales, JoinedLinear):
    """JoinedLinear by FP8 products: the input is cast once."""

    def forward(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """Return (..., out) of each layer."""
        if not self.training:
            return super().forward(x, *layers)
        return fp8_linear(
            x, [layer.weight for layer in layers], [layer.bias for layer in layers], self.scales, self.tier
        )


class FP8Chunk(HasScales):
    """Comes before a BERT layer's own class; see `gemm_gelu.bert`."""

    _form: Approximate

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Return what the layer's own method does."""
        if not self.training:
            return super().feed_forward_chunk(attention_output)  # type: ignore[misc, no-any-return]
        parts: Any = self
        first, second, output = parts.intermediate.dense, parts.output.dense, parts.output
        y = fp8_feed_forward(
            attention_output, first.weight, first.bias, second.weight, second.bias, self.scales, self._form, self.tier
        )
        # A fused output says how to go on from what its linear layer gives.
        end = getattr(output, "end", None)
        return end(y, attention_output) if end else output.LayerNorm(output.dropout(y) + attention_output)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _unpickled, (type(self).__mro__[3],), vars(self)


def in_fp8(module: nn.Module, scaling: Scaling) -> nn.Module:
    """Return the FP8 form of an nn.Linear, a JoinedLinear or a BERT layer."""
    if isinstance(module, JoinedLinear):
        return _with_scales(module, FP8JoinedLinear, linear.TENSORS, scaling)
    if isinstance(module, nn.Linear):
        return _with_scales(module, FP8Linear, linear.TENSORS, scaling)
    derived = _derived(type(module))  # type: ignore[arg-type]
    fused = _with_scales(module, derived, feed_forward.TENSORS, scaling)
    parts: Any = module
    vars(fused)["_form"] = form_of(parts.intermediate.intermediate_act_fn)
    return fused


def _with_scales(module: nn.Module, kind: type[M], tensors: int, scaling: Scaling) -> M:
    new = with_state_of(module, kind)
    # The old module is not to have the buffer.
    vars(new)["_buffers"] = dict(module._buffers)
    vars(new)["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    parameter = next(module.parameters(), None)
    values = no_scales(tensors)
    new.register_buffer(BUFFER, values if parameter is None else values.to(parameter.device), persistent=False)
    vars(new).update(_scaling=scaling, _begun=set())
    return new


@cache
def _derived(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"FP8{kind.__name__}", (FP8Chunk, kind), {})


def _unpickled(kind: type[nn.Module]) -> nn.Module:
    derived = _derived(kind)  # type: ignore[arg-type]
    return derived.__new__(derived)
