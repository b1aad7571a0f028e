"""Parameter groups by path: weights in one, biases and normalization layers in another without decay and adaptation.

Source: the skip list of MLPerf's LARS ('batch_normalization', 'bias') and BERT's groups ('bias', 'gamma', 'beta',
'LayerNorm').
"""

from collections.abc import Callable
from typing import Any

from torch import nn

NoDecay = Callable[[str, nn.Module], bool]


def is_bias_or_norm(path: str, owner: nn.Module) -> bool:
    """Whether a parameter is a bias, an RNN's included, or belongs to a normalization layer.

    Args:
        path: the parameter's, `encoder.0.bias` for instance.
        owner: the module that it belongs to; a normalization layer is one with "norm" in the name of its class or of
            a class that this derives from.
    """
    name = path.rpartition(".")[2]
    is_bias = name == "bias" or name.startswith(("bias_ih_l", "bias_hh_l")) or name.endswith("_bias")
    return is_bias or any("norm" in cls.__name__.lower() for cls in type(owner).__mro__)


def parameter_groups(
    module: nn.Module, weight_decay: float, no_decay: NoDecay = is_bias_or_norm
) -> list[dict[str, Any]]:
    """Return the parameters in at most two groups for LAMB, LARS or any torch optimizer; none of them is changed.

    The second group has `weight_decay` 0 and `adapt` False, which means something to LAMB and LARS only. A parameter
    that is shared is in it if one of its paths is.

    Args:
        module: all its parameters are taken, frozen ones too.
        weight_decay: of the first group.
        no_decay: given path and owner of each parameter, says which belong to the second group.
    """
    excluded: dict[Any, bool] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            excluded[parameter] = excluded.get(parameter, False) or no_decay(path, owner)
    decayed = [parameter for parameter, is_excluded in excluded.items() if not is_excluded]
    others = [parameter for parameter, is_excluded in excluded.items() if is_excluded]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
