"""Which ranks train and which evaluate, and the process groups between them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fasttrain.callbacks.evaluation_ranks.board import Board, open_store
from fasttrain.errors import OptimizationError

FOR_EVER = timedelta(days=10_000)
"""For what takes as long as it takes, a download for instance; ranks that die in it are the launcher's business."""


@dataclass(frozen=True)
class Roles:
    """This process's place: the first ranks train, the last ones evaluate."""

    rank: int
    """Among all processes."""
    training: int
    """Number of ranks that train."""
    evaluation: int
    """Number of ranks that evaluate."""
    own: ProcessGroup
    """The ranks of this process's role, with the run's own backend: gradients go through the training ranks'."""
    own_on_host: ProcessGroup
    """The same over gloo: detections and results never get in the way of gradients."""
    weights: ProcessGroup | None
    """The first training rank and all evaluation ranks; None on the other training ranks."""
    everyone: ProcessGroup
    """All ranks, over gloo."""
    board: Board

    @property
    def trains(self) -> bool:
        """Whether this process trains."""
        return self.rank < self.training

    @property
    def role_rank(self) -> int:
        """This process's rank within its role."""
        return self.rank if self.trains else self.rank - self.training

    @property
    def role_size(self) -> int:
        """The number of ranks of this process's role."""
        return self.training if self.trains else self.evaluation

    @property
    def training_ranks(self) -> range:
        """The ranks that train, among all."""
        return range(self.training)

    @property
    def evaluation_ranks(self) -> range:
        """The ranks that evaluate, among all."""
        return range(self.training, self.training + self.evaluation)


def assign_roles(
    eval_ranks: int,
    *,
    timeout_seconds: float = 1800.0,
    dead_after_seconds: float = 40.0,
    gradients_timeout: timedelta | None = None,
    host: str | None = None,
) -> Roles:
    """Make the last `eval_ranks` processes evaluation ranks. Called by every process of an initialized world.

    Args:
        timeout_seconds: after which a collective among the ranks of a role over gloo fails.
        dead_after_seconds: a rank that gave no sign of life for so long counts as dead.
        gradients_timeout: of the groups over the run's own backend; None is that backend's default.
        host: where the first rank can be reached; MASTER_ADDR, or this machine, unless told otherwise.

    Raises:
        OptimizationError: no process would be left to train.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = ranks - eval_ranks
    if training < 1:
        raise OptimizationError(
            f"evaluation_ranks: this run has {ranks} process{'es' if ranks > 1 else ''}, and {eval_ranks} of them "
            f"would evaluate, so that none is left to train; start at least {eval_ranks + 1}."
        )
    groups = {"train": range(training), "evaluate": range(training, ranks)}
    # Every process makes every group, in the same order, those that it is not in too.
    everyone = _group(range(ranks), FOR_EVER, "gloo")
    own = {role: _group(members, gradients_timeout) for role, members in groups.items()}
    timeout = timedelta(seconds=timeout_seconds + 60)
    on_host = {role: _group(members, timeout, "gloo") for role, members in groups.items()}
    weights = _group([0, *groups["evaluate"]], timeout)
    role = "train" if rank < training else "evaluate"
    board = _board(rank, ranks, everyone, host, dead_after_seconds)
    is_weights_rank = rank == 0 or role == "evaluate"
    return Roles(
        rank, training, eval_ranks, own[role], on_host[role], weights if is_weights_rank else None, everyone, board
    )


def _group(members: Iterable[int], timeout: timedelta | None, backend: str | None = None) -> ProcessGroup:
    """Return a group; torch's mark of an absent one where this process is not in it."""
    return cast(ProcessGroup, dist.new_group(list(members), timeout, backend))


def _board(rank: int, ranks: int, everyone: ProcessGroup, host: str | None, dead_after_seconds: float) -> Board:
    host = host or os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = open_store(host, 0, is_first=True) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, group=everyone, group_src=0)
    board = Board(store or open_store(host, port[0], is_first=False), rank, ranks, dead_after_seconds)
    dist.barrier(everyone)  # every rank has given its first sign of life
    return board
