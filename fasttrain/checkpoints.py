"""A run folder's checkpoints: their names, and whether they can be read."""

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
        DataError: it can't be read, or is none.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for damaged archives
        others = sorted(p.name for p in path.parent.glob("*.ckpt") if p != path)
        other = f"; {', '.join(others)} beside it may be whole" if others else ""
        why = " ".join(str(error).split())[:120]
        raise DataError(f"the checkpoint {path} can't be read ({why}): it is damaged{other}.") from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise DataError(f"{path} is not a Lightning checkpoint: it holds no 'state_dict'.")
