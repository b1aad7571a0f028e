"""Score a checkpoint: a run's best one, or any file of a run folder."""

import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from fasttrain.checkpoints import BEST, LAST, check_checkpoint, readable_checkpoint
from fasttrain.clock import RunClock
from fasttrain.config import Resolved
from fasttrain.errors import ConfigError, DataError
from fasttrain.plan import Catalogue, data_module
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import resolve
from fasttrain.results import RunFolder
from fasttrain.run import prepare
from fasttrain.trainer import make_trainer


def find_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """Return the run folder and the checkpoint meant by a path to either; best before last.

    Raises:
        ConfigError: no run folder or no checkpoint there.
        DataError: the checkpoint is damaged.
    """
    if path.is_file():
        check_checkpoint(path)
        return RunFolder.existing(path.resolve().parent.parent), path
    folder = RunFolder.existing(path)
    name = BEST if (folder.checkpoints / BEST).is_file() else LAST
    return folder, readable_checkpoint(folder, name)


def validate(
    path: Path, overrides: Iterable[str], catalogue: Catalogue, console: Console | None = None, quiet: bool = False
) -> dict[str, float]:
    """Score a checkpoint on the validation data of its run, or on other data by overrides; return the scores.

    They are also written to `validation.json` in the run folder.
    """
    console = console or Console()
    folder, checkpoint = find_checkpoint(path)
    resolved = run_configuration(folder, overrides)
    prepared = prepare(resolved, catalogue)
    attachments = prepared.plan.attach(prepared.context)
    begin = time.perf_counter()
    try:
        with quiet_libraries():
            trainer = make_trainer(
                resolved.run.trainer,
                attachments,
                [],
                [],
                profiler=RunClock(),
                enable_progress_bar=console.is_terminal and not quiet,
                default_root_dir=str(folder.path),
            )
            data = data_module(attachments, prepared.recipe.data)
            found = trainer.validate(prepared.recipe.module, data, ckpt_path=str(checkpoint), verbose=False)
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()[1:3]]
        raise DataError(
            f"the checkpoint {checkpoint} does not fit the configured model: {' '.join(lines)} Was an override of "
            "module.* given that the run did not have?"
        ) from None
    scores = {name: float(value) for name, value in (found[0] if found else {}).items()}
    if not scores:
        raise ConfigError(f"{resolved.classes['module']} logs nothing in validation, so there is no score.")
    seconds = time.perf_counter() - begin
    folder.write_json(
        "validation.json", {"checkpoint": checkpoint.name, "seconds": round(seconds, 3), "scores": scores}
    )
    return scores


def run_configuration(folder: RunFolder, overrides: Iterable[str] = ()) -> Resolved:
    """Return the configuration that a run was made from, with overrides on top."""
    return resolve(folder.path / "config.yaml", overrides)
