"""A module's configuration again, from what its checkpoint keeps of it."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C")


def config_of(kind: type[C], config: C | Mapping[str, Any]) -> C:
    """Return a configuration as it is, or made of a checkpoint's hyperparameters, which are `asdict` of one.

    Args:
        kind: a dataclass, some of whose fields are dataclasses that hold plain values.

    Raises:
        TypeError: the mapping holds a name that the dataclass lacks, as a later version's checkpoint may.
    """
    if not isinstance(config, Mapping):
        return config
    hints = get_type_hints(kind)
    return kind(**{name: _part(hints.get(name), value) for name, value in config.items()})


def _part(kind: Any, value: Any) -> Any:
    return kind(**value) if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping) else value
