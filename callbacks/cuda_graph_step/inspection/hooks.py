"""Which of the user's hooks lie inside of a captured step and may stay there, and which are called around it."""

import linecache
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from fasttrain.callbacks.cuda_graph_step.inspection.frozen_reads import changed_between_steps, inspect_hook
from fasttrain.callbacks.cuda_graph_step.inspection.user_code import plain_function
from fasttrain.callbacks.cuda_graph_step.inspection.walk import Changed, Finding, Inspection
from fasttrain.overriding import overridden
from fasttrain.short_path import TRANSFER_HOOKS
from fasttrain.step_results import STEP_HOOKS

CAPTURED_HOOKS: Final = STEP_HOOKS
"""What Lightning calls within a step. No callback of Lightning 2.6 overrides one of these by itself."""

OUTSIDE_HOOKS: Final = (
    *TRANSFER_HOOKS,
    "on_train_batch_start",
    "lr_scheduler_step",
    "on_train_batch_end",
)
"""What it calls for each batch around the step, in its order."""


@dataclass(frozen=True)
class HookVerdict:
    """Whether an overridden hook may be captured."""

    owner: str
    """The owner's class and what it is: `GradNormMonitor (callback)`, or `LitThing` for the module."""
    hook: str
    captured: bool
    reason: str
    """Names the place where it was refused; without a full stop."""
    file: str
    line: int
    source: str
    """The source of that line; of the hook's first where it is captured."""


def step_hooks(trainer: pl.Trainer, module: pl.LightningModule, trusted: Container[str] = ()) -> list[HookVerdict]:
    """Return a verdict on every overridden hook of the step, the module's first, then the callbacks' in their order.

    `forward` has one if a hook of the step calls it.

    Args:
        trainer: with its callbacks; a data module, if attached, is looked at too.
        module: need not be attached.
        trusted: hooks for which the user vouches, as `Owner.hook` (`GradNormMonitor.on_after_backward`).
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    around = [
        (getattr(owner, hook), owner) for hook, owners in outside_hooks(trainer, module).items() for owner in owners
    ]
    changed = changed_between_steps(around, module)
    hooks = [(owner, hook) for owner in (module, *callbacks) for hook in CAPTURED_HOOKS if overridden(owner, hook)]
    apart = {code for owner, hook in [*hooks, (module, "forward")] if (code := _code(getattr(owner, hook))) is not None}
    verdicts, reached = [], set[CodeType]()
    for owner, hook in hooks:
        verdict, inspection = _judge(owner, hook, module, changed, apart, trusted)
        verdicts.append(verdict)
        reached |= inspection.reached
    if overridden(module, "forward") and _code(module.forward) in reached:
        verdicts.insert(1, _judge(module, "forward", module, changed, apart, trusted)[0])
    return [*verdicts, *_of_strategy(trainer)]


def outside_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, tuple[Any, ...]]:
    """Return hook -> those who override it, in the order in which Lightning calls them; hooks of nobody are left out.

    Of a transfer hook that both override, Lightning hears the data module's.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found: dict[str, tuple[Any, ...]] = {}
    for hook in OUTSIDE_HOOKS:
        if hook in TRANSFER_HOOKS:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            owners = [owner for owner in (data, module) if owner is not None and overridden(owner, hook)][:1]
        else:
            owners = [owner for owner in (*callbacks, module) if overridden(owner, hook)]
        if owners:
            found[hook] = tuple(owners)
    return found


def reads_gradients(function: Any, owner: object, module: pl.LightningModule | None = None) -> bool:
    """Whether a function, or what it calls, mentions `grad`, so that gradients must be there when it runs.

    A library's function counts if it does so by itself. Arguments as in `frozen_reads`.
    """
    return inspect_hook(function, owner, module).reads_gradients


def _judge(
    owner: Any,
    hook: str,
    module: pl.LightningModule,
    changed: Changed,
    apart: Iterable[CodeType],
    trusted: Container[str],
) -> tuple[HookVerdict, Inspection]:
    function = getattr(owner, hook)
    own = _code(function)
    inspection = inspect_hook(function, owner, module, changed, set(apart) - {own}, hook)
    name = type(owner).__name__
    shown = name if owner is module else f"{name} (callback)"
    findings = sorted(inspection.findings.values(), key=lambda finding: finding.rule.kind != "read")
    file, line = _place(function)
    if f"{name}.{hook}" in trusted:
        reason, findings = "vouched for", []
    elif own is None:
        reason = f"{name}.{hook} is no Python function, and can't be looked into; name it in `trusted` if it may stay"
        return HookVerdict(shown, hook, False, reason, file, line, ""), inspection
    elif findings:
        reason = _reason(findings, f"{name}.{hook}")
        file, line = findings[0].file, findings[0].line
    else:
        reason = "only touches the device, as far as its code shows"
    source = linecache.getline(file, line).strip()
    return HookVerdict(shown, hook, not findings, reason, file, line, source), inspection


def _reason(findings: list[Finding], hook: str) -> str:
    first = findings[0]
    inside = "" if first.function == hook else f"within {hook}, "
    others = len({(finding.file, finding.line) for finding in findings}) - 1
    more = f" (and {others} more such {'place' if others == 1 else 'places'})" if others else ""
    return f"{inside}{first.sentence}{more}"


def _of_strategy(trainer: pl.Trainer) -> Iterator[HookVerdict]:
    """What inspection would get wrong, as it enters no library code: DDP's averaging counts its steps on the host."""
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and vars(strategy).get("_model_averager") is not None:
        file, line = _place(type(strategy).optimizer_step)
        reason = (
            f"{type(strategy).__name__} averages the models every few steps, which it counts on the host; leave "
            "model_averaging_period out"
        )
        yield HookVerdict(f"{type(strategy).__name__} (strategy)", "optimizer_step", False, reason, file, line, "")


def _code(function: Any) -> CodeType | None:
    plain = plain_function(function)
    return None if plain is None else plain.__code__


def _place(function: Any) -> tuple[str, int]:
    code = _code(function)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)
