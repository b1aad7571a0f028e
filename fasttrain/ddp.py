"""Which strategy averages gradients over several processes, and how: DDP with buckets and compression as configured."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from fasttrain.config import DDPConfig, TrainerConfig

COMPRESSION: dict[str, Any] = {"none": None, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


def strategy_of(config: TrainerConfig) -> Any:
    """Return what the Trainer takes as its strategy: DDP with its options where it is DDP, else what was asked for."""
    on_gpu = torch.cuda.is_available() and config.accelerator in ("auto", "gpu", "cuda")
    if config.strategy == "ddp" or (config.strategy == "auto" and processes_of(config, on_gpu) > 1):
        return make_ddp(config.ddp)
    return config.strategy


def make_ddp(config: DDPConfig) -> DDPStrategy:
    """Return Lightning's DDP strategy. Lightning compresses on GPUs only."""
    options: dict[str, Any] = {} if config.bucket_cap_mb is None else {"bucket_cap_mb": config.bucket_cap_mb}
    return DDPStrategy(
        timeout=timedelta(seconds=config.timeout_seconds),
        ddp_comm_hook=COMPRESSION[config.gradient_compression],
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        find_unused_parameters=config.find_unused_parameters,
        **options,
    )


def processes_of(config: Any, on_gpu: bool) -> int:
    """Return the number of processes that Lightning will make of `trainer.devices` and `trainer.num_nodes`."""
    devices = config.devices
    if isinstance(devices, str):
        devices = [each for each in devices.split(",") if each.strip()] if "," in devices else devices
    if devices in ("auto", "-1", -1):
        count = torch.cuda.device_count() if on_gpu else 1
    elif isinstance(devices, str):
        count = int(devices) if devices.strip().isdigit() else 1
    else:  # what is neither a number nor a list Lightning refuses
        count = devices if isinstance(devices, int) else len(devices) if isinstance(devices, (list, tuple)) else 1
    return max(1, count) * int(config.num_nodes)
