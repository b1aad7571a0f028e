"""Which alternative measured fastest at each site of a model: the rule that chooses, and what a room's check asks.

`fasttrain tune` measures and keeps the times in a file for each machine (`choices_file`); a plan reads them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from fasttrain.measure import Timing
from fasttrain.site_key import Call, precision_text, site_key

PLAIN, COMPILE, OURS = ALTERNATIVES = ("plain", "compile", "ours")
LEAST_GAIN = 0.02
"""The share of plain's time that an alternative must save to win; below it the difference is noise."""
BUDGET_SHORT = "no time left for it in the budget"
"""Why an alternative has no time, where measuring again would find one."""


@dataclass(frozen=True)
class Measured:
    """The times of one site: forward and backward, over all calls that a training step makes of it."""

    room: str
    """With its parameters, see `room_text`."""
    precision: str
    module: str
    """The plain module, for a reader."""
    calls: tuple[str, ...]
    """What it is called with, for a reader."""
    times: Mapping[str, Timing]
    """By alternative; plain is always there."""
    missing: Mapping[str, str]
    """Alternative -> why it has no time."""
    how: str
    """What was timed."""
    seen: str
    """Recipe and path."""
    date: str
    by: str
    """Version and commit of fasttrain."""

    def winner(self, among: Iterable[str] = ALTERNATIVES) -> str:
        """Return the fastest of some alternatives: plain, unless another is faster by more than noise.

        Its median must be less than plain's by `LEAST_GAIN`, and no more than plain's tenth percentile.
        """
        plain = self.times[PLAIN]
        most = min(plain.median_ms * (1 - LEAST_GAIN), plain.p10_ms)
        times = {name: self.times[name].median_ms for name in among if name in self.times}
        faster = [name for name, ms in times.items() if ms <= most]
        return min(faster, key=lambda name: times[name], default=PLAIN)

    def saved_ms(self, alternative: str) -> float:
        """Return by how much an alternative takes less than plain."""
        return self.times[PLAIN].median_ms - self.times[alternative].median_ms

    @property
    def is_complete(self) -> bool:
        """Whether measuring again, with more time, would find nothing that is not known."""
        return BUDGET_SHORT not in self.missing.values()


@dataclass(frozen=True)
class Decision:
    """What the measurements say of a room's sites in one model, by path."""

    ours: tuple[str, ...]
    """To be patched."""
    left: tuple[str, ...]
    """To be left as they are."""
    unknown: tuple[str, ...]
    """Not measured."""
    of_compiler: tuple[str, ...]
    """Those of `ours` and `left` where torch.compile is the fastest."""
    compiled: bool
    """Whether the run compiles what it is left with."""
    date: str

    @property
    def share(self) -> str:
        """How many sites are patched, and who says so, for a verdict."""
        known = len(self.ours) + len(self.left)
        text = f"{len(self.ours)} of {known + len(self.unknown)} sites, by measurement of {self.date}"
        return f"{text} ({len(self.unknown)} not measured)" if self.unknown else text

    @property
    def about_compiler(self) -> str:
        """What the compiler is better at, to be put behind a verdict; empty if nothing."""
        if not self.of_compiler:
            return ""
        where = f"{len(self.of_compiler)} site{'s' * (len(self.of_compiler) != 1)}"
        if self.compiled:
            return f"; {where} left to torch.compile, which is the fastest there"
        return f"; torch.compile would be the fastest at {where}: ask for the optimization `compile`"


class Choices:
    """What has been measured on this machine, asked for the sites of one run. Reads and runs nothing before that.

    Args:
        load: returns what the file holds, by key.
        calls: returns what each module, by path, is called with in the run's training step. Asked only if the file has
            anything about a room in the run's precision; may raise OptimizationError.
        precision: Lightning's name of the run's precision.
    """

    def __init__(
        self,
        load: Callable[[], Mapping[str, Measured]],
        calls: Callable[[], Mapping[str, Sequence[Call]]],
        precision: str,
    ) -> None:
        self._load, self.calls, self.precision = load, calls, precision_text(precision)

    @cached_property
    def measured(self) -> Mapping[str, Measured]:
        """What the file held when it was first looked into."""
        return self._load()

    def key(self, room: str, path: str, plain: nn.Module) -> str | None:
        """Return a site's name in the file; None for one that the training step does not call.

        Raises:
            OptimizationError: the step can't be run by itself.
        """
        calls = self.calls().get(path)
        return site_key(room, plain, calls, self.precision) if calls else None

    def decide(self, room: str, sites: Iterable[tuple[str, nn.Module]], compiled: bool) -> Decision | None:
        """Return what to do at each site of a room; None if none of them has been measured.

        Args:
            room: with its parameters, see `room_text`.
            sites: path and plain module.
            compiled: whether the run compiles what it is left with. If so, a site where the compiler wins is left to
                it; else the choice is between plain and ours.

        Raises:
            DataError: the file is damaged.
            OptimizationError: the step can't be run by itself.
        """
        if not any((each.room, each.precision) == (room, self.precision) for each in self.measured.values()):
            return None
        found = {path: self.measured.get(self.key(room, path, plain) or "") for path, plain in sites}
        known = {path: measured for path, measured in found.items() if measured is not None}
        if not known:
            return None
        able = ALTERNATIVES if compiled else (PLAIN, OURS)
        dates = sorted(measured.date for measured in known.values())
        return Decision(
            ours=tuple(path for path, measured in known.items() if measured.winner(able) == OURS),
            left=tuple(path for path, measured in known.items() if measured.winner(able) != OURS),
            unknown=tuple(path for path in found if path not in known),
            of_compiler=tuple(path for path, measured in known.items() if measured.winner() == COMPILE),
            compiled=compiled,
            date=dates[-1] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        )
