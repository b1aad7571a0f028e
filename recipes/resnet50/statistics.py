"""Batch statistics over processes: shared by groups in training, the same on all of them in evaluation."""

import torch
import torch.distributed as dist
from torch import nn

from fasttrain.errors import ConfigError


def share_statistics(model: nn.Module, processes: int, world_size: int, device: torch.device) -> None:
    """Let the model's SyncBatchNorms compute over groups of some processes, neighbours by rank. Collective.

    Raises:
        ConfigError: the processes can't be divided into such groups, or are not on GPUs.
    """
    if processes == 1 or world_size == 1:
        return
    if world_size % processes:
        raise ConfigError(
            f"module.model.sync_bn is {processes}, but {world_size} processes can't be divided into such groups; take "
            f"a divisor of {world_size}."
        )
    if device.type != "cuda":
        raise ConfigError(f"module.model.sync_bn={processes} needs GPUs: torch shares no batch statistics on a CPU.")
    group, _ = dist.new_subgroups(processes)
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.process_group = group


def average_running_statistics(model: nn.Module, world_size: int) -> None:
    """Make the running means and variances those of all processes, in place. Collective.

    Each process has its own after a step. Without this, processes evaluate with different ones, and the score is not
    that of the checkpoint.
    """
    if world_size == 1:
        return
    statistics = [
        buffer for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for buffer in (module.running_mean, module.running_var) if buffer is not None
    ]  # fmt: skip
    flat = torch.cat([buffer.flatten() for buffer in statistics])
    dist.all_reduce(flat)
    flat /= world_size
    for buffer, values in zip(statistics, flat.split([buffer.numel() for buffer in statistics]), strict=True):
        buffer.copy_(values.view_as(buffer))
