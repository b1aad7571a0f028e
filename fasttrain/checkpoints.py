"""A run folder's checkpoints: their names, and whether they can be read."""

import re
from pathlib import Path

import torch

from fasttrain.errors import ConfigError, DataError
from fasttrain.results import RunFolder

LAST = "last.ckpt"
"""The run's newest state, to go on from."""
BEST = "best.ckpt"
"""The state with the best score."""


def readable_checkpoint(folder: RunFolder, name: str = LAST) -> Path:
    """Return the path of a run's checkpoint after reading it once.

    Raises:
        ConfigError: there is none.
        DataError: it is damaged; the message says what else there is.
    """
    path = folder.checkpoints / name
    if not path.is_file():
        raise ConfigError(
            f"{folder.path} has no {name}: the run stopped before its first checkpoint; start it again with "
            f"`fasttrain fit {folder.path / 'config.yaml'}`."
        )
    check_checkpoint(path)
    return path


def check_checkpoint(path: Path) -> None:
    """Read a checkpoint and look for a Lightning module's weights in it.

    Raises:
        DataError: it can't be read, holds more than torch loads unasked, or is none.
    """
    try:
        content = torch.load(path, map_location="cpu")
    except Exception as error:  # torch raises half a dozen types for damaged archives
        raise DataError(_why_unreadable(path, str(error))) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise DataError(f"{path} is not a Lightning checkpoint: it holds no 'state_dict'.")


def _why_unreadable(path: Path, error: str) -> str:
    if found := re.search(r"GLOBAL (\S+) was not an allowed global", error):
        return (
            f"the checkpoint {path} holds an object of Python code ({found[1]}), which torch does not load unasked: "
            "leave it out by save_hyperparameters(ignore=[...]) in the module, or set "
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 if you trust the file."
        )
    others = sorted(p.name for p in path.parent.glob("*.ckpt") if p != path)
    other = f"; {', '.join(others)} beside it may be whole" if others else ""
    why = " ".join(re.sub(r"\x1b\[\d*m", "", error).split())[:120]
    return f"the checkpoint {path} can't be read ({why}): it is damaged{other}."
