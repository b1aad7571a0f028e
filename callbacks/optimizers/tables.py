"""Lists of numbers on a device that kernels look things up in: addresses, sizes, learning rates. None is ever changed.

Numbers that are those of last time give last time's table, without any work for the device. Others travel through
pinned memory, so that the host waits for nothing; torch lends that memory again only after the copy has run.

In a capture nothing runs: a table that is copied there is filled anew by each replay, from memory on the host that has
to stay as it is. It is kept, like each table that a captured kernel reads, for as long as these tables live.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ADDRESSES = "addresses"
SPARES = 2  # for a capture that fails its check, and the one after it


class _Entry(NamedTuple):
    numbers: tuple[float, ...]
    table: Tensor
    stream: int


class DeviceTables:
    """Tables by name and device; a copy of them is empty, since copied tensors lie elsewhere."""

    def __init__(self) -> None:
        self._last: dict[tuple[Hashable, torch.device], _Entry] = {}
        self._spare: dict[tuple[Hashable, torch.device], list[Tensor]] = {}
        self._kept: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "DeviceTables":
        return DeviceTables()

    @property
    def kept(self) -> list[Tensor]:
        """What captured kernels and copies read, on the device and on the host."""
        return list(self._kept.values())

    def last(self, name: Hashable, device: torch.device) -> tuple[float, ...] | None:
        """Return the numbers of the table that was made last outside of a capture."""
        entry = self._last.get((name, device))
        return None if entry is None else entry.numbers

    def get(
        self,
        name: Hashable,
        numbers: Sequence[float],
        dtype: torch.dtype,
        device: torch.device,
        contents: Callable[[Sequence[float]], Sequence[float]] = tuple,
    ) -> Tensor:
        """Return a 1-dim table of these numbers, for kernels on the current stream.

        Args:
            name: whose last table may hold the same numbers.
            numbers: all exact in `dtype`.
            dtype: torch.int64 or torch.float64, always the same for a name.
            device: of the table; the current device, if it is a GPU.
            contents: makes what the table contains of the numbers, which by default is these.
        """
        wanted, key, entry = tuple(numbers), (name, device), self._last.get((name, device))
        if device.type != "cuda":
            if entry is None or entry.numbers != wanted:
                entry = self._last[key] = _Entry(wanted, torch.tensor(contents(wanted), dtype=dtype), 0)
            return entry.table
        is_capturing = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream
        is_last = entry is not None and entry.numbers == wanted and (is_capturing or entry.stream == stream)
        if is_capturing:
            if entry is not None and is_last:
                return self._keep(entry.table)
            return self._keep(self._pinned(key, torch.tensor(contents(wanted), dtype=dtype))).to(
                device, non_blocking=True
            )
        if entry is None or not is_last:
            table = torch.tensor(contents(wanted), dtype=dtype).pin_memory().to(device, non_blocking=True)
            entry = self._last[key] = _Entry(wanted, table, stream)
        self._fill_up(key, entry.table)
        return entry.table

    def _pinned(self, key: tuple[Hashable, torch.device], host: Tensor) -> Tensor:
        """Return the numbers in memory that a captured copy can read; torch 2.11 refuses what isn't pinned.

        Asking for it in a capture may query events, which ends the capture (pytorch/pytorch#146924), so some was kept
        since the last step outside. Only where several captures in a row have used it up is it asked for.
        """
        spare = self._spare.get(key, [])
        return spare.pop().copy_(host) if spare and spare[-1].shape == host.shape else host.pin_memory()

    def _fill_up(self, key: tuple[Hashable, torch.device], like: Tensor) -> None:
        spare = [each for each in self._spare.get(key, []) if each.shape == like.shape]
        while len(spare) < SPARES:
            spare.append(torch.empty(like.shape, dtype=like.dtype, pin_memory=True))
        self._spare[key] = spare

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept[id(tensor)] = tensor
        return tensor
