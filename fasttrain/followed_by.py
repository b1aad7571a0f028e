"""Which children of a module run into which others: of an nn.Sequential by their order, of others by a symbolic trace.

Only what holds in every call is found: the first child is called once, and its output goes into the second one alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import lightning.pytorch as pl
from torch import nn

from fasttrain.surgery import why_not_passed_by
from fasttrain.tracing import ChildrenAreLeaves, nodes_of

Wanted = Callable[[nn.Module], bool]


def followed_by(parent: nn.Module, first: Wanted, then: Wanted) -> Iterator[tuple[str, str]]:
    """Yield the names of two children, a `first` one and the `then` one that takes its output, and is called once too.

    Nothing is changed. A LightningModule's own children are seen only if it is an nn.Sequential, since its forward is
    not all that runs them; neither are those of a forward that can't be traced, because it depends on values.
    """
    children = {name: child for name, child in parent._modules.items() if child is not None}
    firsts = {name for name, child in children.items() if first(child)}
    thens = {name for name, child in children.items() if then(child)}
    if not firsts or not thens:
        return
    if type(parent).forward is nn.Sequential.forward:
        yield from ((one, two) for one, two in pairwise(children) if one in firsts and two in thens)
    elif not isinstance(parent, pl.LightningModule):
        yield from _traced(parent, firsts, thens)


def is_relu(module: object) -> bool:
    """Whether a module is a ReLU whose work another may do: torch's own, watched by no hook."""
    return type(module) is nn.ReLU and why_not_passed_by(module) is None


def is_stem_pool(module: object) -> bool:
    """Whether a module is a residual network's max-pooling, 3 x 3 at stride 2, whose work another may do."""
    if type(module) is not nn.MaxPool2d or why_not_passed_by(module) is not None:
        return False
    sizes = [tuple(v) if isinstance(v, (tuple, list)) else (v, v)
             for v in (module.kernel_size, module.stride, module.padding, module.dilation)]  # fmt: skip
    return sizes == [(3, 3), (2, 2), (1, 1), (1, 1)] and not module.ceil_mode and not module.return_indices


def _traced(parent: nn.Module, firsts: set[str], thens: set[str]) -> Iterator[tuple[str, str]]:
    nodes = nodes_of(parent, ChildrenAreLeaves()) or []
    calls = Counter(node.target for node in nodes if node.op == "call_module")
    for node in nodes:
        if node.op != "call_module" or node.target not in firsts or len(node.users) != 1:
            continue
        (user,) = node.users
        if user.op == "call_module" and user.target in thens and calls[node.target] == calls[user.target] == 1:
            yield str(node.target), str(user.target)
