"""From a resolved configuration to a module, its data and a plan: what fit, validate and explain have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.choices import Choices
from fasttrain.choices_file import choices_path, load_choices
from fasttrain.config import Resolved
from fasttrain.ddp import processes_of
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Context, ExampleBatch, Optimization
from fasttrain.plan import Catalogue, Plan, make_plan, requested
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import Recipe, build
from fasttrain.step_calls import StepCalls


@dataclass(frozen=True)
class Prepared:
    """A built recipe and its plan; nothing of the plan has been applied yet."""

    recipe: Recipe
    context: Context
    plan: Plan


def prepare(resolved: Resolved, catalogue: Catalogue, hardware: Hardware | None = None) -> Prepared:
    """Build the recipe and ask every optimization.

    Raises:
        ConfigError: an optimization that does not exist or has wrong parameters, or a GPU that is not there; judged
            before any data is touched.
        OptimizationError: one is refused and the configuration says that this is an error.
        ConfigError, DataError: from the recipe's classes.
    """
    wanted, off = requested(resolved.config.optimizations, catalogue)
    hardware = hardware or Hardware.of_accelerator(resolved.config.trainer.accelerator)
    with quiet_libraries():
        recipe = build(resolved)
        context = context_of(recipe, hardware, wanted)
        plan = make_plan(wanted, context, off)
    if plan.refused and resolved.config.refused_optimizations == "error":
        lines = "; ".join(
            f"{entry.optimization.name}: {getattr(entry.verdict, 'reason', '')}" for entry in plan.refused
        )
        raise OptimizationError(f"refused_optimizations=error, and these do not apply here: {lines}.")
    return Prepared(recipe, context, plan)


def context_of(recipe: Recipe, hardware: Hardware, wanted: Sequence[Optimization[Any]]) -> Context:
    """Return what the checks of the wanted optimizations may look at. Reads no data and no file yet."""
    precision, example = recipe.resolved.config.trainer.precision, ExampleBatch(recipe.data)
    asked_for = frozenset(optimization.name for optimization in wanted)
    calls = StepCalls(recipe.module, example, hardware.device, precision, "channels_last" in asked_for)
    choices = Choices(lambda: load_choices(choices_path(hardware.name)), calls, precision)
    processes = processes_of(recipe.resolved.config.trainer, hardware.kind == "gpu")
    return Context(recipe.module, recipe.data, hardware, precision, asked_for, example, choices, processes=processes)
