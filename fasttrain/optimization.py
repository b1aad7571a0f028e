"""The contract between the flow and a room: what an optimization must say and do to be planned, applied and believed.

    check(context)  -> Applies or Refuses   pure: nothing is changed before every answer is in
    attach(context) -> Attachment           what goes into the Trainer; the model and data it changed, if it did so
    applied()       -> changes              by path and count, read once training has begun; empty is an error
    outcome()       -> tables               what happened over the run, for its report; most rooms have none

A room's own tests and users call its body directly, without any of this.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Generic, Literal, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader

from fasttrain.choices import Choices
from fasttrain.environment import Hardware
from fasttrain.errors import DataError, FasttrainError, OptimizationError
from fasttrain.randomness import random_state_kept

Grade = Literal["same numbers", "same quality"]


class Stage(IntEnum):
    """When an optimization acts, in order. Graph capture comes last because it freezes shapes and addresses."""

    DATA = 0
    MODEL = 1
    PLUGIN = 2
    CALLBACK = 3
    CAPTURE = 4


@dataclass(frozen=True)
class Applies:
    """The optimization can act here; `note` says what was measured or chosen, if anything was."""

    note: str = ""


@dataclass(frozen=True)
class Refuses:
    """The optimization can't act here, for a reason that the user can act on."""

    reason: str


Verdict = Applies | Refuses


@dataclass(frozen=True)
class Change:
    """One thing that an optimization changed: where, what it is now, and how many of them."""

    path: str
    what: str
    count: int = 1


Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """What an optimization tells in a run's report, by rows; a number that was not measured is NaN.

    Columns of numbers are set right-aligned, so a unit belongs in the column's name and not in its cells.

    Raises:
        ValueError: a row has not one cell for each column, or a cell is neither a text nor a number of Python's own.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table '{self.title}', row {number} has {len(row)} cells for {len(self.columns)} columns "
                    f"({', '.join(self.columns)}); give one for each, and math.nan for a number that is unknown."
                )
            for name, cell in zip(self.columns, row, strict=True):
                if isinstance(cell, bool) or not isinstance(cell, (str, int, float)):
                    raise ValueError(
                        f"table '{self.title}', row {number}: {name} is {cell!r}, a {type(cell).__name__}; give a str, "
                        "an int or a float."
                    )


@dataclass(frozen=True)
class Context:
    """All that a check may look at. Nothing in it may be changed by a check."""

    module: pl.LightningModule
    data: pl.LightningDataModule
    hardware: Hardware
    precision: str = "32-true"
    """Lightning's name of the precision the run was configured with."""
    asked_for: frozenset[str] = frozenset()
    """Names of all optimizations of the run."""
    example: "ExampleBatch | None" = None
    """Draws a real batch, on the CPU, once; None when there is no data to draw from."""
    choices: Choices | None = None
    """What has been measured of the model's sites on this machine; None where that is not to be looked at."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Paths of modules that optimizations which act earlier will replace, and the optimization's name."""
    processes: int = 1
    """Processes of the run, over all nodes."""


class ExampleBatch:
    """A batch of the run's own training data, drawn when first asked for.

    It is drawn from a loader of its own, and the global random state is put back, so that the run's order of samples
    does not depend on which optimizations were asked for.
    """

    def __init__(self, data: pl.LightningDataModule) -> None:
        self._data = data
        self._batch: Any = None
        self._drawn = False

    def __call__(self) -> Any:
        """Return the batch, on the CPU, in the structure in which the Trainer hands it to the module.

        Raises:
            DataError: the training loader is empty, or its data are bad.
            OptimizationError: the data module gives no batch without a Trainer; the message begins a sentence.
        """
        if not self._drawn:
            try:
                with random_state_kept():
                    self._batch = self._draw()
            except FasttrainError:
                raise
            except Exception as error:  # a user's data module may ask its Trainer, which is not there yet
                name = type(self._data).__name__
                raise OptimizationError(
                    f"{name} gives no batch to measure with before there is a Trainer ({type(error).__name__}: {error})"
                ) from error
            self._drawn = True
        return self._batch

    @property
    def was_drawn(self) -> bool:
        """Whether training data have been read for it."""
        return self._drawn

    def _draw(self) -> Any:
        self._data.setup("fit")
        first = next(iter(CombinedLoader(self._data.train_dataloader(), "max_size_cycle")), None)
        if first is None:
            raise DataError(f"the training loader of {type(self._data).__name__} is empty: there is no batch in it.")
        return first[0]


@dataclass
class Attachment:
    """What an optimization puts into the run."""

    callbacks: list[pl.Callback] = field(default_factory=list)
    trainer_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of lightning.Trainer to set, `precision` for instance."""
    data: pl.LightningDataModule | None = None
    """A data module that takes the place of the recipe's."""


C = TypeVar("C")


class Optimization(ABC, Generic[C]):
    """One room's door for the plan. `config` is the room's frozen dataclass, filled from YAML."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `fasttrain list`."""
    config_class: ClassVar[type[Any]]
    stage: ClassVar[Stage]
    grade: ClassVar[Grade]
    before: ClassVar[frozenset[str]] = frozenset()
    """Names of optimizations that must act after this one, where both are asked for."""
    after: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[Mapping[str, str]] = {}
    """Name of another -> why the two don't go together."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def check(self, context: Context) -> Verdict:
        """Say whether this can act, without changing anything."""

    def takes(self, context: Context) -> Collection[str]:
        """Return paths of modules that this will replace, asked for when it applies; those that act later leave them.

        Most rooms replace nothing. For those that do, `patches.PatchSite.takes` says what a path means.
        """
        return ()

    @abstractmethod
    def attach(self, context: Context) -> Attachment:
        """Act, or return the callbacks and options that will. May change `context.module` in place."""

    @abstractmethod
    def applied(self) -> Sequence[Change]:
        """Return what was changed; asked for once training has begun."""

    def outcome(self) -> Sequence[Table]:
        """Return what happened over the run; asked for when it has ended, however it ended, if training had begun.

        Lightning has called the callback's `teardown`, or `on_exception` in its place, and the device may be in an
        error state: tell it from values kept on the host.
        Of several processes only the first is asked: nothing collective. A resumed run's tables take the place of its
        earlier part's, so counts over the whole run go through the callback's `state_dict`.
        """
        return ()
