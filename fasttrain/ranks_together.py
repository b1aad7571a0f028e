"""Several processes of one fit end together: when one of them fails or is killed, and when one is told to end."""

import atexit
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fasttrain.rank_watch import RankWatch
from fasttrain.sigterm import StopTogether

GRACE_SECONDS = 10.0
"""For a rank's own error to surface and its files to be written, before its process is ended."""


class RanksTogether(pl.Callback):
    """Ends every rank of a fit when one of them fails or is killed; with one process it does nothing.

    A rank that learns of the loss of another prints which one and why, has `grace_seconds` for its own error to
    surface, and is then ended with exit code 1, wherever it waits. On SIGTERM, whichever rank gets it, all stop before
    the same batch, by Lightning's exception for that. Of several in a Trainer the first acts.

    Args:
        grace_seconds: see there.
        takes_sigterm: whether SIGTERM is this callback's; not so where the run has a handler of its own.
        on_loss: called in a thread with the sentence, right after it was printed.
    """

    def __init__(
        self,
        grace_seconds: float = GRACE_SECONDS,
        takes_sigterm: bool = True,
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        self.grace_seconds, self.takes_sigterm, self.on_loss = grace_seconds, takes_sigterm, on_loss
        self._watch: RankWatch | None = None
        self._stop: StopTogether | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the ranks."""
        strategy = trainer.strategy
        if stage != "fit" or trainer.world_size == 1 or not isinstance(strategy, ParallelStrategy):
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if next((each for each in callbacks if isinstance(each, RanksTogether)), self) is not self:
            return
        environment = strategy.cluster_environment
        host = environment.main_address if environment is not None else "127.0.0.1"
        rank = trainer.global_rank

        def lost(clause: str) -> None:
            self._end(f"fasttrain: {clause}. Rank {rank} ends, too; training can go on from the last checkpoint.")

        try:
            self._watch = RankWatch(rank, trainer.world_size, strategy.broadcast, host, lost)
        except OSError as error:
            rank_zero_warn(f"the ranks can't watch each other ({error}); one that fails may leave the others waiting.")
        if self.takes_sigterm:
            self._stop = StopTogether(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the other ranks, and have this process end in time even if the device waits for theirs."""
        if self._watch is not None and not isinstance(exception, SIGTERMException):
            self._watch.tell_failure(f"{type(exception).__name__}: {exception}".rstrip(": "))
            # By a thread of C: at the interpreter's end no thread of Python runs, and what hangs may hold its lock.
            atexit.register(faulthandler.dump_traceback_later, self.grace_seconds, exit=True)
        self._put_back()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Disconnect."""
        self._put_back()

    def _put_back(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._stop is not None:
            self._stop.put_back()
        self._watch = self._stop = None

    def _end(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)
        if self.on_loss is not None:
            self.on_loss(sentence)
        threading.Event().wait(self.grace_seconds)
        os._exit(1)
