"""What a module's forward calls, by a symbolic trace; nothing of the module is changed."""

import copy

from torch import fx, nn

from fasttrain.randomness import random_state_kept


class ChildrenAreLeaves(fx.Tracer):
    """Traces a forward and not into the modules that it calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say that it is one."""
        return True


def nodes_of(module: nn.Module, tracer: fx.Tracer) -> list[fx.Node] | None:
    """Return the nodes in order; None for what can't be traced, because it depends on values for instance."""
    # With the same children, and to which a forward may assign as it likes.
    copied = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(copied)[name] = dict(vars(module)[name])
    try:
        with random_state_kept():
            return list(tracer.trace(copied).nodes)
    except Exception:  # a forward may raise anything on trying
        return None
