"""Find a recipe, resolve its configuration for this machine, and build the module and data it names."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from omegaconf import DictConfig, OmegaConf

from fasttrain.config import (
    CONFIGS,
    RECIPES,
    Layer,
    Resolved,
    RunConfig,
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
from fasttrain.sections import SECTIONS, import_class, instantiate, schema_of, take_class


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
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"there is no recipe file '{name}'; shipped recipes: {', '.join(known)}.")
    raise ConfigError(f"there is no recipe '{name}'; {nearest(name, known)}")


def resolve(recipe: Path, overrides: Iterable[str] = (), hardware: Hardware | None = None) -> Resolved:
    """Merge and judge all layers of a recipe for this machine.

    Raises:
        ConfigError: an unknown key, preset, fragment or class, or a value of the wrong type.
    """
    hardware = hardware or Hardware.here()
    items = override_values(overrides)
    front = load_layer(recipe)
    values = front.values.copy()
    presets = values.pop("presets", None) or {}
    preset_for = values.pop("preset_for", None) or {}
    command = _first_values(items, ("hardware", "preset", "optimizations", *SECTIONS))

    hardware_name = command.get("hardware", values.get("hardware", "auto"))
    hardware_layer = _hardware_layer(hardware_name, hardware)
    preset = command.get("preset", values.get("preset"))
    note = None
    if preset is None and presets:
        preset = preset_for.get(hardware_layer.values.get("hardware", hardware.kind))
        if preset is not None:
            note = f"{hardware.sentence}: preset '{preset}' (preset={_other(presets, preset)} overrides)"
    layers = [load_layer(CONFIGS / "base.yaml", "configs/base"), Layer(recipe.name, values)]
    fragment = command.get("optimizations", values.get("optimizations"))
    if isinstance(fragment, str):
        layers[1].values.pop("optimizations", None)
        layers.append(_fragment_layer(fragment))
        items = [item for item in items if item[0] != "optimizations"]
    layers.append(hardware_layer)
    if front.values.get("resolved"):
        # A run folder's config.yaml holds every value already: no machine's defaults may change them.
        layers = [layer for layer in layers if layer is not hardware_layer and layer.name != "configs/base"]
        layers[0].values.pop("resolved", None)
    elif preset is not None:
        if preset not in presets:
            raise ConfigError(f"preset={preset}: {recipe.name} has no such preset; {nearest(str(preset), presets)}")
        layers.append(Layer(f"preset {preset}", OmegaConf.create(presets[preset])))
    return _judge(layers, items, hardware_layer.values.get("hardware"), preset, note)


def build(resolved: Resolved) -> Recipe:
    """Instantiate the data module, let it prepare its data, and instantiate the module with what the data knows.

    Raises:
        ConfigError, DataError: from the classes' own judgement of their values and files.
    """
    config, classes = resolved.config, resolved.classes
    data_class, module_class = (import_class(classes[section], section) for section in ("data", "module"))
    data = instantiate(data_class, config["data"], "data")
    if not isinstance(data, pl.LightningDataModule):
        raise ConfigError(f"data: {classes['data']} is a {data_class.__mro__[1].__name__}, not a LightningDataModule.")
    data.prepare_data()
    if isinstance(data, KnowsFacts):
        _fill_in(resolved, data.facts())
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    module = instantiate(module_class, config["module"], "module")
    if not isinstance(module, pl.LightningModule):
        raise ConfigError(f"module: {classes['module']} is not a LightningModule.")
    return Recipe(module, data, resolved)


def _fill_in(resolved: Resolved, facts: dict[str, Any]) -> None:
    """Let what the data knows replace defaults, at any depth of the module section, but nothing that someone wrote."""
    for key, _ in list(leaves(resolved.config["module"], "module")):
        name = key.rpartition(".")[2]
        if name in facts and resolved.origin.get(key, "default") == "default":
            apply_override(resolved.config, key, facts[name])
            resolved.origin[key] = "data"


def _judge(
    layers: list[Layer], items: list[tuple[str, Any]], hardware: str | None, preset: str | None, note: str | None
) -> Resolved:
    classes: dict[str, str] = {}
    schema = OmegaConf.structured(RunConfig)
    items = [(f"{key}.class", value) if key in SECTIONS and isinstance(value, str) else (key, value)
             for key, value in items]  # fmt: skip
    for section in SECTIONS:
        for position, layer in enumerate(layers):
            layers[position], path = take_class(layer, section)
            classes[section] = path or classes.get(section, "")
        for key, value in items:
            if key == f"{section}.class":
                classes[section] = value
        if not classes[section]:
            raise ConfigError(
                f"{layers[-1].name if len(layers) == 1 else layers[1].name}: no '{section}' is given; name a class: {section}: my_project.{section}.LitClass."
            )
        section_schema = schema_of(import_class(classes[section], section))
        schema[section] = {} if section_schema is None else section_schema
    items = [item for item in items if item[0] not in {f"{section}.class" for section in SECTIONS}]
    config = merge(thaw(schema), layers)
    for key, value in items:
        if key in ("hardware", "preset"):
            continue
        _make_way(config, key)
        apply_override(config, key, value)
    config["preset"] = preset
    if hardware:
        config["hardware"] = hardware
    if not OmegaConf.is_missing(config, "recipe"):
        _resolve_references(config)
    command_layer = Layer("command line", OmegaConf.create({}))
    origin = origins(config, layers)
    for key, _ in items:
        plain = key.replace("[", ".").replace("]", "")
        for leaf in origin:
            if leaf == plain or leaf.startswith(plain + ".") or plain.startswith(leaf + "."):
                origin[leaf] = command_layer.name
    return Resolved(config, classes, origin, note)


def _resolve_references(config: DictConfig) -> None:
    try:
        OmegaConf.resolve(config)
    except Exception as error:
        raise ConfigError(f"a reference can't be resolved: {' '.join(str(error).split())}.") from None


def _make_way(config: DictConfig, key: str) -> None:
    """Let an override reach below a value that is null or absent where any key is allowed."""
    head, _, rest = key.partition(".")
    if head == "optimizations" and rest:
        name, _, deeper = rest.partition(".")
        if (deeper and (name not in config.optimizations or config.optimizations[name] is None)) or (deeper and isinstance(config.optimizations[name], bool)):
            config.optimizations[name] = {}
        if deeper:
            OmegaConf.set_struct(config.optimizations[name], False)
    elif head == "target" and rest and config.target is None:
        config.target = {}


def _first_values(items: list[tuple[str, Any]], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in items if key in keys}


def _hardware_layer(name: str, hardware: Hardware) -> Layer:
    files = {path.stem: path for path in (CONFIGS / "hardware").glob("*.yaml")}
    chosen = hardware.kind if name == "auto" else name
    if chosen not in files:
        raise ConfigError(f"hardware={chosen}: there is no such file in configs/hardware; {nearest(chosen, files)}")
    layer = load_layer(files[chosen], f"hardware {chosen}")
    layer.values["hardware"] = chosen
    return layer


def _fragment_layer(name: str) -> Layer:
    files = {path.stem: path for path in (CONFIGS / "optimizations").glob("*.yaml")}
    if name not in files:
        raise ConfigError(f"optimizations={name}: no such set in configs/optimizations; {nearest(name, files)}")
    return load_layer(files[name], f"optimizations {name}")


def _other(presets: Any, chosen: str) -> str:
    others = [str(name) for name in presets if name != chosen]
    return others[-1] if others else chosen
