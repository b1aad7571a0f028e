"""From a resolved configuration to a module, its data and a plan: what fit, validate and explain have in common."""

from dataclasses import dataclass

from fasttrain.config import Resolved
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Context, ExampleBatch
from fasttrain.plan import Catalogue, Plan, make_plan, requested
from fasttrain.quiet import quiet_libraries
from fasttrain.recipe import Recipe, build


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
        context = Context(
            recipe.module,
            recipe.data,
            hardware,
            precision=resolved.config.trainer.precision,
            asked_for=frozenset(optimization.name for optimization in wanted),
            example=ExampleBatch(recipe.data),
        )
        plan = make_plan(wanted, context, off)
    if plan.refused and resolved.config.refused_optimizations == "error":
        lines = "; ".join(
            f"{entry.optimization.name}: {getattr(entry.verdict, 'reason', '')}" for entry in plan.refused
        )
        raise OptimizationError(f"refused_optimizations=error, and these do not apply here: {lines}.")
    return Prepared(recipe, context, plan)
