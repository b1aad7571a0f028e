"""When training stands still for a score: late, where the weights can't be good enough yet, and soon after that."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WaitSchedule:
    """How many batches training goes on after it has handed over weights, before it waits for their score.

    A model does not converge before its last drop of the learning rate. Up to there a score decides nothing, and may
    take until the next evaluation; from there each batch that is trained after a good evaluation is in vain.

    Source: NVIDIA's MLPerf Training v2.0 submission of Mask R-CNN, `tools/train_mlperf.py`, whose
    (early_wait, early_epochs, late_wait) was (0, 16, 350) on 48 nodes.
    """

    early_wait: int = 0
    """Batches. 0 or less, or as many as there are between two evaluations: as late as possible."""
    early_epochs: int = 0
    """The last epoch, counted from 1, to which `early_wait` applies."""
    late_wait: int = 0
    """Batches, in the epochs after that."""

    def wait(self, epoch: int, batches_between: float) -> float:
        """Return after how many batches to wait.

        Args:
            epoch: whose weights were handed over, counted from 1.
            batches_between: from one evaluation to the next; infinite where that is not known.
        """
        asked = self.early_wait if epoch <= self.early_epochs else self.late_wait
        return asked if 0 < asked < batches_between else batches_between - 1

    def is_due(self, epoch: int, lapsed: int, batches_between: float) -> bool:
        """Whether to wait now, `lapsed` batches after the weights were handed over."""
        return lapsed >= self.wait(epoch, batches_between)


def share(count: int, rank: int, ranks: int) -> range:
    """Return the batches of an evaluation that are one rank's: consecutive, so that all in order are the whole."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)
