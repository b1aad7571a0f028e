"""The `module` and `data` sections: which class they name, what its parameters are, and an instance of it."""

import importlib
import inspect
from contextlib import suppress
from dataclasses import field, is_dataclass, make_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fasttrain.config import Layer, thaw
from fasttrain.errors import ConfigError, nearest
from fasttrain.judgement import yaml_text

SECTIONS = ("module", "data")


def import_class(path: str, section: str) -> type:
    """Import a class by its dotted path.

    Raises:
        ConfigError: naming the section, and what of the path was not found.
    """
    module = _import_module(path, section)
    module_name, _, class_name = path.rpartition(".")
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"{section}: '{module_name}' has no class '{class_name}'; {nearest(class_name, classes)}")
    return found


def import_named(path: str, section: str) -> Any:
    """Import whatever is at a dotted path, a constant for instance.

    Raises:
        ConfigError: as `import_class`.
    """
    module = _import_module(path, section)
    module_name, _, name = path.rpartition(".")
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ConfigError(f"{section}: '{module_name}' has no '{name}'; {nearest(name, public)}")
    return getattr(module, name)


def _import_module(path: str, section: str) -> Any:
    module_name, _, _ = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{section}: '{path}' isn't a dotted path; write it like my_project.models.LitThing.")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{section}: there is no module '{error.name}' for '{path}'; install it or run from the folder "
                "that holds it."
            ) from None
        raise


def take_class(layer: Layer, section: str) -> tuple[Layer, str | None]:
    """Split a layer's section into its values and the class it names, which may be a bare string."""
    if section not in layer.values or layer.values._get_node(section)._is_none():  # type: ignore[union-attr]
        return layer, None
    values = layer.values.copy()
    node = values[section]
    if isinstance(node, str):
        values[section] = {}
        return Layer(layer.name, values), node
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{layer.name}: {_no_class(section, node)}")
    path = node.pop("class", None)
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{layer.name}: {_no_class(f'{section}.class', path)}")
    return Layer(layer.name, values), path


def take_class_override(items: list[tuple[str, Any]], section: str) -> tuple[str | None, list[tuple[str, Any]]]:
    """Split overrides into the class that they name for a section, if any, and the rest of them."""
    path: str | None = None
    rest = []
    for key, value in items:
        if key == section and isinstance(value, DictConfig):
            value = value.copy()
            path = value.pop("class", path)
            rest.append((key, value))
        elif key not in (section, f"{section}.class"):
            rest.append((key, value))
        elif isinstance(value, str):
            path = value
        else:
            raise ConfigError(_no_class(key, value))
    return path, rest


def _no_class(key: str, value: Any) -> str:
    return f"{key} is {yaml_text(value)}; the dotted path of a class is expected, like my_project.models.LitThing."


def schema_of(cls: type) -> DictConfig | None:
    """Return the typed parameters of a class, or None if it takes arbitrary keyword arguments.

    A parameter without a default is MISSING. One whose default or annotation YAML can't express is of type Any and
    MISSING too: left out of the call unless it is set.
    """
    config_class = _config_parameter(cls)
    if config_class is not None:
        return thaw(OmegaConf.structured(config_class))
    parameters = _parameters(cls)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    hints = _hints(cls)
    fields = [_schema_field(parameter, hints.get(name, Any)) for name, parameter in parameters.items()]
    return thaw(OmegaConf.structured(make_dataclass(cls.__name__, fields)))


def instantiate(cls: type, values: DictConfig, section: str) -> Any:
    """Call a class with a section's values.

    Raises:
        ConfigError: a required parameter is not set.
    """
    as_one = _config_parameter(cls) is not None
    optional = set() if as_one else {name for name, p in _parameters(cls).items() if p.default is not p.empty}
    above = f"{values._get_full_key(None)}."  # OmegaConf names missing keys from the root
    missing = sorted({key.removeprefix(above) for key in OmegaConf.missing_keys(values)} - optional)
    if missing:
        raise ConfigError(f"{section}.{missing[0]} must be set for {cls.__name__}.")
    if as_one:
        return cls(OmegaConf.to_object(values))
    return cls(**{str(key): _plain(values[key]) for key in values if not OmegaConf.is_missing(values, key)})


def _plain(value: Any) -> Any:
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    if cls.__init__ is object.__init__:  # type: ignore[misc]  # its signature claims to take anything
        return {}
    parameters = dict(inspect.signature(cls.__init__).parameters)  # type: ignore[misc]
    parameters.pop("self", None)
    return {n: p for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}


def _hints(cls: type) -> dict[str, Any]:
    function: Any = cls.__init__  # type: ignore[misc]
    hints: dict[str, Any] = {}
    # One by one: annotations of foreign code may name things that only a type checker sees.
    for name, annotation in getattr(function, "__annotations__", {}).items():
        one: Any = lambda: None  # noqa: E731  # something to hold a single annotation
        one.__annotations__ = {name: annotation}
        with suppress(Exception):
            hints |= get_type_hints(one, globalns=getattr(function, "__globals__", None))
    return hints


def _config_parameter(cls: type) -> type | None:
    parameters = _parameters(cls)
    if len(parameters) != 1:
        return None
    annotation = _hints(cls).get(next(iter(parameters)))
    return annotation if isinstance(annotation, type) and is_dataclass(annotation) else None


def _schema_field(parameter: inspect.Parameter, annotation: Any) -> tuple[str, Any, Any]:
    name, default = parameter.name, parameter.default
    if default is parameter.empty and is_dataclass(annotation):
        default = field(default_factory=lambda: OmegaConf.structured(annotation))
    elif default is parameter.empty:
        default = "???"
    elif isinstance(default, (list, dict)):
        default = _factory(default)
    for candidate in (annotation, Any):
        for value in (default, "???"):
            if _expressible(name, candidate, value):
                return name, candidate, value
    raise AssertionError("OmegaConf holds a MISSING value of type Any")


def _factory(value: Any) -> Any:
    return field(default_factory=lambda: value)


def _expressible(name: str, annotation: Any, default: Any) -> bool:
    try:
        OmegaConf.structured(make_dataclass("Probe", [(name, annotation, default)]))
    except (OmegaConfBaseException, TypeError, ValueError):
        return False
    return True
