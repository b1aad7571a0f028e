"""SIGTERM with several processes: all stop before the same batch, and none waits for the device to agree on that.

Lightning broadcasts before every batch whether the first rank was told to end, and waits for the answer on the device.
Its handler broadcasts too, wherever the signal interrupts the step, and the rank that got the signal leaves after its
batch: one that is signalled alone leaves the others waiting. Written against Lightning 2.6; `tests/test_epoch_loop.py`
fails when one of these internals changes its shape.
"""

from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

BATCHES_BETWEEN_QUESTIONS = 10
"""Ranks stop after one to two times as many. Each question costs the host some 0.1 ms beside the step, over gloo."""


class StopTogether:
    """Has a fit's ranks agree on the host, a few batches ahead, whether one of them was told to end.

    To be made on all ranks, after the process group and before Lightning takes the signals over. Until `put_back`.

    Args:
        trainer: with several processes.
        batches: between two questions.
    """

    def __init__(self, trainer: pl.Trainer, batches: int = BATCHES_BETWEEN_QUESTIONS) -> None:
        self.wanted = False
        self._batches, self._seen = batches, 0
        self._loop = cast(Any, trainer.fit_loop.epoch_loop)
        self._connector = cast(Any, trainer._signal_connector)
        self._launcher: Any = trainer.strategy.launcher
        self._group: Any = dist.new_group(backend="gloo")
        self._asked: tuple[Any, Tensor] | None = None
        self._loop._broadcast_sigterm_tensor = self._before_batch
        self._connector._sigterm_notifier_fn = self._signalled

    def put_back(self) -> None:
        """Give Lightning its own way again; all ranks leave at the same batch, or one has failed."""
        vars(self._loop).pop("_broadcast_sigterm_tensor", None)
        vars(self._connector).pop("_sigterm_notifier_fn", None)

    def _before_batch(self) -> None:
        """Called before every batch.

        Raises:
            SIGTERMException: on all ranks before the same batch.
        """
        self._seen += 1
        if self._seen % self._batches:
            return
        if self._asked is not None:
            work, answer = self._asked
            work.wait()
            if bool(answer):
                self._connector.received_sigterm = True
                raise SIGTERMException
        flag = torch.tensor(int(self.wanted))
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
        self._asked = (work, flag)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if not self.wanted and self._launcher is not None:
            self._launcher.kill(number)  # the other processes of this host, which the launcher has started
        self.wanted = True
