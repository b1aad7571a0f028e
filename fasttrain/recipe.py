"""Find a recipe, resolve its configuration for this machine, and build the module and data it names."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fasttrain.config import (
    CONFIGS,
    RECIPES,
    Layer,
    Resolved,
    RunConfig,
    TargetConfig,
    apply_override,
    leaves,
    load_layer,
    merge,
    origins,
    override_values,
    thaw,
)
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, nearest
from fasttrain.judgement import parts, yaml_text
from fasttrain.sections import SECTIONS, import_class, instantiate, schema_of, take_class, take_class_override

COMMAND_LINE = "command line"
CHOICES = ("hardware", "preset", "optimizations")
"""Keys whose values choose layers."""


@runtime_checkable
class KnowsFacts(Protocol):
    """A data module that can tell the model what only the data knows, such as the number of classes."""

    def facts(self) -> dict[str, Any]:
        """Return values by key, which take the place of the module section's defaults. Called after `prepare_data`."""
        ...


@dataclass(frozen=True)
class Recipe:
    """A model, its data and the configuration they were made from. Correct and plain with every optimization off."""

    module: pl.LightningModule
    data: pl.LightningDataModule
    resolved: Resolved


def recipe_names() -> dict[str, Path]:
    """Return name -> file of the recipes that come with the package."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe given by path, or by name from any folder.

    Raises:
        ConfigError: it is neither; the nearest name is given.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"'{name}' is a folder; a recipe is a YAML file, or one of: {', '.join(recipe_names())}.")
    known = recipe_names()
    if name in known:
        return known[name]
    if path.suffix in (".yaml", ".yml") and path.stem in known and path.parent.name in ("", "recipes"):
        return known[path.stem]
    if "=" in name:
        raise ConfigError(f"'{name}' stands where the recipe is named; write it after the recipe.")
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"there is no recipe file '{name}'; shipped recipes: {', '.join(known)}.")
    raise ConfigError(f"there is no recipe '{name}'; {nearest(name, known)}")


def resolve(recipe: Path, overrides: Iterable[str] = (), hardware: Hardware | None = None) -> Resolved:
    """Merge and judge all layers of a recipe for this machine.

    Raises:
        ConfigError: an unknown key, preset, fragment or class, or a value of the wrong type.
    """
    try:
        return _resolve(recipe, override_values(overrides), hardware or Hardware.here())
    except OmegaConfBaseException as error:  # such as a reference in a place where it is needed at once
        raise ConfigError(f"{recipe.name}: {' '.join(str(error).splitlines()[0].split()).rstrip('.')}.") from error


def build(resolved: Resolved) -> Recipe:
    """Instantiate the data module, let it prepare its data, and instantiate the module with what the data knows.

    Raises:
        ConfigError, DataError: from the classes' own judgement of their values and files.
    """
    config, classes = resolved.config, resolved.classes
    module_class = import_class(classes["module"], "module")
    data = build_data(resolved)
    if isinstance(data, KnowsFacts):
        _fill_in(resolved, data.facts())
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    module = instantiate(module_class, config["module"], "module")
    if not isinstance(module, pl.LightningModule):
        raise ConfigError(f"module: {classes['module']} is not a LightningModule.")
    return Recipe(module, data, resolved)


def build_data(resolved: Resolved) -> pl.LightningDataModule:
    """Instantiate the data module alone, and let it prepare its data.

    Raises:
        ConfigError, DataError: from the class's own judgement of its values and files.
    """
    data_class = import_class(resolved.classes["data"], "data")
    data = instantiate(data_class, resolved.config["data"], "data")
    if not isinstance(data, pl.LightningDataModule):
        kind = data_class.__mro__[1].__name__
        raise ConfigError(f"data: {resolved.classes['data']} is a {kind}, not a LightningDataModule.")
    data.prepare_data()
    return data


def _fill_in(resolved: Resolved, facts: dict[str, Any]) -> None:
    """Let what the data knows replace defaults, at any depth of the module section, but nothing that someone wrote."""
    for key, _ in list(leaves(resolved.config["module"], "module")):
        name = key.rpartition(".")[2]
        if name in facts and resolved.origin.get(key, "default") == "default":
            apply_override(resolved.config, key, facts[name])
            resolved.origin[key] = "data"


def _resolve(recipe: Path, items: list[tuple[str, Any]], hardware: Hardware) -> Resolved:
    front = load_layer(recipe, recipe.name)
    values = front.values
    presets, preset_for = _presets(front)
    if "recipe" not in values:
        values["recipe"] = recipe.stem
    command = {key: value for key, value in items if key in CHOICES}
    items = [item for item in items if item[0] not in ("hardware", "preset")]

    if values.pop("resolved", False):  # a run folder's config.yaml: no machine's defaults may change its values
        if command.get("preset") is not None:
            raise ConfigError(
                f"preset={command['preset']}: {front.name} is a finished configuration, in which every value is "
                "settled; presets are chosen where its recipe is named."
            )
        layers, note = [front], None
        if "hardware" in command:
            layers.append(_hardware_layer(command["hardware"], hardware))
    else:
        hardware_layer = _hardware_layer(command.get("hardware", values.get("hardware", "auto")), hardware)
        layers = [load_layer(CONFIGS / "base.yaml", "configs/base"), front, hardware_layer]
        asked = command.get("preset", values.get("preset"))
        preset = preset_for.get(hardware_layer.values["hardware"]) if asked is None else asked
        note = f"{hardware.sentence}: preset '{preset}'" if preset is not None and asked is None else None
        if note and (others := [name for name in presets if name != preset]):
            note += f" (preset={others[-1]} overrides)"
        if preset is not None:
            layers.append(_preset_layer(presets, preset, front.name))
    if isinstance(command.get("optimizations"), str):
        layers.append(Layer(COMMAND_LINE, OmegaConf.create({"optimizations": command["optimizations"]})))
        items = [item for item in items if item[0] != "optimizations"]
    return _judge(front.name, _with_sets_expanded(layers), items, note)


def _judge(recipe: str, layers: list[Layer], items: list[tuple[str, Any]], note: str | None) -> Resolved:
    schema, classes, origin = OmegaConf.structured(RunConfig), {}, {}
    for section in SECTIONS:
        for position, layer in enumerate(layers):
            layers[position], path = take_class(layer, section)
            if path is not None:
                classes[section], origin[f"{section}.class"] = path, layer.name
        path, items = take_class_override(items, section)
        if path is not None:
            classes[section], origin[f"{section}.class"] = path, COMMAND_LINE
        if section not in classes:
            raise ConfigError(
                f"{recipe}: no '{section}' is given; name a class: {section}: my_project.{section}.LitThing."
            )
        section_schema = schema_of(import_class(classes[section], section))
        schema[section] = {} if section_schema is None else section_schema
    config = merge(thaw(schema), layers)
    for key, value in items:
        _make_way(config, key)
        apply_override(config, key, value)
    _judge_whole(recipe, config)
    origin |= origins(config, layers)
    for key, _ in items:
        overridden = ".".join(parts(key))
        for leaf in origin:
            if leaf == overridden or leaf.startswith(overridden + ".") or overridden.startswith(leaf + "."):
                origin[leaf] = COMMAND_LINE
    resolved = Resolved(config, classes, origin, note)
    _ = resolved.run  # the sections' dataclasses judge their values when they are made
    return resolved


def _judge_whole(recipe: str, config: DictConfig) -> None:
    """Look up references, and see that nothing is missing that no class can fill in."""
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{recipe}: {key}{' '.join(str(error).splitlines()[0].split()).rstrip('.')}.") from None
    missing = sorted(key for key in OmegaConf.missing_keys(config) if key.partition(".")[0] not in SECTIONS)
    if missing:
        raise ConfigError(f"{recipe}: {missing[0]} must be set.")


def _make_way(config: DictConfig, key: str) -> None:
    """Let an override reach below a value that is null or absent where any key is allowed."""
    head, *rest = parts(key)
    if head == "optimizations" and len(rest) > 1:
        if not isinstance(config.optimizations.get(rest[0]), DictConfig):  # null, false and true leave no parameters
            config.optimizations[rest[0]] = {}
        OmegaConf.set_struct(config.optimizations[rest[0]], False)
    elif head == "target" and rest and config.target is None:
        config.target = OmegaConf.structured(TargetConfig)


def _presets(front: Layer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the presets, by name, and the names of those meant for a kind of hardware out of a recipe's values."""
    presets, preset_for = (_take_mapping(front, key) for key in ("presets", "preset_for"))
    for kind, name in preset_for.items():
        if kind not in _hardware_files():
            raise ConfigError(f"{front.name}: preset_for.{kind}: unknown hardware; {nearest(kind, _hardware_files())}")
        if str(name) not in presets:
            raise ConfigError(
                f"{front.name}: preset_for.{kind} is {name}, no such preset; {nearest(str(name), presets)}"
            )
    for name, values in presets.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{front.name}: presets.{name} is {yaml_text(values)}; a mapping of values is expected.")
    return presets, preset_for


def _take_mapping(layer: Layer, key: str) -> dict[str, Any]:
    value = layer.values.pop(key, None) or {}
    if not isinstance(value, (dict, DictConfig)):
        raise ConfigError(f"{layer.name}: {key} is {yaml_text(value)}; a mapping of names is expected.")
    plain = OmegaConf.to_container(OmegaConf.create(value), resolve=False)
    assert isinstance(plain, dict)
    return {str(name): item for name, item in plain.items()}


def _preset_layer(presets: dict[str, Any], name: Any, recipe: str) -> Layer:
    if str(name) not in presets:
        has = f"has no such preset; {nearest(str(name), presets)}" if presets else "has no presets."
        raise ConfigError(f"preset={yaml_text(name)}: {recipe} {has}")
    return Layer(f"preset {name}", OmegaConf.create({**presets[str(name)], "preset": str(name)}))


def _hardware_files() -> dict[str, Path]:
    return {path.stem: path for path in (CONFIGS / "hardware").glob("*.yaml")}


def _hardware_layer(name: Any, hardware: Hardware) -> Layer:
    files = _hardware_files()
    chosen = hardware.kind if name == "auto" else name
    if not isinstance(chosen, str) or chosen not in files:
        raise ConfigError(
            f"hardware={yaml_text(chosen)}: there is no such file in configs/hardware; {nearest(str(chosen), files)}"
        )
    layer = load_layer(files[chosen], f"hardware {chosen}")
    layer.values["hardware"] = chosen
    return layer


def _with_sets_expanded(layers: list[Layer]) -> list[Layer]:
    """Put the file of configs/optimizations in the place of its name.

    It means that set and no other: what the layers before it ask for is dropped.
    """
    expanded: list[Layer] = []
    for layer in layers:
        name = layer.values.get("optimizations")
        expanded.append(layer)
        if isinstance(name, str):
            for each in expanded:
                each.values.pop("optimizations", None)
            expanded.append(_set_layer(name))
    return expanded


def _set_layer(name: str) -> Layer:
    files = {path.stem: path for path in (CONFIGS / "optimizations").glob("*.yaml")}
    if name not in files:
        raise ConfigError(f"optimizations={name}: no such set in configs/optimizations; {nearest(name, files)}")
    return load_layer(files[name], f"optimizations {name}")
