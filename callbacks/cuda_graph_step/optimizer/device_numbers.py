"""Python numbers mirrored in device tensors: what a captured step reads, and what is written to it between replays."""

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceNumbers:
    """0-dim tensors, one for each number of a list, written when their number has changed.

    Args:
        tensors: 0-dim, of one dtype and device; their addresses are what a graph reads.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._written: list[float | None] = [None] * len(self._tensors)

    def hold(self, numbers: list[float]) -> bool:
        """Whether the tensors hold these numbers already."""
        return numbers == self._written

    def write(self, numbers: Sequence[float]) -> None:
        """Write what changed, without waiting for the device."""
        changed = self.differing(numbers)
        if len(changed) < 3:
            for index in changed:
                self._tensors[index].fill_(numbers[index])
        else:
            # Two launches however many there are. The numbers travel as arguments of the kernel: a copy from the host
            # would read memory that the next step may have written again by then.
            torch._foreach_zero_([self._tensors[index] for index in changed])
            torch._foreach_add_([self._tensors[index] for index in changed], [float(numbers[i]) for i in changed])
        self._written = [float(number) for number in numbers]

    def differing(self, numbers: Sequence[float]) -> list[int]:
        """Return the indices of numbers that are not what was last written."""
        return [i for i, (new, old) in enumerate(zip(numbers, self._written, strict=True)) if old is None or new != old]

    def forget(self) -> None:
        """Have everything written again next time, since something else has written to a tensor."""
        self._written = [None] * len(self._tensors)
