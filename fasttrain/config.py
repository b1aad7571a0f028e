"""A run's configuration: typed values, merged from layers, judged, and each with a record of where it came from.

    schema defaults < configs/base < recipe < optimizations fragment < hardware < preset < command line

The schema of the `module` and `data` sections is read off the class that the section names: a single dataclass
parameter is the schema, otherwise every parameter of `__init__` is a key. So a user's own Lightning classes get the
same checks as ours, without a line for us in their code.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf, TupleConfig
from omegaconf.errors import OmegaConfBaseException

from fasttrain.errors import ConfigError
from fasttrain.judgement import REFUSALS, refusal, yaml_problem
from fasttrain.mlperf.config import MLPerfConfig

CONFIGS = Path(__file__).parent / "configs"
RECIPES = Path(__file__).parent / "recipes"
LARGEST_SEED = 2**32 - 1


@dataclass
class TargetConfig:
    """The score at which a run has done its work and stops."""

    metric: str = "???"
    """Name under which the module logs the score."""
    value: float = "???"  # type: ignore[assignment]
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller score is better."""
    stop: bool = True
    """Stop as soon as it is reached; otherwise only record when that was."""


@dataclass
class CheckpointConfig:
    """When the run's state is written, besides on Ctrl-C and at the end."""

    every_n_steps: int | None = None
    every_n_epochs: int | None = None
    every_n_minutes: float | None = 2.0
    """Looked at after every step, on one process, and at the end of every epoch, on any number."""

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "every_n_epochs", "every_n_minutes"):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigError(f"checkpoint.{name} is {value}; it must be above 0, or null for never.")


@dataclass
class DDPConfig:
    """How gradients are averaged over several processes, where `trainer.strategy` is `ddp`, or `auto` makes it that."""

    bucket_cap_mb: int | None = None
    """Megabytes of gradients in one all-reduce; null is torch's own, 25."""
    gradient_as_bucket_view: bool = True
    """Have gradients lie in the buckets that are reduced: less memory by their size, and no copy back."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    find_unused_parameters: bool = False
    """Look in every step for parameters that the loss does not depend on."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """The type in which gradients travel between GPUs; they are rounded to it before they are added up."""
    timeout_seconds: float = 1800.0
    """After which an all-reduce that one rank never comes to is an error."""

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "timeout_seconds"):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigError(f"trainer.ddp.{name} is {value}; it must be above 0.")


@dataclass
class TrainerConfig:
    """Arguments of lightning.Trainer, under Lightning's own names, and DDP's beside its name."""

    accelerator: str = "auto"
    devices: Any = 1
    num_nodes: int = 1
    strategy: str = "auto"
    ddp: DDPConfig = field(default_factory=DDPConfig)
    precision: str = "32-true"
    max_epochs: int | None = None
    max_steps: int = -1
    max_time: str | None = None
    """Wall time after which to stop, as DD:HH:MM:SS."""
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    check_val_every_n_epoch: int | None = 1
    val_check_interval: int | float | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    log_every_n_steps: int = 10
    num_sanity_val_steps: int = 0
    deterministic: Any = None
    benchmark: bool | None = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0


@dataclass
class RunConfig:
    """Everything that a run is made from; `config.yaml` in the run folder is one of these."""

    recipe: str = "???"
    """Name of the recipe, for titles and folders."""
    summary: str = ""
    """One line for `fasttrain list`."""
    seed: int = 0
    module: Any = None
    """`class` (a LightningModule by its dotted path) and that class's own parameters."""
    data: Any = None
    """`class` (a LightningDataModule by its dotted path) and that class's own parameters."""
    target: TargetConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loggers: list[Any] = field(default_factory=list)
    """`tensorboard`, `csv`, or a mapping of `class` and arguments of any Lightning logger."""
    optimizations: dict[str, Any] = field(default_factory=dict)
    """Name of a room -> its parameters; null or false leaves it out."""
    refused_optimizations: Literal["report", "error"] = "report"
    """What to do when one that was asked for does not apply here."""
    mlperf: MLPerfConfig = field(default_factory=MLPerfConfig)
    hardware: str = "auto"
    """A file of configs/hardware; `auto` looks at this machine."""
    preset: str | None = None
    """One of the recipe's presets; null takes the one that the recipe names for this hardware."""

    def __post_init__(self) -> None:
        if isinstance(self.seed, int) and not 0 <= self.seed <= LARGEST_SEED:
            raise ConfigError(f"seed is {self.seed}; it must be 0 to {LARGEST_SEED}, NumPy takes no other.")


@dataclass(frozen=True)
class Layer:
    """One source of values: its name as shown by `explain`, and the values it sets."""

    name: str
    values: DictConfig


@dataclass(frozen=True)
class Resolved:
    """The judged configuration, the classes of its sections and the layer that set each leaf (by dotted key)."""

    config: DictConfig
    classes: Mapping[str, str]
    origin: dict[str, str]
    preset_note: str | None = None

    @property
    def run(self) -> RunConfig:
        """The typed values of the flow's own sections. `module` and `data` are None: their classes judge those."""
        own = self.config.copy()
        own["module"] = own["data"] = None
        obj = OmegaConf.to_object(own)
        assert isinstance(obj, RunConfig)
        return obj

    def to_yaml(self) -> str:
        """Return a file that `fasttrain fit` runs again with the same values, whatever the machine's defaults."""
        plain = OmegaConf.to_container(self.config, resolve=True, throw_on_missing=False, enum_to_str=True)
        assert isinstance(plain, dict)
        for section, path in self.classes.items():
            values = {key: value for key, value in (plain.get(section) or {}).items() if value != "???"}
            plain[section] = {"class": path, **values}
        # `resolved` keeps base, hardware and preset layers from being merged into these values once more.
        text: str = yaml.dump(
            {"resolved": True, **plain}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120
        )
        return text


class _Dumper(yaml.SafeDumper):
    """Writes paths as text; a section's schema makes paths of them again."""


_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def load_layer(path: Path, name: str | None = None) -> Layer:
    """Read a YAML file as a layer.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    try:
        values = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} can't be read as YAML: {yaml_problem(error)}.") from None
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{path} holds a list; a mapping of keys to values was expected.")
    return Layer(name or str(path), values)


def override_values(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """Split `key=value` items; values are read as YAML, so `[1, 2]`, `null`, `true` and `1e-3` mean what they say.

    Raises:
        ConfigError: an item without `=`, with an empty key, or whose value isn't YAML.
    """
    pairs = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"'{item}' isn't an override: write key=value, for instance trainer.max_epochs=3.")
        try:
            # OmegaConf's own loader, because YAML 1.1 alone reads 1e-3 as a string.
            node: Any = OmegaConf.from_dotlist([f"value={text}"])._get_node("value")
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(
                f"the value in '{item}' can't be read: {yaml_problem(error)}; quote the whole of it in the shell."
            ) from None
        # A reference such as ${seed} stays one: it can be looked up only where the value ends up.
        pairs.append((key.strip(), node if OmegaConf.is_config(node) else node._value()))
    return pairs


def apply_override(config: DictConfig, key: str, value: Any) -> None:
    """Set one dotted key in place; list items are `key.0` or `key[0]`, mappings are merged into what is there.

    Raises:
        ConfigError: the key does not exist, or the value has the wrong type.
    """
    try:
        _update(config, key, value)
    except REFUSALS as error:
        raise ConfigError(refusal(config, key, value, error)) from None


def merge(schema: DictConfig, layers: Iterable[Layer]) -> DictConfig:
    """Merge layers into a copy of the schema, each checked against it by key and type.

    Raises:
        ConfigError: naming the layer, the key, and the nearest key or the expected type.
    """
    merged = schema.copy()
    for layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer.values)  # type: ignore[assignment]
        except REFUSALS as error:
            raise ConfigError(f"{layer.name}: {refusal(merged, '', layer.values, error)}") from None
    return merged


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf of a container; lists and empty mappings count as leaves."""
    if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing() and len(node):
        for key in node:
            yield from leaves(node._get_node(key), f"{prefix}.{key!s}" if prefix else str(key))
    elif OmegaConf.is_config(node):
        yield prefix, OmegaConf.to_container(node, resolve=False) if not node._is_none() else None
    else:
        yield prefix, node._value() if hasattr(node, "_value") else node


def origins(config: DictConfig, layers: Iterable[Layer]) -> dict[str, str]:
    """Return, for every leaf of `config`, the name of the last layer that sets it or a part of it."""
    origin = {key: "default" for key, _ in leaves(config)}
    for layer in layers:
        for set_key, value in leaves(layer.values):
            for key in origin:
                inside = key.startswith(set_key + ".") and value != {}  # an empty mapping sets nothing in it
                if key == set_key or inside or set_key.startswith((key + ".", key + "[")):
                    origin[key] = layer.name
    return origin


def thaw(config: DictConfig) -> DictConfig:
    """Lift the read-only flag that OmegaConf sets on everything made from a frozen dataclass."""
    OmegaConf.set_readonly(config, False)
    for key in config if not config._is_none() and not config._is_missing() else ():
        child = config._get_node(key)
        if isinstance(child, DictConfig):
            thaw(child)
    return config


def _update(config: DictConfig, key: str, value: Any) -> None:
    head, last = key.rpartition(".")[::2] if not key.endswith("]") else key[:-1].rpartition("[")[::2]
    parent = OmegaConf.select(config, head) if head else config
    if isinstance(parent, TupleConfig) and last.isdigit():  # can't be changed, only replaced
        items = list(parent)
        items[int(last)] = value
        key, value = head, items
    OmegaConf.update(config, key, value, merge=isinstance(value, DictConfig), force_add=False)
