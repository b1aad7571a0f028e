"""From the optimizations that a run asks for to an ordered, conflict-free plan with every refusal's reason.

Pure until `attach`: every answer is in before the first change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
from omegaconf import DictConfig, OmegaConf

from fasttrain.config import Layer, merge, thaw
from fasttrain.errors import ConfigError, OptimizationError, nearest
from fasttrain.optimization import Applies, Attachment, Context, Optimization, Refuses, Verdict

Catalogue = Mapping[str, type[Optimization[Any]]]


@dataclass(frozen=True)
class Entry:
    """One optimization that was asked for, and the answer."""

    optimization: Optimization[Any]
    verdict: Verdict

    @property
    def applies(self) -> bool:
        """Whether the plan will use it."""
        return isinstance(self.verdict, Applies)


@dataclass(frozen=True)
class Plan:
    """Entries in the order in which they act; those that don't apply come last."""

    entries: tuple[Entry, ...] = ()
    off: tuple[str, ...] = field(default=())
    """Names that the configuration switches off."""

    @property
    def applying(self) -> tuple[Optimization[Any], ...]:
        """The optimizations that act, in order."""
        return tuple(entry.optimization for entry in self.entries if entry.applies)

    @property
    def refused(self) -> tuple[Entry, ...]:
        """The entries that don't apply."""
        return tuple(entry for entry in self.entries if not entry.applies)

    def attach(self, context: Context) -> list[Attachment]:
        """Let each applying optimization act, in order. The context's module may be changed in place."""
        return [optimization.attach(context) for optimization in self.applying]

    def record(self, with_changes: bool = False) -> dict[str, Any]:
        """Return what `plan.json` holds; changes are known once training has begun."""
        rows = []
        for entry in self.entries:
            optimization, verdict = entry.optimization, entry.verdict
            changes = [asdict(change) for change in optimization.applied()] if with_changes and entry.applies else []
            rows.append(
                {
                    "name": optimization.name,
                    "verdict": "applies" if entry.applies else "refused",
                    "reason": verdict.reason if isinstance(verdict, Refuses) else verdict.note,
                    "stage": optimization.stage.name.lower(),
                    "grade": optimization.grade,
                    "changes": changes,
                }
            )
        rows += [{"name": name, "verdict": "off", "reason": "switched off by the configuration", "changes": []}
                 for name in self.off]  # fmt: skip
        return {"optimizations": rows}

    def outcome(self) -> dict[str, Any]:
        """Return what `optimizations.json` holds: the tables of each applying optimization that has any.

        One that fails to give them is listed with its error: the run is over, and the others have theirs to tell.
        """
        rows: list[dict[str, Any]] = []
        for optimization in self.applying:
            tables, error = [], None
            try:
                tables = [asdict(table) for table in optimization.outcome()]
            except Exception as failure:  # whatever it is, it must not take the place of the error that ended the run
                error = f"{type(failure).__name__}: {failure}"
            if tables or error:
                rows.append({"name": optimization.name, "tables": tables, "error": error})
        return {"optimizations": rows}


def data_module(attachments: Iterable[Attachment], own: pl.LightningDataModule) -> pl.LightningDataModule:
    """Return the last data module that an optimization put in the place of the recipe's `own`, or that."""
    return next((a.data for a in reversed(list(attachments)) if a.data is not None), own)


def requested(asked: Mapping[str, Any] | DictConfig, catalogue: Catalogue) -> tuple[list[Optimization[Any]], list[str]]:
    """Return the optimizations asked for, configured, and the names that are switched off by null or false.

    Raises:
        ConfigError: an unknown optimization, parameter or type.
    """
    wanted, off = [], []
    for name, values in asked.items():
        name = str(name)
        if name not in catalogue:
            raise ConfigError(f"optimizations.{name}: there is no such optimization; {nearest(name, catalogue)}")
        if values is None or values is False:
            off.append(name)
            continue
        if values is True:
            values = {}
        if not isinstance(values, (Mapping, DictConfig)):
            raise ConfigError(
                f"optimizations.{name} is {values!r}; give a mapping of its parameters, or false to leave it out."
            )
        room = catalogue[name]
        schema = thaw(OmegaConf.structured(room.config_class))
        config = merge(schema, [Layer(f"optimizations.{name}", OmegaConf.create(dict(values)))])
        wanted.append(room(OmegaConf.to_object(config)))
    return wanted, off


def make_plan(wanted: Sequence[Optimization[Any]], context: Context, off: Sequence[str] = ()) -> Plan:
    """Check every optimization, take out the ones in conflict, and order the rest.

    They are asked in the order in which they would act, each knowing what those before it will replace. Of two that
    conflict the one asked for first stays: the order in the recipe is the user's preference.

    Raises:
        OptimizationError: `before` and `after` of the rooms contradict each other.
    """
    verdicts: dict[str, Verdict] = {}
    for optimization in _as_they_would_act(wanted):
        verdict = verdicts[optimization.name] = optimization.check(context)
        if isinstance(verdict, Applies):
            takes = dict.fromkeys(optimization.takes(context), optimization.name)
            context = replace(context, taken={**context.taken, **takes})
    standing: list[Optimization[Any]] = []
    for optimization in wanted:
        if not isinstance(verdicts[optimization.name], Applies):
            continue
        clash = next((other for other in standing if _clash(optimization, other)), None)
        if clash is None:
            standing.append(optimization)
        else:
            verdicts[optimization.name] = Refuses(
                f"does not go together with '{clash.name}', which was asked for first: {_clash(optimization, clash)}"
            )
    ordered = in_order(standing)
    refused = [optimization for optimization in wanted if optimization not in standing]
    return Plan(tuple(Entry(o, verdicts[o.name]) for o in [*ordered, *refused]), tuple(off))


def _as_they_would_act(wanted: Sequence[Optimization[Any]]) -> Sequence[Optimization[Any]]:
    try:
        return in_order(wanted)
    except OptimizationError:  # those that apply may still have an order
        return wanted


def in_order(optimizations: Sequence[Optimization[Any]]) -> list[Optimization[Any]]:
    """Sort by stage, then by the rooms' own before and after, else as given.

    Raises:
        OptimizationError: a circle.
    """
    left = sorted(optimizations, key=lambda optimization: optimization.stage)
    ordered: list[Optimization[Any]] = []
    while left:
        ready = next((o for o in left if not any(_precedes(other, o) for other in left if other is not o)), None)
        if ready is None:
            names = ", ".join(sorted(o.name for o in left))
            raise OptimizationError(f"the order of {names} contradicts itself: each must come before another of them.")
        ordered.append(ready)
        left.remove(ready)
    return ordered


def _precedes(first: Optimization[Any], second: Optimization[Any]) -> bool:
    if first.stage != second.stage:
        return first.stage < second.stage
    return second.name in first.before or first.name in second.after


def _clash(one: Optimization[Any], other: Optimization[Any]) -> str | None:
    return one.conflicts.get(other.name) or other.conflicts.get(one.name)
