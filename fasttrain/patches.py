"""What rooms that put a fused form in the place of a model's modules have in common.

A room says where its sites are (`ModulePatches`). From that come the replacement, which can be undone (`PatchSurgery`),
the Lightning callback (`PatchCallback`) and the plan's door (`PatchOptimization`), which measures before it believes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import lightning.pytorch as pl
from torch import nn

from fasttrain.callback_door import ActingCallback, CallbackOptimization
from fasttrain.choices import Decision
from fasttrain.comparison import compare_step, measured, verdict_of
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, Grade, Refuses, Stage, Verdict
from fasttrain.site_key import room_text
from fasttrain.surgery import Surgery, replace, with_state_of


@dataclass(frozen=True)
class PatchSite:
    """One place of a model where a fused form can be."""

    path: str
    """Of the module that is replaced; what it is called with is the site's input."""
    plain: nn.Module
    """What computes the same today, as one module around the model's own parameters."""
    fused: Callable[[], nn.Module]
    """Makes what goes to `path`: the same parameters under the same state-dict names."""
    passed_by: tuple[str, ...] = ()
    """Paths of modules whose work the fused form does too, the ReLU behind for instance: they become nn.Identity, which
    holds their parameters and buffers under the same names."""

    calls_no_child: bool = False
    """Whether the fused form reads its children's parameters and does not call them, as its attribute of this name
    then says: nothing in it is a site any more."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All that is replaced."""
        return self.path, *self.passed_by

    def takes(self) -> Iterator[str]:
        """Yield the paths that are no others' any more; one that ends in a dot stands for all that lies inside."""
        yield from self.paths
        if self.calls_no_child:
            yield f"{self.path}."

    def overlaps(self, taken: Collection[str]) -> bool:
        """Whether any of what it replaces is taken, or of what it would not call any more."""
        for path in taken:
            if path.endswith(".") and any(one.startswith(path) for one in self.paths):
                return True
            if path.rstrip(".") in self.paths or (self.calls_no_child and path.startswith(f"{self.path}.")):
                return True
        return False


class ModulePatches(ABC):
    """Where a room's fused forms can be in a model."""

    room: ClassVar[str]

    @abstractmethod
    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the sites that are not fused yet, without changing anything.

        A module within a shared parent is named by the first of its paths.
        """

    @abstractmethod
    def why_no_site(self, model: nn.Module) -> str:
        """Return a sentence's worth of why a model has no site, beginning with the model's name."""


def open_sites(model: nn.Module, patches: ModulePatches, taken: Collection[str] = ()) -> list[PatchSite]:
    """Return a room's sites but those that others have taken, and those inside of a module that calls no child."""
    closed = [f"{path}." for path, module in model.named_modules() if getattr(module, "calls_no_child", False)]
    return [site for site in patches.sites(model) if not site.overlaps([*taken, *closed])]


class PatchSurgery:
    """Puts a room's fused forms to the sites of a model, and the old modules back. The state dict stays as it is."""

    def __init__(self, model: nn.Module, patches: ModulePatches) -> None:
        self.model, self.patches = model, patches
        self._surgery = Surgery(model)

    def apply(self, only: Collection[str] | None = None) -> list[Change]:
        """Replace every site, or those at the paths `only`; return what changed.

        One module at several paths is replaced by one, so that it stays shared.
        """
        made: dict[int, nn.Module] = {}
        changes = []
        for site in open_sites(self.model, self.patches):
            if only is not None and site.path not in only:
                continue
            old = self.model.get_submodule(site.path)
            if id(old) not in made:
                made[id(old)] = site.fused()
            new = made[id(old)]
            for path in site.passed_by:
                self._replace(path, with_state_of(self.model.get_submodule(path), nn.Identity))
            self._replace(site.path, new)
            changes.append(Change(site.path, type(new).__name__))
        return changes

    def undo(self) -> None:
        """Put the old modules back, with the parameters as they are by then."""
        self._surgery.undo()

    def _replace(self, path: str, new: nn.Module) -> None:
        self._surgery.replaced.setdefault(path, replace(self.model, path, new))


class PatchCallback(ActingCallback):
    """Puts a room's fused forms into the module before its optimizer is made; `undo()` puts the old modules back.

    Raises:
        OptimizationError: at `setup`, when the model has no site.
    """

    def __init__(self, patches: ModulePatches) -> None:
        super().__init__()
        self.patches = patches
        self.only: frozenset[str] | None = None
        """Paths to act on; None for every site."""
        self._surgeries: list[PatchSurgery] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the modules."""
        surgery = PatchSurgery(pl_module, self.patches)
        changes = surgery.apply(self.only)
        # At a second stage, or with a second Trainer, they are replaced already.
        if not changes and not any(done.model is pl_module for done in self._surgeries):
            raise OptimizationError(f"{self.patches.room}: {self._why_none(pl_module)}; leave it out.")
        if changes:
            self.changes = changes
            self._surgeries.append(surgery)

    def _why_none(self, model: nn.Module) -> str:
        if not self.only or not open_sites(model, self.patches):
            return self.patches.why_no_site(model)
        return f"another optimization has taken its {len(self.only)} sites ('{min(self.only)}' for instance)"

    def undo(self) -> None:
        """Put the old modules back, in every module that this callback has changed."""
        for surgery in reversed(self._surgeries):
            surgery.undo()
        self._surgeries.clear()


class MeasuredConfig(Protocol):
    """What the configuration of a `PatchOptimization` has, beside what is its own."""

    @property
    def measure(self) -> bool:
        """Whether to time the step with and without first, on this machine."""

    @property
    def least_gain(self) -> float:
        """The share of step time that must be saved."""


@dataclass(frozen=True)
class PatchConfig:
    """How a fused form decides."""

    measure: bool = True
    """Time the training step with and without first, on this machine, and refuse where it is not faster."""
    least_gain: float = 0.02
    """The share of step time that must be saved; below it the difference is noise."""


C = TypeVar("C", bound=MeasuredConfig)


class PatchOptimization(CallbackOptimization[C, PatchCallback]):
    """The plan's door of a room with patches: applies where there are sites and the step measures faster."""

    stage: ClassVar[Stage] = Stage.MODEL
    grade: ClassVar[Grade] = "same numbers"
    after: ClassVar[frozenset[str]] = frozenset({"channels_last"})
    for_channels_last: ClassVar[bool] = False
    """Whether the fused form is made for channels_last, which a verdict then recommends."""

    def check(self, context: Context) -> Verdict:
        """Refuse where there is nothing to fuse, or where it measures no faster.

        A site that `fasttrain tune` has measured is decided by that; for the others the step is timed.
        """
        patches = self.callback.patches
        every = open_sites(context.module, patches)
        sites = [site for site in every if not site.overlaps(context.taken)]
        if not every:
            return Refuses(patches.why_no_site(context.module))
        if not sites:
            takers = {name for path, name in context.taken.items() if any(site.overlaps([path]) for site in every)}
            return Refuses(f"its {len(every)} sites are in what {' and '.join(sorted(takers))} fuses")
        self.callback.only = None if len(sites) == len(every) else frozenset(site.path for site in sites)
        layout = "; made for channels_last, which is not asked for" if self._lacks_channels_last(context) else ""
        if not self.config.measure:
            return Applies(f"{len(sites)} sites; not measured, as asked{layout}")
        decision = self._decision(context, sites)
        if decision is None:
            return self._by_the_step(context, [site.path for site in sites], layout)
        return self._by_the_sites(context, decision, layout)

    def takes(self, context: Context) -> Collection[str]:
        """Return the paths of what will be replaced; see `PatchSite.takes`."""
        only = self.callback.only
        sites = open_sites(context.module, self.callback.patches, context.taken)
        return {path for site in sites if only is None or site.path in only for path in site.takes()}

    @property
    def room(self) -> str:
        """The name under which sites are measured: the same for the same configuration."""
        return room_text(self.name, self.config)

    def _decision(self, context: Context, sites: Sequence[PatchSite]) -> Decision | None:
        if context.choices is None:
            return None
        try:
            places = [(site.path, site.plain) for site in sites]
            return context.choices.decide(self.room, places, compiled="compile" in context.asked_for)
        except OptimizationError:  # the step can't be run by itself, which the other way of measuring will say
            return None

    def _by_the_sites(self, context: Context, decision: Decision, layout: str) -> Verdict:
        chosen, note = decision.ours, f"{decision.share}{decision.about_compiler}"
        if decision.unknown:
            others = self._by_the_step(context, decision.unknown, layout)
            if isinstance(others, Applies):
                chosen, note = (*chosen, *decision.unknown), f"{note}; and the rest: {others.note}"
            else:
                note = f"{note}; not the rest: {others.reason}"
        else:
            note += layout
        if not chosen:
            return Refuses(f"it is the fastest at {note}; `fasttrain tune` with --again measures anew")
        self.callback.only = frozenset(chosen)
        return Applies(note)

    def _by_the_step(self, context: Context, paths: Sequence[str], layout: str) -> Verdict:
        """Time the step with and without the fused form at some paths."""

        def compare(batch: Any) -> Verdict:
            plain, ours = compared_ms(context, batch, self.callback.patches, paths)
            verdict = verdict_of(f"{len(paths)} sites", plain, ours, self.config.least_gain, layout)
            return Refuses(f"{verdict.reason}{layout}") if isinstance(verdict, Refuses) else verdict

        return measured(context, self.name, compare)

    def _lacks_channels_last(self, context: Context) -> bool:
        return self.for_channels_last and "channels_last" not in context.asked_for


def compared_ms(
    context: Context, batch: Any, patches: ModulePatches, only: Collection[str] | None = None
) -> tuple[float, float]:
    """Return milliseconds of the plain step and of the fused one, see `compare_step`.

    Fused at every site, or at those at the paths `only`.

    Raises:
        OptimizationError: the step does not run outside of a Trainer.
    """

    def fuse(copied: pl.LightningModule, batch: Any) -> Any:
        PatchSurgery(copied, patches).apply(only)
        return batch

    plain, ours = compare_step(context, batch, fuse)
    return plain.median_ms, ours.median_ms
