"""What rooms have in common whose whole act is one Lightning callback.

Such a room's callback keeps what it changed and can tell what came of it (`ActingCallback`); its door for the plan
(`CallbackOptimization`) then has the room's names, its check, and how the callback is made.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import lightning.pytorch as pl

from fasttrain.optimization import Attachment, Change, Context, Optimization, Table


class ActingCallback(pl.Callback):
    """A callback that says what it has done to the Trainer or the module."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        """What it has changed, by path; empty until it has acted, and in a run where it had nothing to do."""

    def table(self) -> Table | None:
        """Return what happened over the run, from values on the host; None where there is nothing to tell."""
        return None


C = TypeVar("C")
A = TypeVar("A", bound=ActingCallback)


class CallbackOptimization(Optimization[C], Generic[C, A]):
    """The plan's door of a room that acts by one callback, made once and handed to the Trainer."""

    def __init__(self, config: C) -> None:
        super().__init__(config)
        self.callback: A = self.make_callback()

    @abstractmethod
    def make_callback(self) -> A:
        """Return the room's callback for `self.config`."""

    def attach(self, context: Context) -> Attachment:
        """Hand over the callback. Changes nothing by itself."""
        return Attachment(callbacks=[self.callback])

    def applied(self) -> Sequence[Change]:
        """Return what the callback says that it has changed."""
        return self.callback.changes

    def outcome(self) -> Sequence[Table]:
        """Return the callback's table, if it has one to tell."""
        table = self.callback.table()
        return [] if table is None else [table]
