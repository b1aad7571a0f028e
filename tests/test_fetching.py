"""The place between Lightning and the training loader: what is asked there, and that nobody else notices."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from graph_fits import Small, assert_same_state, batches, fit, same_start
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities import CombinedLoader
from test_epoch_loop import fingerprint

from fasttrain.fetching import LoaderInBetween, stand_between


class Listens(LoaderInBetween):
    """Notes what it is asked."""

    def __init__(self, inner: CombinedLoader) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    def __iter__(self) -> "Listens":
        self.asked.append("iter")
        super().__iter__()
        return self

    def __next__(self) -> Any:
        self.asked.append("next")
        return super().__next__()

    def reset(self) -> None:
        self.asked.append("reset")
        super().reset()


class Other(LoaderInBetween): ...


class Stands(pl.Callback):
    def __init__(self) -> None:
        self.loaders: list[LoaderInBetween] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for kind in (Listens, Other, Listens):
            self._stand(trainer, kind)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stand(trainer, Listens)

    def _stand(self, trainer: pl.Trainer, kind: type[LoaderInBetween]) -> None:
        found = stand_between(trainer, kind, lambda inner, kept_back: kind(inner))
        assert found is not None
        if found not in self.loaders:
            self.loaders.append(found)


def test_it_is_asked_in_the_place_of_the_loader_and_stands_there_once() -> None:
    ours, plain = same_start(Small)
    stands = Stands()
    made = batches(3)
    mine = fit(ours, made, callbacks=[stands], validation=batches(1))
    assert_same_state(mine, fit(plain, batches(3), validation=batches(1)))
    listens, other = stands.loaders
    assert isinstance(listens, Listens)
    assert isinstance(other, Other)
    assert other.inner is listens
    assert listens.asked == [*["next"] * 3, "iter", *["next"] * 3, "reset"]
    assert mine.train_dataloader is made, "what users see is their own loader"


def test_it_stands_there_again_when_loaders_are_made_anew() -> None:
    stands = Stands()
    fit(Small(), batches(3), callbacks=[stands], reload_dataloaders_every_n_epochs=1, max_epochs=3)
    assert sum(isinstance(loader, Listens) for loader in stands.loaders) == 3


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_FitLoop.setup_data, "7f7216179a5a"),
        (_FitLoop.on_save_checkpoint, "c358c7d37753"),
        (_FitLoop.on_advance_start, "9ddb5ebeb56c"),
        (_FitLoop.teardown, "0ddc14e06a06"),
        (_DataFetcher.__iter__, "51b88745900b"),
        (_DataFetcher.teardown, "7742348bf30d"),
        (_PrefetchDataFetcher.__iter__, "fc4ff0d0c099"),
        (CombinedLoader.__iter__, "1a28b97662c2"),
    ],
)
def test_what_lightning_asks_is_what_it_asked(function: Callable[..., Any], expected: str) -> None:
    found = fingerprint(function)
    assert found == expected, (
        f"Lightning {pl.__version__} has another {function.__qualname__} than the one that LoaderInBetween and "
        f"stand_between were written against. Look at them again; then its fingerprint is {found}."
    )


def test_it_has_the_attributes_of_the_loader_behind() -> None:
    inner = CombinedLoader(batches(3), "max_size_cycle")
    iter(inner)
    between = LoaderInBetween(inner)
    assert (len(between), between._mode, between.limits) == (3, "max_size_cycle", None)
    assert between.flattened is inner.flattened
    with pytest.raises(AttributeError, match="no_such"):
        _ = between.no_such
