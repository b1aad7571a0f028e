"""What MLPerf Training v2.0 asks about a run of RetinaNet, which its logs call `ssd`."""

from typing import Any

from fasttrain.mlperf.benchmark import Benchmark, RunFacts


def hyperparameters(run: RunFacts) -> dict[str, Any]:
    """Return the optimizer's values; the closed division has Adam without decay and leaves the rest free."""
    optimizer = run.module.config.optimizer
    return {
        "opt_name": optimizer.name,
        "opt_base_learning_rate": optimizer.lr,
        "opt_weight_decay": optimizer.weight_decay,
        "opt_learning_rate_warmup_epochs": optimizer.warmup_epochs,
        "opt_learning_rate_warmup_factor": optimizer.warmup_factor,
    }


def tensors(run: RunFacts) -> list[str]:
    """Return the names of the initialised weights: 89, the frozen ones included."""
    names: list[str] = run.module.model.logged_tensors()
    return names


BENCHMARK = Benchmark(
    "ssd", metric="map", target=0.340, ruleset="2.0.0", hyperparameters=hyperparameters, tensors=tensors
)
