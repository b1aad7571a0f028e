"""What MLPerf Training v2.0 asks about a run of ResNet-50."""

from typing import Any

from fasttrain.mlperf.benchmark import Benchmark, RunFacts
from fasttrain.recipes.resnet50.model import logged_tensors
from fasttrain.recipes.resnet50.schedule import scaled_lr


def hyperparameters(run: RunFacts) -> dict[str, Any]:
    """Return the optimizer's values under the names that the rules have for LARS or for SGD."""
    optimizer = run.module.config.optimizer
    lars = optimizer.name == "lars"
    batch = optimizer.batch_size * run.batches_per_step
    values = {
        "opt_base_learning_rate": scaled_lr(optimizer.lr, batch, optimizer.lr_for_batch, lars),
        "opt_end_learning_rate": optimizer.end_lr,
        "opt_learning_rate_decay_poly_power": optimizer.power,
        # The reference convergence points have steps here; NVIDIA's one-node log has epochs.
        "opt_learning_rate_decay_steps": run.steps,
        "opt_momentum": optimizer.momentum,
        "opt_weight_decay": optimizer.weight_decay,
    }
    named = {f"{optimizer.name}_{key}": value for key, value in values.items()}
    if lars:
        rest = {"lars_epsilon": 0.0, "lars_opt_learning_rate_warmup_epochs": optimizer.warmup_epochs}
    else:
        span = optimizer.batch_size * run.module.config.model.sync_bn
        rest = {"model_bn_span": span, "opt_learning_rate_warmup_epochs": optimizer.warmup_epochs}
    return {"opt_name": optimizer.name, **named, **rest}


def tensors(run: RunFacts) -> list[str]:
    """Return the names of the initialised weights: 161."""
    return logged_tensors(run.module.model)


BENCHMARK = Benchmark(
    "resnet", metric="top1", target=0.759, ruleset="2.0.0", hyperparameters=hyperparameters, tensors=tensors
)
