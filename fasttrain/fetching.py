"""A place between Lightning and its loaders, for those who fetch batches in another way.

Lightning's fetcher asks a `CombinedLoader` for batches and the fit loop asks the same one for its state. Written
against Lightning 2.6; `tests/test_fetching.py` fails when one of them asks for something else.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

Fetched = tuple[Any, int, int]
"""What Lightning is given: batch, its number, and the number of its loader."""


class LoaderInBetween(CombinedLoader):
    """Hands everything on to the loader behind it; subclasses do otherwise where they have to."""

    def __init__(self, inner: CombinedLoader) -> None:
        self.inner = inner  # the base class's attributes are the inner one's

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> "LoaderInBetween":
        iter(self.inner)
        return self

    def __next__(self) -> Fetched:
        fetched: Fetched = next(self.inner)
        return fetched

    def __len__(self) -> int:
        return len(self.inner)

    def reset(self) -> None:
        """Called at the fit's end, however it ends."""
        self.inner.reset()

    def _state_dicts(self) -> list[dict[str, Any]]:
        return self.inner._state_dicts()

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.inner._load_state_dicts(states)


L = TypeVar("L", bound=LoaderInBetween)


def stand_between(
    trainer: pl.Trainer, kind: type[L], make: Callable[[CombinedLoader, Callable[[], int]], L]
) -> L | None:
    """Have a fit's batches fetched by way of a loader of this kind; return it, the one that is there already if any.

    To be called once training has started and, since Lightning may make its loaders anew, when an epoch does.

    Args:
        trainer: in a fit.
        kind: what `make` makes.
        make: called with the loader, and with a function that tells how many of the batches that it handed out
            Lightning still keeps for later steps, as it does with loaders of unknown length.

    Returns:
        None, and nothing is changed, where the step is handed the loader's iterator.
    """
    loop: Any = trainer.fit_loop
    fetcher = loop._data_fetcher
    if fetcher is None or isinstance(fetcher, _DataLoaderIterDataFetcher):
        return None
    found = loop._combined_loader
    while isinstance(found, LoaderInBetween):
        if isinstance(found, kind):
            return found
        found = found.inner
    ours = make(loop._combined_loader, lambda: len(getattr(fetcher, "batches", ())))
    loop._combined_loader = fetcher._combined_loader = fetcher.iterator = ours
    return ours


def stand_before_evaluation(trainer: pl.Trainer, make: Callable[[CombinedLoader], L]) -> L | None:
    """Have the batches of a fit's evaluations fetched by way of the loader that `make` makes of Lightning's.

    To be called once training has started, and between evaluations.

    Returns:
        None, and nothing is changed, where there is no evaluation, or its step is handed the loader's iterator.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    inner = loop._combined_loader
    step = trainer.lightning_module.validation_step
    if inner is None or is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        return None
    ours = make(inner)
    loop._combined_loader = ours
    return ours
