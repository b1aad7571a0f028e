"""What each optimization of a recipe gains: alone, and when it alone is left out, each variant in a process of its own.

A variant is a short fit of the recipe with its own loader. Besides samples a second it is told how much memory it took,
how long it was until the first steady step, and how far its first losses are from those of the plain run, which has the
same first weights and batches. How far they may be is measured, too: as far as `FACTOR` times what comes of moving each
weight by the rounding of the precision that the run computes in.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from fasttrain.ablation_child import Told, Work
from fasttrain.bench_data import WINDOWS
from fasttrain.child_process import run_module, signal_text
from fasttrain.config import Resolved
from fasttrain.errors import ConfigError, nearest
from fasttrain.measure import Row, make_row
from fasttrain.plan import Catalogue, requested
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import build

NONE, ALL, ONLY, WITHOUT = "none", "all", "only_", "without_"
"""Variants; the last two are followed by the optimization's name."""

RATE, MEMORY, START, COLD_START = "samples_per_second", "memory_gb", "start_up_s", "cold_start_up_s"
LOSSES, ALLOWED, REFUSED, FAILED = "loss_difference", "loss_difference_allowed", "refused", "failed"
"""Metrics. The last two are 1, and their note is the reason."""

FACTOR = 4.0
"""Same numbers may differ by so many times what rounding makes of the plain run, as the graph step's check has it."""

RESOLUTION = 2.0**-24
"""Of a loss in fp32: smaller relative differences are taken for this one."""

LEAST_ALLOWED = 1e-6
"""Below this relative difference of losses nothing is a difference."""

SAME_QUALITY = 0.05
"""Where other numbers are allowed, the mean of the first losses may differ by this share."""

REHEARSAL_STEPS = 10
"""Measured steps of the first start, from which only its seconds are kept."""

LAST_WORDS = 300
"""Characters of what a process printed last that tell why it failed."""


@dataclass(frozen=True)
class Variant:
    """Which optimizations are on."""

    name: str
    optimizations: tuple[str, ...]
    needed: str = ""
    """The one that it is about, without which it is not measured."""


@dataclass(frozen=True)
class Measured:
    """What came of one variant; `number` of `count` is its place among all, and the first start comes before them."""

    variant: str
    rows: list[Row]
    number: int
    count: int
    error: str = ""


def variants_of(names: Sequence[str], about: Sequence[str]) -> list[Variant]:
    """Return all variants of a set of optimizations, in the order in which they are measured.

    Args:
        names: all that are asked for.
        about: those that are looked at one by one.
    """
    variants = [Variant(NONE, ()), Variant(ALL, tuple(names))]
    for name in about if len(names) > 1 else ():  # of a single one the two are those above
        variants.append(Variant(ONLY + name, (name,), name))
        variants.append(Variant(WITHOUT + name, tuple(other for other in names if other != name)))
    return variants


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the optimizations to be looked at one by one: those of `only`, in its order, or all.

    Raises:
        ConfigError: there is none, or `only` names one that the recipe does not ask for.
    """
    if not names:
        raise ConfigError("the configuration asks for no optimization, so there is nothing to leave out.")
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name}: the configuration does not ask for it; {nearest(name, names)}")
    return list(dict.fromkeys(only)) or list(names)


class Ablation:
    """Measures variants of a recipe, one after another.

    Args:
        resolved: the configuration with everything on.
        catalogue: the optimizations that may be asked for.
        catalogue_at: `module:name` under which a child process finds the catalogue.
        steps: of each variant's steady state.
        only: optimizations to look at; empty for all.
        limit_seconds: for everything; variants that it does not suffice for are left out.
        note: is put in each row's note.

    Raises:
        ConfigError: too few steps for a spread, nothing to leave out, or an unknown name.
        ConfigError, DataError: from the recipe, which is built here once, so that its data are there.
    """

    def __init__(
        self,
        resolved: Resolved,
        catalogue: Catalogue,
        catalogue_at: str,
        *,
        steps: int = 50,
        only: Sequence[str] = (),
        limit_seconds: float = math.inf,
        note: str = "",
    ) -> None:
        if steps < WINDOWS:
            raise ConfigError(f"--steps is {steps}; a median with its spread takes at least {WINDOWS}.")
        wanted, _ = requested(resolved.config.optimizations, catalogue)
        names = [optimization.name for optimization in wanted]
        self.variants = variants_of(names, chosen(names, only))
        self.case = case_of(resolved)
        self.not_reached: list[str] = []
        """Variants that the time did not suffice for."""
        self.on_begin: Callable[[str], object] = lambda label: None
        """Called with what is being measured when it begins."""
        self._resolved, self._catalogue_at, self._steps = resolved, catalogue_at, steps
        self._note = "; ".join(filter(None, [f"preset {resolved.config.preset}", note]))
        self._until = time.perf_counter() + limit_seconds
        self._longest = 0.0
        self._plain: list[float] = []
        self._allowed: float | None = None
        self._refused: dict[str, str] = {}
        with quiet_libraries():
            build(resolved)  # draws or checks the data, and completes the configuration with what they know

    def run(self) -> Iterator[Measured]:
        """Yield each variant's rows when it has been measured. Whatever ends the iteration ends the child process."""
        with tempfile.TemporaryDirectory(prefix="fasttrain-ablation-") as folder:
            place = Path(folder)
            everything = self.variants[1]
            yield self._first_start(place, everything)
            for number, variant in enumerate(self.variants, start=1):
                if not self._suffices():
                    self.not_reached += [each.name for each in self.variants[number - 1 :]]
                    return
                self.on_begin(f"[{number}/{len(self.variants)}] {variant.name}")
                yield Measured(variant.name, self._rows(place, variant), number, len(self.variants))

    def _first_start(self, place: Path, everything: Variant) -> Measured:
        """Start once with nothing compiled: later variants then find what this one has compiled, and start alike."""
        self.on_begin("a first start with everything on")
        told = self._child(place, everything, REHEARSAL_STEPS)
        self._refused = told.refused
        note = f"no Triton kernel compiled before; {self._note}"
        seconds = [] if told.start_up_s is None else [told.start_up_s]
        rows = [make_row(self._subject, self.case, ALL, COLD_START, "s", [each], note) for each in seconds]
        return Measured(ALL, rows, 0, len(self.variants), told.error)

    def _rows(self, place: Path, variant: Variant) -> list[Row]:
        row = partial(make_row, self._subject, self.case, variant.name)
        left_out = variant.name.removeprefix(WITHOUT) if variant.name.startswith(WITHOUT) else ""
        if left_out in self._refused:
            return [row(REFUSED, "", [1.0], f"as all, where it does not apply: {self._refused[left_out]}")]
        told = self._child(place, variant, self._steps)
        if variant.needed in told.refused:
            return [row(REFUSED, "", [1.0], told.refused[variant.needed])]
        if told.error:
            return [row(FAILED, "", [1.0], told.error)]
        if variant.name == NONE:
            self._plain = told.losses
            self.on_begin("none, its weights moved by rounding")
            moved = self._child(place, variant, 0, rounded=True).losses
            self._allowed = max(FACTOR * distance(moved, self._plain), LEAST_ALLOWED) if moved else None
        note = "; ".join([self._note, f"on: {', '.join(told.grades) or 'nothing'}"])
        rows = [row(RATE, "samples/s", told.samples_per_second, note)]
        rows += [row(MEMORY, "GB", [told.memory_gb], note)] if told.memory_gb is not None else []
        rows += [row(START, "s", [told.start_up_s], note)] if told.start_up_s is not None else []
        return rows + self._quality(variant, told)

    def _quality(self, variant: Variant, told: Told) -> list[Row]:
        """Return how far the first losses are from the plain run's, and how far they may be."""
        row = partial(make_row, self._subject, self.case, variant.name)
        if variant.name == NONE or not told.losses or len(told.losses) != len(self._plain):
            return []
        if "same quality" in told.grades.values():
            how = f"of the mean of the first {len(told.losses)} losses, for same quality"
            found, allowed = mean_difference(told.losses, self._plain), SAME_QUALITY
        elif self._allowed is None:
            return []
        else:
            how = f"of the first {len(told.losses)} losses, {FACTOR:g} times the effect of rounding allowed"
            found, allowed = distance(told.losses, self._plain), self._allowed
        return [row(LOSSES, "", [found], how), row(ALLOWED, "", [allowed], how)]

    def _child(self, place: Path, variant: Variant, steps: int, rounded: bool = False) -> Told:
        config, answer, work = place / "config.yaml", place / "told.json", place / "work.json"
        values = self._resolved.config.copy()
        values["optimizations"] = {name: values["optimizations"][name] for name in variant.optimizations}
        config.write_text(replace(self._resolved, config=values).to_yaml(), encoding="utf-8")
        began = time.time()
        asked = Work(self._catalogue_at, steps, began, variant.needed, rounded)
        work.write_text(json.dumps(asdict(asked)), encoding="utf-8")
        answer.unlink(missing_ok=True)
        # One folder for all variants, empty at first, so that how long a start takes does not depend on earlier days.
        caches = {"TRITON_CACHE_DIR": str(place / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
        left = self._until - time.perf_counter()
        arguments = [str(config), str(answer), str(work)]
        printed = place / "printed.txt"
        status = run_module(
            "fasttrain.ablation_child", arguments, printed, None if math.isinf(left) else max(left, 1.0), caches
        )
        self._longest = max(self._longest, time.time() - began)
        return _told(answer, status, printed)

    def _suffices(self) -> bool:
        return time.perf_counter() + self._longest < self._until

    @property
    def _subject(self) -> str:
        return str(self._resolved.config.recipe)


def case_of(resolved: Resolved) -> str:
    """Return the rows' case: `ablation`, with the batch size where the data have one."""
    size = OmegaConf.select(resolved.config, "data.batch_size")
    return f"ablation_b{size}" if isinstance(size, int) else "ablation"


def distance(losses: Sequence[float], plain: Sequence[float]) -> float:
    """Return the geometric mean of the relative differences of two runs' losses, step by step.

    Infinity where a loss is no number, 0 where all are equal. Differences grow from step to step, and an arithmetic
    mean would be of the last ones alone, where rounding has become as large as a fault. A fault is large at once.
    """
    if not all(map(math.isfinite, losses)):
        return math.inf
    if list(losses) == list(plain):
        return 0.0
    shares = [abs(ours - theirs) / max(abs(theirs), RESOLUTION) for ours, theirs in zip(losses, plain, strict=True)]
    return math.exp(sum(math.log(max(share, RESOLUTION)) for share in shares) / len(shares))


def mean_difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    """Return how far the mean of a run's losses is from the plain run's, as a share of it; inf for no number."""
    if not all(map(math.isfinite, losses)) or not sum(plain):
        return math.inf
    return abs(sum(losses) - sum(plain)) / abs(sum(plain))


def _told(path: Path, status: int | None, printed: Path) -> Told:
    """Return what a child wrote, with why it is not whole if it isn't."""
    try:
        told = Told(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        told = Told()
    if status is None:
        told.error = "it was not done when the time was over, and was ended"
    elif status != 0:
        words = " ".join(printed.read_text(errors="replace").split())[-LAST_WORDS:]
        how = f"was ended by {signal}" if (signal := signal_text(status)) else f"ended with status {status}"
        told.error = f"its process {how}: {words}".rstrip(": ")
    return told
