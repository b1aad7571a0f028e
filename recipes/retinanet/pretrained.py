"""Pretrained weights from a local file: all of it fits, or a sentence says what doesn't.

A file holds the state dict of a torchvision classifier (its backbone is taken) or of a whole torchvision RetinaNet.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fasttrain.errors import ConfigError
from fasttrain.recipes.retinanet.backbone import TRAINABLE_ORDER

SHOWN_KEYS = 3
STEP_COUNTER = "num_batches_tracked"
BODY = "backbone.body."


def first_version_name(name: str) -> str:
    """Return a parameter's name in torchvision's first RetinaNet, which put layers one after the other.

    So the reference model of MLPerf v2.0 and torchvision's older checkpoints say `conv.2.weight` and
    `inner_blocks.1.weight` for `conv.1.0.weight` (its ReLU was `conv.3`) and `inner_blocks.1.0.weight`.
    """
    name = re.sub(r"_head\.conv\.(\d+)\.0\.", lambda found: f"_head.conv.{2 * int(found[1])}.", name)
    return re.sub(r"(inner|layer)_blocks\.(\d+)\.0\.", r"\1_blocks.\2.", name)


def load_pretrained(model: nn.Module, file: str) -> None:
    """Load a file's weights into a RetinaNet, in place: the whole model, or `backbone.body` from a classifier.

    Raises:
        ConfigError: the file is missing or unreadable, or its names or shapes aren't the model's.
    """
    found = read_state_dict(file)
    target = model
    if not any(name.startswith(BODY) for name in found):
        target = model.get_submodule(BODY.rstrip("."))
        left_out = ("fc.", *(f"{stage}." for stage in TRAINABLE_ORDER if not hasattr(target, stage)))
        found = {name: value for name, value in found.items() if not name.startswith(left_out)}
    wanted = target.state_dict()
    found = _with_current_names(found, wanted)
    complaint = _first_differences(found, wanted)
    if complaint:
        raise ConfigError(
            f"The weights in {file} don't fit the {'model' if target is model else 'backbone'}: {complaint}. "
            "They must come from the same torchvision architecture."
        )
    target.load_state_dict(found, strict=False)


def read_state_dict(file: str) -> dict[str, Tensor]:
    """Return the tensors of a file written by `torch.save(module.state_dict(), file)`, on the CPU.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"There is no weights file {file}; give the path of a torchvision state dict, or none.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"The weights file {file} can't be read ({reason}); it must be a state dict written by torch.save."
        ) from error
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ConfigError(
            f"The weights file {file} holds {_content(found)}; a state dict, parameter names with tensors, is needed."
        )
    return dict(found)


def _with_current_names(found: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a first-version checkpoint; drop batch norm's step counters where the model has none."""
    current = {first_version_name(name): name for name in wanted}
    renamed = {name if name in wanted else current.get(name, name): value for name, value in found.items()}
    return {name: value for name, value in renamed.items() if name in wanted or not name.endswith(STEP_COUNTER)}


def _first_differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    shapes = [
        f"{name} is {tuple(found[name].shape)} and should be {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    # Batch norm makes up its step counter when it loads weights that were saved frozen.
    missing = [name for name in wanted if name not in found and not name.endswith(STEP_COUNTER)]
    unknown = [name for name in found if name not in wanted]
    parts = [_shown("the shape differs for", shapes), _shown("missing", missing), _shown("not in the model", unknown)]
    return "; ".join(part for part in parts if part)


def _shown(what: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - SHOWN_KEYS} more" if len(items) > SHOWN_KEYS else ""
    return f"{what}: {', '.join(items[:SHOWN_KEYS])}{more}"


def _content(found: object) -> str:
    if not isinstance(found, Mapping):
        return f"a {type(found).__name__}"
    if not found:
        return "nothing"
    return "a mapping with the keys " + ", ".join(str(key) for key in list(found)[:SHOWN_KEYS])
