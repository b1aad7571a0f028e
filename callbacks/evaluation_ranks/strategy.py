"""Two roles within one Lightning run: the strategy, and every reach into Lightning's and torch's internals.

Written against Lightning 2.6 and torch 2.11 to 2.14; `tests/test_evaluation_ranks_lightning.py` fails when one of these
internals changes its shape.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from fasttrain.callbacks.evaluation_ranks.config import EvaluationRanksConfig
from fasttrain.callbacks.evaluation_ranks.roles import Roles, assign_roles
from fasttrain.callbacks.evaluation_ranks.schedule import share
from fasttrain.errors import OptimizationError


class EvaluationRanksStrategy(DDPStrategy):
    """DDP over the first ranks; the last ones have a world of their own.

    In a fit each role's ranks are torch's default group there, and Lightning's world size and rank are those within
    the role. So whatever averages, broadcasts or splits data over "all" ranks, in Lightning, in a metric or in
    the user's code, does so over its role's. In `validate`, `test` and `predict` it is DDP over all ranks.

    Args:
        config: who evaluates, and the timeouts.
        options: DDPStrategy's own.
    """

    def __init__(self, config: EvaluationRanksConfig, **options: Any) -> None:
        super().__init__(**options)
        self.ranks_config = config
        self.roles: Roles | None = None
        """During a fit."""
        self._world: Any = None
        self._as_one_process = False

    @property
    def global_rank(self) -> int:
        """The rank within the role."""
        if self._as_one_process:
            return 0
        return super().global_rank if self.roles is None else self.roles.role_rank

    @property
    def world_size(self) -> int:
        """The size of the role."""
        if self._as_one_process:
            return 1
        return super().world_size if self.roles is None else self.roles.role_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes and prints: the first that trains."""
        return self.global_rank == 0 and (self.roles is None or self.roles.trains)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A sampler splits over the role's ranks."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Join all processes, then part them."""
        super().setup_distributed()
        module = self.lightning_module
        if self.roles is not None or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        config = self.ranks_config
        self.roles = assign_roles(
            config.eval_ranks,
            timeout_seconds=config.timeout_seconds,
            dead_after_seconds=config.dead_after_seconds,
            gradients_timeout=self._timeout,
            host=self.cluster_environment.main_address if self.cluster_environment is not None else None,
        )
        self._world = dist.group.WORLD
        distributed_c10d._update_default_pg(self.roles.own)

    def teardown(self) -> None:
        """Make one world of both roles again, for what follows the fit."""
        super().teardown()
        if self.roles is not None:
            distributed_c10d._update_default_pg(self._world)
            self.roles = None

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the role's ranks; once for all, after the first process has prepared the data."""
        if self.roles is not None and args[:1] == ("pre_setup",):
            dist.barrier(self.roles.everyone)
        super().barrier(*args, **kwargs)

    def configure_ddp(self) -> None:
        """Only what trains needs to average gradients."""
        if self.roles is None or self.roles.trains:
            super().configure_ddp()

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Within, whoever asks finds one process that has all data to itself."""
        self._as_one_process = True
        try:
            yield
        finally:
            self._as_one_process = False


# ---- the loops ------------------------------------------------------------------------------------------------------


def replace_validation(trainer: pl.Trainer, hand_over: Callable[[], None]) -> None:
    """Have `hand_over` called, without gradients, where Lightning would validate in a fit."""
    val_loop: Any = trainer.fit_loop.epoch_loop.val_loop

    @torch.no_grad()
    def run() -> list[Any]:
        if not trainer.sanity_checking:
            hand_over()
            val_loop.batch_progress.is_last_batch = True  # what a checkpoint knows of a whole validation
        return []

    val_loop.run = run


def replace_training(trainer: pl.Trainer, serve: Callable[[], None]) -> None:
    """Have `serve` called in the place of the training loop."""
    fit_loop: Any = trainer.fit_loop
    fit_loop.run = serve


def put_back(trainer: pl.Trainer) -> None:
    """Give Lightning its own loops again, and the validation loaders all their batches."""
    val_loop: Any = trainer.fit_loop.epoch_loop.val_loop
    vars(trainer.fit_loop).pop("run", None)
    for name in ("run", "setup_data"):
        vars(val_loop).pop(name, None)
    for loader in val_loop._combined_loader.flattened if val_loop._combined_loader is not None else []:
        if isinstance(loader, DataLoader):
            _set_batch_sampler(loader, whole(loader.batch_sampler))


def validate_once(trainer: pl.Trainer, step: int, epoch: int) -> None:
    """Run Lightning's validation loop as in a fit that has come to this step, with the module's hooks alone."""
    fit_loop: Any = trainer.fit_loop
    fit_loop.epoch_progress.current.processed = fit_loop.epoch_progress.current.completed = epoch
    fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    here: Any = trainer
    callbacks, here.callbacks = here.callbacks, []
    here.validating = True
    try:
        fit_loop.epoch_loop.val_loop.run()
    finally:
        here.training = True
        here.callbacks = callbacks


def batches_between_validations(trainer: pl.Trainer) -> float:
    """Return the training batches from one validation to the next; infinite where Lightning doesn't know."""
    every_n_epochs, batches = trainer.check_val_every_n_epoch, vars(trainer).get("val_check_batch")
    if batches is None:  # validation by the clock
        return float("inf")
    if every_n_epochs is None or every_n_epochs == 1:
        return float(min(batches, trainer.num_training_batches) if every_n_epochs == 1 else batches)
    return float(trainer.num_training_batches * (every_n_epochs - 1) + batches)


# ---- the validation batches of one rank -----------------------------------------------------------------------------


def share_validation(trainer: pl.Trainer, strategy: EvaluationRanksStrategy) -> None:
    """Have this rank validate its share of the batches that one process would make, each whole and once."""
    val_loop: Any = trainer.fit_loop.epoch_loop.val_loop
    plain = val_loop.setup_data

    def setup_data() -> None:
        before = val_loop._combined_loader
        with strategy.as_one_process():
            plain()
        if val_loop._combined_loader is before or strategy.world_size == 1:
            return
        limits = list(val_loop._max_batches)
        loaders = val_loop._combined_loader.flattened
        mine = [share(known(n, loader), strategy.global_rank, strategy.world_size)
                for n, loader in zip(limits, loaders, strict=True)]  # fmt: skip
        val_loop._combined_loader.flattened = [only(loader, part) for loader, part in zip(loaders, mine, strict=True)]
        val_loop._max_batches = [len(part) for part in mine]

    val_loop.setup_data = setup_data


def known(batches: float, loader: Any) -> int:
    """Return a number of batches that must be finite.

    Raises:
        OptimizationError: it is not.
    """
    if batches == float("inf"):
        raise OptimizationError(
            f"evaluation_ranks: the validation loader ({type(loader).__name__}) has no length, so it can't be split "
            "over evaluation ranks; use eval_ranks=1, set limit_val_batches, or give it a length."
        )
    return int(batches)


def only(loader: Any, part: range) -> Any:
    """Return the loader with these batches alone. A DataLoader is changed in place, so that it loads no others."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        _set_batch_sampler(loader, _Part(whole(loader.batch_sampler), part))
        return loader
    return _Part(loader, part)


def whole(sampler: Any) -> Any:
    """Return what `only` took a part of; a sampler that it did not touch as it is."""
    return sampler._whole if isinstance(sampler, _Part) else sampler


def _set_batch_sampler(loader: Any, sampler: Any) -> None:
    object.__setattr__(loader, "batch_sampler", sampler)  # a DataLoader refuses another one, once it is made


class _Part:
    """Some consecutive items of an iterable, which is asked for everything else."""

    def __init__(self, whole: Any, part: range) -> None:
        self._whole, self._part = whole, part

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._whole), self._part.start, self._part.stop)

    def __len__(self) -> int:
        return len(self._part)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)
