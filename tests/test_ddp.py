"""The DDP section of a configuration becomes Lightning's strategy, and nothing else does."""

from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from fasttrain.config import DDPConfig, TrainerConfig
from fasttrain.ddp import strategy_of
from fasttrain.errors import ConfigError
from fasttrain.trainer import make_trainer


@pytest.mark.parametrize(
    ("values", "is_ddp"),
    [
        ({}, False),
        ({"devices": 2}, True),
        ({"devices": "2"}, True),
        ({"devices": [0, 1]}, True),
        ({"devices": 1, "num_nodes": 2}, True),
        ({"strategy": "ddp"}, True),
        ({"devices": 2, "strategy": "fsdp"}, False),
        ({"devices": 2, "strategy": "ddp_find_unused_parameters_true"}, False),
    ],
)
def test_it_is_ddp_where_lightning_would_take_ddp(values: dict[str, Any], is_ddp: bool) -> None:
    config = TrainerConfig(accelerator="cpu", **values)
    strategy = strategy_of(config)
    assert isinstance(strategy, DDPStrategy) if is_ddp else strategy == config.strategy


@pytest.mark.parametrize(
    ("compression", "hook"), [("none", None), ("bf16", bf16_compress_hook), ("fp16", fp16_compress_hook)]
)
def test_options_reach_the_trainers_strategy(compression: Any, hook: Any) -> None:
    ddp = DDPConfig(
        bucket_cap_mb=50,
        static_graph=True,
        gradient_compression=compression,
        timeout_seconds=60,
        gradient_as_bucket_view=False,
    )
    trainer = make_trainer(TrainerConfig(accelerator="cpu", devices=2, ddp=ddp), [], [], [])
    strategy = trainer.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_comm_hook is hook
    assert strategy._timeout == timedelta(seconds=60)
    assert strategy._ddp_kwargs == {
        "bucket_cap_mb": 50, "static_graph": True, "gradient_as_bucket_view": False, "find_unused_parameters": False,
    }  # fmt: skip


def test_bucket_size_is_torchs_own_unless_asked_for() -> None:
    strategy = strategy_of(TrainerConfig(accelerator="cpu", devices=2))
    assert "bucket_cap_mb" not in strategy._ddp_kwargs
    assert strategy._ddp_kwargs["gradient_as_bucket_view"]


@pytest.mark.parametrize("name", ["bucket_cap_mb", "timeout_seconds"])
def test_values_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.ddp\.{name} is 0; it must be above 0"):
        DDPConfig(**{name: 0})  # type: ignore[arg-type]
