"""Weights to begin with: any state dict under transformers' names, that of a BertForPreTraining above all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttrain.errors import ConfigError, DataError, MissingDependencyError
from fasttrain.recipes.bert.model import BertForPreTraining

WORDS = "bert.embeddings.word_embeddings.weight"
BIAS = "cls.predictions.bias"
TIED = {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": BIAS}
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
NEVER = -10_000.0
"""Bias of a word that does not exist; float16 can hold it, and its probability is 0."""


def load_weights(model: BertForPreTraining, file: str | Path) -> list[str]:
    """Load a checkpoint into a model, in place; return the model's parameters that it does not have.

    Takes a state dict, and Lightning's checkpoints, whose names begin with the module's attribute. A vocabulary that is
    smaller than the model's rows is filled up with words that are never predicted. What the file has and the model has
    not, such as `position_ids`, is left.

    Raises:
        ConfigError: no such file.
        DataError: it holds no BERT, or one of other sizes.
        MissingDependencyError: it is a .safetensors, and that package is not installed.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"module.model.weights: {path} does not exist.")
    given = {_plain_name(name): value for name, value in _read(path).items() if isinstance(value, Tensor)}
    given.update({own: given[other] for other, own in TIED.items() if other in given and own not in given})
    wanted = {name: parameter for name, parameter in model.named_parameters() if name not in TIED}
    found = [name for name in wanted if name in given]
    if WORDS not in found:
        has = ", ".join(list(given)[:3]) or "no tensors"
        raise DataError(f"{path} has no '{WORDS}', so it is no BERT under transformers' names; it has {has}.")
    with torch.no_grad():
        for name in found:
            value = _filled_up(given[name], wanted[name], NEVER if name == BIAS else 0.0, name in (WORDS, BIAS))
            if value.shape != wanted[name].shape:
                raise DataError(
                    f"{path}: '{name}' is {list(value.shape)}, and the model's is {list(wanted[name].shape)}; set "
                    "module.model to the checkpoint's sizes."
                )
            wanted[name].copy_(value)
    return [name for name in wanted if name not in given]


def _filled_up(value: Tensor, wanted: Tensor, fill: float, by_word: bool) -> Tensor:
    missing = len(wanted) - len(value)
    if not by_word or not 0 < missing < 64 or value.shape[1:] != wanted.shape[1:]:
        return value
    return torch.cat([value, value.new_full((missing, *value.shape[1:]), fill)])


def _plain_name(name: str) -> str:
    for begin in ("bert.", "cls."):
        if not name.startswith(begin) and f".{begin}" in name and name.startswith(("model.", "module.")):
            name = name[name.index(f".{begin}") + 1 :]
    for old, new in OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise MissingDependencyError(
                f"{path} needs the package safetensors to be read; `pip install safetensors`."
            ) from None
        tensors: dict[str, Any] = load_file(path)
        return tensors
    found = torch.load(path, map_location="cpu", weights_only=True)
    state = found.get("state_dict", found) if isinstance(found, Mapping) else {}
    assert isinstance(state, Mapping)
    return state
