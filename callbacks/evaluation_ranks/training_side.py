"""The training ranks' part: hand over weights, go on at once, and take the score where it is due."""

import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fasttrain.callbacks.evaluation_ranks.roles import Roles
from fasttrain.callbacks.evaluation_ranks.schedule import WaitSchedule
from fasttrain.callbacks.evaluation_ranks.weights import FlatWeights
from fasttrain.callbacks.scored_elsewhere.evaluation import Scored, Tag
from fasttrain.errors import OptimizationError


class TrainingSide:
    """What each training rank calls in its loop; all of them at the same batches.

        side = TrainingSide(roles, model, WaitSchedule(0, 16, 350))
        for epoch in range(epochs):
            for batch in loader:
                train(batch)
                if scored := side.after_batch(): ...     # equal on all training ranks
            if scored := side.collect(): ...             # what is still out, before the next
            side.hand_over(Tag(step, epoch), len(loader))
        if scored := side.collect(): ...
        side.finish()

    Args:
        roles: from `assign_roles`.
        module: whose weights are evaluated. Never changed.
        schedule: when to wait for a score.
        timeout_seconds: after which an evaluation counts as hung.
    """

    def __init__(
        self, roles: Roles, module: nn.Module, schedule: WaitSchedule, timeout_seconds: float = 1800.0
    ) -> None:
        self.roles, self.schedule, self.timeout_seconds = roles, schedule, timeout_seconds
        self.pending: Tag | None = None
        """The evaluation whose score is still to come; at most one."""
        self.waited_seconds = 0.0
        """Spent on waiting for scores."""
        self.handing_over_seconds = 0.0
        """Of this thread, spent on handing over; on a GPU the copies themselves go on beside it."""
        self._flat = FlatWeights(module) if roles.rank == 0 else None
        if self._flat is not None:
            roles.board.post("layout", self._flat.layout)
        device = self._flat.flat.device if self._flat is not None else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sending: Any = None
        self._number = self._lapsed = 0
        self._batches_between = float("inf")
        self._begun = 0.0

    def hand_over(self, tag: Tag, batches_between: float = float("inf")) -> None:
        """Have the module's weights of now evaluated. Returns at once; training may change the weights.

        Args:
            tag: what the score belongs to.
            batches_between: from this evaluation to the next, as far as that is known.

        Raises:
            OptimizationError: a rank is gone.
        """
        assert self.pending is None, "collect what is out first"
        begun = self._begun = time.perf_counter()
        self._number += 1
        if self._flat is not None:
            self.roles.board.look(self.roles.evaluation_ranks)
            self._finish_sending()
            self._flat.take()
            # Told first: with NCCL the broadcast occupies the device until the others take part.
            self.roles.board.post(f"order/{self._number}", {"evaluate": asdict(tag)})
            self._send(self._flat)
        self.pending, self._lapsed, self._batches_between = tag, 0, batches_between
        self.handing_over_seconds += time.perf_counter() - begun

    def after_batch(self) -> Scored | None:
        """Count a batch; return the score if now is the time to wait for it.

        Raises:
            OptimizationError: as `collect`.
        """
        self._lapsed += 1
        # Lightning counts epochs from 0, the schedule those that were trained.
        if self.pending and self.schedule.is_due(self.pending.epoch + 1, self._lapsed, self._batches_between):
            return self.collect()
        self.roles.board.look(self.roles.evaluation_ranks)
        return None

    def collect(self) -> Scored | None:
        """Wait for the score that is still to come, if one is. All training ranks get the same.

        Raises:
            OptimizationError: an evaluation rank failed, is gone, or did not answer in time.
        """
        tag, self.pending = self.pending, None
        if tag is None:
            return None
        begun = time.perf_counter()
        answer = self._told_to_all(self._wait_for_answer(tag) if self.roles.rank == 0 else None)
        now = time.perf_counter()
        self.waited_seconds += now - begun
        if "failure" in answer:
            raise OptimizationError(answer["failure"])
        return Scored(tag, answer["scores"], answer["seconds"], self._begun, now, tuple(answer["faults"]))

    def finish(self) -> None:
        """Let the evaluation ranks end. Nothing may be out."""
        assert self.pending is None, "collect what is out first"
        if self.roles.rank == 0:
            self._finish_sending()
            self.roles.board.post(f"order/{self._number + 1}", {"evaluate": None})
            self.roles.board.wait_for_end(self.roles.evaluation_ranks, 60)
        self.roles.board.close()

    def abandon(self, why: BaseException) -> None:
        """Have all other ranks end with this error. Never raises."""
        board = self.roles.board
        board.tell_fault(told(why))
        if self.roles.rank == 0:  # which keeps the board: the others need the time for a look
            board.wait_for_end(range(1, self.roles.training + self.roles.evaluation), 2 * board.look_every_seconds)
        board.close()

    def _send(self, flat: FlatWeights) -> None:
        """Start to broadcast the copy of the weights; on a GPU on a stream of its own, behind the copying."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(flat.flat.device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._sending = dist.broadcast(flat.flat, group=self.roles.weights, group_src=0, async_op=True)

    def _finish_sending(self) -> None:
        if self._sending is not None:
            self._sending.wait()
            self._sending = None

    def _wait_for_answer(self, tag: Tag) -> dict[str, Any]:
        """Return the answer, or a failure: the first training rank must not leave the others waiting."""
        left = self.timeout_seconds - (time.perf_counter() - self._begun)
        try:
            answer: dict[str, Any] | None = self.roles.board.wait(
                f"answer/{self._number}", self.roles.evaluation_ranks, left
            )
        except OptimizationError as error:
            return {"failure": str(error)}
        if answer is None:
            return {
                "failure": f"evaluation_ranks: {tag} has no score {self.timeout_seconds:g} s after its weights were "
                "handed over, so its evaluation counts as hung; a longer one needs a larger timeout_seconds."
            }
        return answer

    def _told_to_all(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        told = [answer]
        if self.roles.training > 1:
            try:
                dist.broadcast_object_list(told, group=self.roles.own_on_host, group_src=0)
            except RuntimeError as error:
                raise OptimizationError(
                    "evaluation_ranks: the first training rank ended while the others waited for a score."
                ) from error
        (result,) = told
        assert result is not None
        return result


def told(error: BaseException) -> str:
    """Return an error as the other ranks are told of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400].removesuffix(": ")
