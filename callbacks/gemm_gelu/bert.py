"""The feed-forward block in a BERT layer as the transformers library writes it, and its fused form.

There the block is spread over two modules of the layer, and the layer's method `feed_forward_chunk` runs one behind the
other: `intermediate` has a linear layer and an activation, `output` a second linear layer, dropout, and the residual
addition with its LayerNorm. Whether a layer is of this kind is not asked of its class but seen in a symbolic trace of
that method: RoBERTa's, ELECTRA's and others' layers are too, and one that does anything else is not.
"""

import operator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fasttrain.callbacks.gemm_gelu.feed_forward import linear_gelu_linear
from fasttrain.callbacks.gemm_gelu.form import Approximate
from fasttrain.randomness import random_state_kept
from fasttrain.surgery import why_not_passed_by
from fasttrain.tracing import nodes_of

METHOD = "feed_forward_chunk"
RUN_BY_IT = ("intermediate", "output")
CHAIN = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense", "output.dropout")
NORM = "output.LayerNorm"


class _FusedChunk(nn.Module):
    """Comes before a layer's own class."""

    _form: Approximate

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Return what the layer's own method does."""
        intermediate: Any = self.intermediate
        output: Any = self.output
        first, second = intermediate.dense, output.dense
        y = linear_gelu_linear(attention_output, first.weight, first.bias, second.weight, second.bias, self._form)
        # A fused output says how to go on from what its linear layer gives.
        end = getattr(output, "end", None)
        return end(y, attention_output) if end else output.LayerNorm(output.dropout(y) + attention_output)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _unpickled, (type(self).__mro__[2],), vars(self)


def fused_layer(layer: nn.Module) -> nn.Module:
    """Return a layer of a class derived from its own, around the same submodules, whose block is fused."""
    parts: Any = layer
    fused = _unpickled(type(layer))
    vars(fused).update(vars(layer), _form=form_of(parts.intermediate.intermediate_act_fn))
    return fused


def is_bert_layer(module: nn.Module) -> bool:
    """Whether a module's `feed_forward_chunk` is Linear, GELU, Linear, dropout, addition, LayerNorm, and not fused."""
    method = getattr(type(module), METHOD, None)
    if method is None or isinstance(module, _FusedChunk) or METHOD in vars(module):
        return False
    parts = dict(module.named_modules())
    if any(name not in parts or why_not_passed_by(parts[name]) for name in (*RUN_BY_IT, *CHAIN[:3])):
        return False
    if type(parts[CHAIN[0]]) is not nn.Linear or type(parts[CHAIN[2]]) is not nn.Linear:
        return False
    return form_of(parts[CHAIN[1]]) is not None and _is_the_chain(module)


def form_of(activation: nn.Module) -> Approximate | None:
    """Return the form of GELU that an activation computes, found by trying it where its class is not nn.GELU."""
    if type(activation) is nn.GELU:
        return "tanh" if activation.approximate == "tanh" else "none"
    if list(activation.parameters()):
        return None
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    try:
        with torch.no_grad(), random_state_kept():
            found = activation(x)
    except Exception:  # it takes something else than a tensor, and may raise anything
        return None
    forms: tuple[Approximate, ...] = ("none", "tanh")
    for form in forms:
        # The forms are 5e-4 apart, and some write the constants of the second with fewer digits.
        if isinstance(found, Tensor) and torch.allclose(found, F.gelu(x, approximate=form), rtol=0, atol=1e-6):
            return form
    return None


def _is_the_chain(layer: nn.Module) -> bool:
    nodes = nodes_of(layer, _Chunk())
    if nodes is None or len(nodes) != len(CHAIN) + 4:
        return False
    x, *chain, add, norm, result = nodes
    for before, node, name in zip((x, *chain), chain, CHAIN, strict=False):
        if (node.op, node.target, node.args, node.kwargs) != ("call_module", name, (before,), {}):
            return False
    return (
        x.op == "placeholder"
        and add.target in (operator.add, torch.add)
        and set(add.args) == {x, chain[-1]}
        and not add.kwargs
        and (norm.op, norm.target, norm.args) == ("call_module", NORM, (add,))
        and (result.op, result.args) == ("output", (norm,))
    )


class _Chunk(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.traced_func_name = METHOD

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in RUN_BY_IT


@cache
def _derived(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{kind.__name__}", (_FusedChunk, kind), {})


def _unpickled(kind: type[nn.Module]) -> nn.Module:
    derived = _derived(kind)  # type: ignore[arg-type]
    return derived.__new__(derived)
