"""What MLPerf Training v2.0 asks about a run of BERT."""

import re
from typing import Any

from fasttrain.mlperf.benchmark import Benchmark, RunFacts

RENAMED = (
    (r"embeddings\.weight$", "embeddings"),
    (r"LayerNorm\.weight$", "LayerNorm.gamma"),
    (r"LayerNorm\.bias$", "LayerNorm.beta"),
    (r"^cls\.predictions\.bias$", "cls.predictions.output_bias"),
    (r"^cls\.seq_relationship\.weight$", "cls.seq_relationship.output_weights"),
    (r"^cls\.seq_relationship\.bias$", "cls.seq_relationship.output_bias"),
    (r"\.weight$", ".kernel"),
    (r"layer\.(\d+)", r"layer_\1"),
)
"""From our names to those of the TensorFlow reference, which the rules have; applied one after another."""


def logged_name(name: str) -> str:
    """Return the name under which MLPerf logs a parameter."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name.replace(".", "/")


def hyperparameters(run: RunFacts) -> dict[str, Any]:
    """Return the optimizer's values; the closed division leaves all of them free."""
    optimizer = run.module.config.optimizer
    return {
        "opt_name": optimizer.name,
        "opt_base_learning_rate": optimizer.lr,
        "opt_epsilon": optimizer.eps,
        "opt_learning_rate_training_steps": optimizer.total_steps if optimizer.total_steps is not None else run.steps,
        "opt_learning_rate_warmup_steps": optimizer.warmup_steps,
        "num_warmup_steps": optimizer.warmup_steps,
        "start_warmup_step": optimizer.start_warmup_step,
        "opt_lamb_beta_1": optimizer.betas[0],
        "opt_lamb_beta_2": optimizer.betas[1],
        "opt_lamb_weight_decay_rate": optimizer.weight_decay,
    }


def tensors(run: RunFacts) -> list[str]:
    """Return the names of the initialised weights: 398. Shared word embeddings count once."""
    return [logged_name(name) for name, _ in run.module.model.named_parameters()]


def global_batch(run: RunFacts) -> int:
    """Return the sequences of a step; of packed rows, those that a step has on average."""
    batch: int = run.data.config.batch_size
    return batch * run.batches_per_step


BENCHMARK = Benchmark(
    "bert", metric="mlm_accuracy", target=0.720, ruleset="2.0.0", progress="samples", hyperparameters=hyperparameters,
    tensors=tensors, global_batch=global_batch,
)  # fmt: skip
