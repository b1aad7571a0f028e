"""The plan's door to evaluations whose batches are kept."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.evaluation_cache.callback import EvaluationCache, EvaluationCacheConfig, most_bytes
from fasttrain.callbacks.evaluation_cache.kept import bytes_of
from fasttrain.callbacks.evaluation_cache.order import why_not_in_order
from fasttrain.errors import FasttrainError
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict
from fasttrain.randomness import random_state_kept


class EvaluationCacheOptimization(CallbackOptimization[EvaluationCacheConfig, EvaluationCache]):
    """Keeps evaluation batches where they fit."""

    name: ClassVar[str] = "evaluation_cache"
    summary: ClassVar[str] = "an evaluation's batches kept on the GPU, once the loader was seen to repeat them"
    config_class: ClassVar[type[Any]] = EvaluationCacheConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    conflicts: ClassVar[Mapping[str, str]] = {
        "evaluation_ranks": "those share out the module's own validation batches among themselves"
    }
    grade = "same numbers"

    def make_callback(self) -> EvaluationCache:
        """Return the callback, with the configuration as its parameters."""
        return EvaluationCache(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where there is no GPU, where the order is one at random, or where the batches would not fit."""
        device = torch.device(context.hardware.device)
        if device.type != "cuda":
            return Refuses(f"the run is on {context.hardware.name}, and batches on the device need an NVIDIA GPU")
        try:
            with random_state_kept():
                context.data.setup("fit")
                loaders = context.data.val_dataloader()
                if (reason := why_not_in_order(loaders)) is not None:
                    return Refuses(reason)
                wanted = estimated_bytes(loaders)
        except FasttrainError:
            raise
        except Exception as error:  # a user's data module may ask its Trainer, which is not there yet
            return Applies(f"what its batches take will show ({type(error).__name__}: {error})")
        most = most_bytes(self.config, device)
        if wanted is None:
            return Applies(f"what its batches take will show; at most {most / 1e9:,.1f} GB")
        size = f"{wanted / context.processes / 1e9:,.2f} GB on each device"
        if wanted / context.processes > most:
            return Refuses(f"its batches would take {size}, and {most / 1e9:,.2f} are for them (most_gb)")
        return Applies(f"its batches take {size}, of {most / 1e9:,.2f} that are for them")


def estimated_bytes(loader: Any) -> float | None:
    """Return what all of a torch loader's batches take, by its first sample; None where that doesn't tell."""
    if not isinstance(loader, DataLoader) or loader.sampler is None or not hasattr(loader.dataset, "__getitem__"):
        return None
    first = next(iter(loader.sampler), None)
    if first is None:
        return 0.0
    batch = loader.collate_fn([loader.dataset[first]])
    return float(bytes_of(batch) * len(loader.sampler))  # type: ignore[arg-type]
