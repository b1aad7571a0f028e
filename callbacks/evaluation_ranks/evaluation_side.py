"""The evaluation ranks' part: wait for weights, evaluate them together, and answer with the score."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from fasttrain.callbacks.evaluation_ranks.roles import Roles
from fasttrain.callbacks.evaluation_ranks.training_side import told
from fasttrain.callbacks.evaluation_ranks.weights import FlatWeights
from fasttrain.callbacks.scored_elsewhere.evaluation import NotScored, Tag
from fasttrain.callbacks.scored_elsewhere.process import ScoreFunction
from fasttrain.callbacks.scored_elsewhere.scorer import AsyncScorer
from fasttrain.errors import OptimizationError

Rows = Sequence[NDArray[Any]]


class EvaluationSide:
    """What each evaluation rank calls in the place of a training loop.

        side = EvaluationSide(roles, model, "my_project.metrics:score", ground_truth)
        side.serve(lambda tag: [detect(batch) for batch in my_share])

    The first evaluation rank has rows scored in a process of its own (`AsyncScorer`): whatever the scorer does to the
    interpreter, this one gives signs of life, and a scorer that dies is started once more.

    Args:
        roles: from `assign_roles`.
        module: whose weights are set before each evaluation.
        score: called as `score(ground_truth, rows)`, as `AsyncScorer` wants it.
        ground_truth: used on the first evaluation rank alone.
        timeout_seconds: after which a scoring counts as hung.
        threads: of the scorer; None is half of the usable cores.
    """

    def __init__(
        self,
        roles: Roles,
        module: nn.Module,
        score: ScoreFunction,
        ground_truth: Any,
        *,
        timeout_seconds: float = 1800.0,
        threads: int | None = None,
    ) -> None:
        self.roles = roles
        self._flat = FlatWeights(module)
        self._scorer: AsyncScorer | None = None
        if roles.role_rank == 0:
            self._scorer = AsyncScorer(
                score, ground_truth, timeout_seconds=timeout_seconds, niceness=0, threads=threads
            )

    def serve(self, evaluate: Callable[[Tag], Rows]) -> None:
        """Evaluate whatever is handed over, until the training ranks have finished.

        Args:
            evaluate: returns what this rank found with the module's weights of now. The ranks' rows are joined in the
                order of the ranks, so a rank that takes consecutive batches (`share`) keeps the order of one process.

        Raises:
            OptimizationError: a rank is gone, or failed; the weights don't fit; the rows can't be scored.
        """
        try:
            self._serve(evaluate)
        except BaseException as error:
            self.roles.board.tell_fault(told(error))
            raise
        finally:
            if self._scorer is not None:
                self._scorer.close()
            self.roles.board.close()

    def _serve(self, evaluate: Callable[[Tag], Rows]) -> None:
        board, training = self.roles.board, self.roles.training_ranks
        if board.wait("layout", training) != self._flat.layout:
            raise OptimizationError(
                "evaluation_ranks: the module's weights here have other names, shapes or dtypes than those of the "
                "first training rank; every rank must build the same module."
            )
        number = 1
        while (order := board.wait(f"order/{number}", training))["evaluate"]:
            tag = Tag(**order["evaluate"])
            self._receive()
            rows = self._joined(evaluate(tag))
            if self._scorer is not None:
                board.post(f"answer/{number}", self._scored(self._scorer, rows, tag))
            number += 1

    def _receive(self) -> None:
        dist.broadcast(self._flat.flat, group=self.roles.weights, group_src=0)
        self._flat.give()

    def _joined(self, rows: Rows) -> Rows:
        """Return all ranks' rows on the first evaluation rank, in the order of the ranks; none on the others."""
        if self.roles.evaluation == 1:
            return rows
        parts: list[Any] | None = [None] * self.roles.evaluation if self.roles.role_rank == 0 else None
        try:
            dist.gather_object(list(rows), parts, group=self.roles.own_on_host, group_dst=0)
        except RuntimeError as error:
            raise OptimizationError(
                f"evaluation_ranks: an evaluation rank ended, or was stuck, while detections were gathered "
                f"({' '.join(str(error).split())[:200]})."
            ) from error
        return [part for of_rank in parts or [] for part in of_rank]

    def _scored(self, scorer: AsyncScorer, rows: Rows, tag: Tag) -> dict[str, Any]:
        scorer.submit(rows, tag)
        while not (outcomes := scorer.poll()):
            self.roles.board.look(self.roles.training_ranks)
            time.sleep(0.005)
        (outcome,) = outcomes
        if isinstance(outcome, NotScored):
            raise OptimizationError(
                f"evaluation_ranks: {tag} could not be scored: {outcome.faults[-1]}, at the second attempt too."
            )
        return {"scores": outcome.scores, "seconds": outcome.seconds, "faults": list(outcome.faults)}
