"""Evaluations that do nothing but look at their images: made by a loader's processes each time, and kept."""

import io
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fasttrain.bench import Case
from fasttrain.callbacks.evaluation_cache.callback import EvaluationCache
from fasttrain.environment import usable_cores
from fasttrain.measure import Row, make_row

CASE, SIDE, BATCH, IMAGES = "jpegs_800_b32", 800, 32, 1024
FILES = 24
"""Different ones, which the images share."""


def cases() -> list[Case]:
    """Return the room's bench case."""
    summary = f"evaluations of {IMAGES} JPEGs of 1024 x 768 decoded to {SIDE}², batch {BATCH}, images/s"
    return [Case("evaluation_cache", CASE, summary, jpegs, needs_gpu=True)]


class Pictures(Dataset[Tensor]):
    """JPEGs in memory, decoded and resized by Pillow."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.files = []
        for _ in range(FILES):
            coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            file = io.BytesIO()
            coarse.resize((1024, 768), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> Tensor:
        image = Image.open(io.BytesIO(self.files[index % FILES])).convert("RGB")
        return torch.from_numpy(np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))).permute(2, 0, 1)


class _Looks(pl.LightningModule):
    """Trains nothing to speak of, and adds up the pixels that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seconds, self._begun = nn.Linear(1, 1), list[float](), 0.0

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:  # an evaluation's loader starts before its first hook
        torch.cuda.synchronize()
        self._begun = time.perf_counter()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        batch.sum()

    def on_validation_epoch_end(self) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def jpegs(*, evaluations: int = 5) -> Iterator[Row]:
    """Yield images a second of evaluations from the third on.

    Args:
        evaluations: of each fit, at least 3.
    """
    workers = max(1, min(15, usable_cores() - 1))
    with_and_without: dict[str, list[pl.Callback]] = {"plain": [], "ours": [EvaluationCache()]}
    for variant, callbacks in with_and_without.items():
        module = _Looks()
        trainer = pl.Trainer(
            accelerator="gpu", devices=1, max_epochs=evaluations, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=callbacks,
        )  # fmt: skip
        loader = DataLoader(Pictures(), batch_size=BATCH, num_workers=workers, pin_memory=True)
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(1, 1))), loader)
        samples = [IMAGES / seconds for seconds in module.seconds[2:]]
        note = f"{workers} loader processes" if variant == "plain" else "handed out from the device"
        yield make_row("evaluation_cache", CASE, variant, "images_per_second", "images/s", samples, note)
