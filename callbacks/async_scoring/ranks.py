"""The processes of a run: rows go to the first rank, which scores; what arrives there is known to all at the same step.

Everything goes over gloo, in groups of its own: NCCL works on the device, in the order of the training's own
collectives, and its watchdog ends a run in which one rank waits long for another.
"""

import math
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fasttrain.callbacks.scored_elsewhere.memory import joint_shape
from fasttrain.callbacks.scored_elsewhere.scorer import ComingRows
from fasttrain.errors import OptimizationError

Result = TypeVar("Result")
LONGEST_WAIT = timedelta(minutes=30)
"""For a rank whose share of an evaluation takes longer; torch's own default."""


class Ranks(Protocol):
    """What scoring needs of a run's processes. Every method but `gather` is called by all ranks at the same point."""

    is_first: bool

    def gather(self, parts: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]] | ComingRows:
        """Return all ranks' rows on the first rank, in rank order; there they may be on their way still."""
        ...

    def announced(self, arrived: int) -> int:
        """Return how many of the scores that have arrived at the first rank all ranks know of now. Never waits."""
        ...

    def first(self, call: Callable[[], Result]) -> Result:
        """Return on all ranks what the call returns on the first, or raise what it raises there. Waits for it."""
        ...

    def close(self) -> None:
        """Let go of what was made for this."""
        ...


class OneProcess:
    """A run that is alone."""

    is_first = True

    def gather(self, parts: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Return them."""
        return parts

    def announced(self, arrived: int) -> int:
        """Return all of them."""
        return arrived

    def first(self, call: Callable[[], Result]) -> Result:
        """Call it."""
        return call()

    def close(self) -> None:
        """Nothing was made."""


class SeveralProcesses:
    """The ranks of an initialized `torch.distributed`; to be made by all of them.

    Raises:
        OptimizationError: it isn't initialized.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise OptimizationError(
                "async_scoring: this run has several processes that torch.distributed does not join; leave it out."
            )
        self.is_first = dist.get_rank() == 0
        # Apart, so that a short word does not wait behind many rows.
        groups: list[Any] = [dist.new_group(backend="gloo", timeout=LONGEST_WAIT) for _ in range(2)]
        self._rows, self._words = groups
        self._told: tuple[Tensor, Any] | None = None
        self._sending: list[GatheredRows] = []

    def gather(self, parts: Sequence[NDArray[Any]]) -> "GatheredRows":
        """Begin to send this rank's rows to the first, and return at once, but for the slowest rank's evaluation.

        The next step's gradients would wait for that rank too.

        Raises:
            ValueError: on all ranks, where any has arrays that can't be joined with the others'.
        """
        kinds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(kinds, [(part.dtype, part.shape) for part in parts], group=self._words)
        rows = GatheredRows(parts, kinds, self._rows, self.is_first)
        self._sending.append(rows)  # the memory is read until they are there
        return rows

    def announced(self, arrived: int) -> int:
        """Take what was sent at the last call, which has long been here, and send how many have arrived since."""
        self._sending = [rows for rows in self._sending if not rows.done()]
        known = 0
        if self._told is not None:
            number, work = self._told
            work.wait()
            known = int(number)
        number = torch.tensor(arrived - known if self.is_first else 0)
        self._told = number, dist.broadcast(number, 0, group=self._words, async_op=True)
        return known

    def first(self, call: Callable[[], Result]) -> Result:
        """Call it on the first rank, and tell the others."""
        told: list[Any] = [None]
        if self.is_first:
            try:
                told = [(True, call())]
            except Exception as error:
                told = [(False, _picklable(error))]
        dist.broadcast_object_list(told, 0, group=self._words)
        good, result = told[0]
        if not good:
            raise result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the groups; not where another rank may be gone, since a rank would wait for it."""
        if self._told is not None:
            self._told[1].wait()
            self._told = None
        for group in (self._rows, self._words):
            dist.destroy_process_group(group)


class GatheredRows:
    """All ranks' rows on their way to the first, and there when they are."""

    def __init__(self, parts: Sequence[NDArray[Any]], kinds: list[Any], group: Any, is_first: bool) -> None:
        samples = [np.empty((0, *shape[1:]), dtype) for kind in kinds for dtype, shape in kind]
        joint_shape(samples)
        self._sample = samples[0] if samples else None
        self._counts = [sum(shape[0] for _, shape in kind) for kind in kinds]
        row_bytes = math.prod(samples[0].shape[1:]) * samples[0].itemsize if samples else 0
        most = max(self._counts) * row_bytes  # ranks have equal shares but for an image, and gloo wants equal sizes
        self._send = torch.empty(most, dtype=torch.uint8)
        if parts:
            np.concatenate(parts, out=self._view(self._send, sum(map(len, parts))))
        self._received = [torch.empty(most, dtype=torch.uint8) for _ in kinds] if is_first else None
        self._work = dist.gather(self._send, self._received, dst=0, group=group, async_op=True) if most else None

    def _view(self, memory: Tensor, count: int) -> NDArray[Any]:
        assert self._sample is not None
        shape = (count, *self._sample.shape[1:])
        return memory.numpy()[: math.prod(shape) * self._sample.itemsize].view(self._sample.dtype).reshape(shape)

    def done(self) -> bool:
        """Whether they are there."""
        return self._work is None or bool(self._work.is_completed())

    def result(self) -> list[NDArray[Any]]:
        """Wait for them and return an array a rank, in rank order; on the first rank only.

        Raises:
            RuntimeError: a rank is gone.
        """
        assert self._received is not None
        if self._work is not None:
            self._work.wait()
        if self._sample is None:
            return []
        return [self._view(memory, count) for memory, count in zip(self._received, self._counts, strict=True)]


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
