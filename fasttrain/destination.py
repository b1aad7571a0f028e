"""Where a data module's batches go: to which of how many processes, and whether to a GPU."""

import lightning.pytorch as pl


def rank_of(data: pl.LightningDataModule) -> tuple[int, int]:
    """Return the rank and the world size of a data module's Trainer; (0, 1) where it has none yet."""
    trainer = data.trainer
    return (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)


def goes_to_gpu(data: pl.LightningDataModule) -> bool:
    """Whether a data module's Trainer puts batches on a GPU, for which they are pinned; False where it has none yet."""
    trainer = data.trainer
    return trainer is not None and trainer.strategy.root_device.type == "cuda"
