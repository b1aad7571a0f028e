"""When DALI's loaders apply, and the plan's door to them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import lightning.pytorch as pl

from fasttrain.callbacks.dali_loader.config import DALIConfig, require_dali
from fasttrain.callbacks.dali_loader.loader import DALILoader
from fasttrain.errors import MissingDependencyError
from fasttrain.optimization import Applies, Attachment, Change, Context, Optimization, Refuses, Stage, Verdict

QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
"""CUDA's hardware queues, read when CUDA starts: 8 if nothing is said. What stands in one waits for all before it."""


@runtime_checkable
class OffersDALI(Protocol):
    """A data module that has the same batches from DALI, too."""

    def with_dali_loader(self, config: DALIConfig) -> "OffersDALI":
        """Return a data module that takes this one's place, whose loaders are DALI's."""

    @property
    def dali_loaders(self) -> Mapping[str, DALILoader]:
        """Those it has made, by split."""


class DALILoaderOptimization(Optimization[DALIConfig]):
    """Has a data module's batches made by DALI."""

    name: ClassVar[str] = "dali_loader"
    summary: ClassVar[str] = "image files decoded, resized and mirrored on the GPU by NVIDIA DALI, in the same order"
    config_class: ClassVar[type[Any]] = DALIConfig
    stage: ClassVar[Stage] = Stage.DATA
    grade = "same numbers"

    def __init__(self, config: DALIConfig) -> None:
        super().__init__(config)
        self.data: Any = None

    def check(self, context: Context) -> Verdict:
        """Refuse where the data module has no such loaders, there is no GPU to decode, or DALI isn't installed."""
        if not isinstance(context.data, OffersDALI):
            return Refuses(
                f"{type(context.data).__name__} offers no DALI loaders: it has no `with_dali_loader`, which this "
                "room's README describes"
            )
        if context.hardware.kind != "gpu":
            return Refuses(
                "on a CPU DALI decodes no faster than the torch loader, and to decode elsewhere it would need an "
                "NVIDIA GPU; data.loader=dali uses it all the same"
            )
        try:
            require_dali()
        except MissingDependencyError as error:
            return Refuses(str(error).removesuffix("."))
        advice = "" if QUEUES in os.environ else f"; {QUEUES}={MOST_QUEUES} in the environment lets it overlap the step"
        return Applies(
            f"decoding on {context.hardware.device}, {self.config.threads} threads beside it{advice}; not measured"
        )

    def attach(self, context: Context) -> Attachment:
        """Hand over the data module that takes the place of the run's own."""
        assert isinstance(context.data, OffersDALI)
        self.data = context.data.with_dali_loader(self.config)
        assert isinstance(self.data, pl.LightningDataModule)
        return Attachment(data=self.data)

    def applied(self) -> Sequence[Change]:
        """Return the loaders that were made."""
        loaders = self.data.dali_loaders if self.data is not None else {}
        return [
            Change(f"data.{split}_dataloader", f"DALI, {loader.device}, batches of {loader.batch_size}", len(loader))
            for split, loader in loaders.items()
        ]
