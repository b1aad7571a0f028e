"""A fit on two processes by DALI's loaders, forked from one that has not used DALI: run with a folder."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from encoded_pictures import NotesKeys, PictureData
from lightning.pytorch.strategies import DDPStrategy


class Tells(pl.Callback):
    """Writes down what each rank saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        told = {
            **pl_module.seen,
            "data_epochs": pl_module.data_epochs,
            "validation_ends": pl_module.validation_ends,
            "weights": pl_module.net.weight.flatten().tolist(),
        }
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


def main(folder: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="fork", process_group_backend="gloo"),
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=1, callbacks=[Tells(folder)], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(NotesKeys(), datamodule=PictureData(13, 5, 3))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
