"""The sentence about a configuration value that can't be taken: its key, what was given, what would be accepted."""

import re
from enum import Enum
from types import NoneType
from typing import Any, get_args

import yaml
from omegaconf import (
    BooleanNode,
    DictConfig,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    LiteralNode,
    OmegaConf,
    StringNode,
    TupleConfig,
    UnionNode,
)
from omegaconf.errors import OmegaConfBaseException

from fasttrain.errors import nearest

ACCEPTED: dict[type[Any], str] = {
    IntegerNode: "an integer",
    FloatNode: "a number",
    BooleanNode: "true or false",
    StringNode: "text",
    ListConfig: "a list",
    DictConfig: "a mapping",
}
PLAIN: dict[type[Any], str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


REFUSALS = (OmegaConfBaseException, IndexError, ValueError, TypeError, AttributeError)
"""What OmegaConf raises for a value that it can't take."""


def refusal(config: DictConfig, key: str, value: Any, error: Exception) -> str:
    """Return why `key`, a dotted path, can't be set to `value` in `config`; of a mapping, which part of it can't.

    An empty key is the whole. Where `config` does not tell, the first line of OmegaConf's own error stands in.
    """
    node: Any = config
    walked = ""
    for part in parts(key):
        child = _child(node, part)
        if child is None:
            return _no_such_part(node, walked, part, key)
        node, walked = child, f"{walked}.{part}" if walked else part
    if isinstance(node, DictConfig) and isinstance(value, DictConfig) and (found := _refused_part(config, key, value)):
        return found
    accepted = _accepted(node)
    if accepted is None:
        return f"{key}: {' '.join(str(error).splitlines()[0].split()).rstrip('.')}."
    return f"{key} is {yaml_text(value)}; {accepted} is expected."


def parts(key: str) -> list[str]:
    """Split a dotted key into its parts: `a.b[0].c` and `a.b.0.c` are a, b, 0, c."""
    return re.sub(r"\[([^\[\]]*)\]", r".\1", key).split(".") if key else []


def yaml_text(value: Any) -> str:
    """Return a value on one line as an override would spell it."""
    plain = OmegaConf.to_container(value, resolve=False, enum_to_str=True) if OmegaConf.is_config(value) else value
    plain = plain.name if isinstance(plain, Enum) else plain
    try:
        text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    except yaml.YAMLError:
        return str(value)
    return text.strip().removesuffix("...").rstrip()


def yaml_problem(error: Exception) -> str:
    """Return what a YAML reader stumbled over, with the line where it has one."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None:
        return " ".join(str(error).split()).rstrip(".")
    return f"line {mark.line + 1}: {problem}" if mark is not None and mark.name != "<unicode string>" else str(problem)


def _refused_part(config: DictConfig, key: str, value: DictConfig) -> str | None:
    for name in value:
        node: Any = value._get_node(name)
        part = node if OmegaConf.is_config(node) else node._value()
        path = f"{key}.{name!s}" if key else str(name)
        try:
            OmegaConf.update(config.copy(), path, part, merge=isinstance(part, DictConfig), force_add=False)
        except REFUSALS as error:
            return refusal(config, path, part, error)
    return None


def _child(node: Any, part: str) -> Any:
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
        return node._get_node(part) if part in list(node) else None
    if isinstance(node, (ListConfig, TupleConfig)) and not node._is_none() and part.isdigit() and int(part) < len(node):
        return node._get_node(int(part))
    return None


def _no_such_part(node: Any, walked: str, part: str, key: str) -> str:
    if isinstance(node, DictConfig):
        return f"unknown key '{key}'; {nearest(part, [str(name) for name in node])}"
    if isinstance(node, (ListConfig, TupleConfig)):
        count = 0 if node._is_none() else len(node)
        holds = f"holds {count} item{'s' * (count != 1)}, numbered from 0" if count else "is an empty list"
        return f"there is no item '{part}' in {walked}, which {holds}; give the whole list: {walked}='[...]'."
    return f"unknown key '{key}': {walked} is a single value."


def _accepted(node: Any) -> str | None:
    hint = node._metadata.ref_type
    if isinstance(node, LiteralNode):
        words = f"one of {', '.join(yaml_text(choice) for choice in get_args(hint))}"
    elif isinstance(node, EnumNode):
        words = f"one of {', '.join(node._metadata.ref_type.__members__)}"
    elif isinstance(node, TupleConfig):
        lengths = get_args(hint)
        words = "a list" if not lengths or Ellipsis in lengths else f"a list of {len(lengths)}"
    elif isinstance(node, UnionNode):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        kinds = [kind for kind in kinds if kind is not int or float not in kinds]  # an integer is a number
        words = " or ".join(PLAIN.get(kind, str(kind)) for kind in kinds)
    elif type(node) in ACCEPTED:
        words = ACCEPTED[type(node)]
    else:
        return None
    return f"{words} or null" if node._is_optional() else words
