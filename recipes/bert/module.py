"""BERT's pre-training as a LightningModule: two losses, optimizer and schedule, and the accuracy of masked words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from fasttrain.callbacks.sequence_packing import IGNORED, mean_loss, over_ranks
from fasttrain.evaluation import EvaluateEvery
from fasttrain.hyperparameters import config_of
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.model import BertForPreTraining, PreTrainingOutput
from fasttrain.recipes.bert.optimizer import OptimizerConfig, make_optimizer
from fasttrain.recipes.bert.pretrained import load_weights

Batch = Mapping[str, Any]
WORDS, RELATION = "masked_lm_ids", "next_sentence_label"


@dataclass(frozen=True)
class TrainingConfig:
    """The `module` section of a BERT recipe."""

    model: BertConfig = field(default_factory=BertConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluate_every_samples: int | None = None
    """Sequences between two evaluations, in place of the Trainer's intervals; MLPerf's are `bert_interval` of
    `fasttrain.mlperf.projection`."""


class BertTraining(pl.LightningModule):
    """Trains and scores BERT on padded or packed rows (see `sequence_packing.collate_rows`).

    Logs in training `loss`, `mlm_loss`, `nsp_loss` and `lr`; in validation `mlm_accuracy`, `nsp_accuracy` and
    `val_mlm_loss`.
    """

    fasttrain_packed_rows = True

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config = config_of(TrainingConfig, config)
        self.save_hyperparameters({"config": asdict(config)})
        self.model = BertForPreTraining(config.model)
        if config.model.weights is not None:
            load_weights(self.model, config.model.weights)
        self._scores: Tensor | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the sum of both losses. Nothing in here waits for the device but Lightning's logging."""
        words, relation = self.losses(self.outputs(batch), batch)
        loss = words + relation
        self.log_dict({"loss": loss.detach(), "mlm_loss": words.detach(), "nsp_loss": relation.detach()})
        return loss

    def outputs(self, batch: Batch) -> PreTrainingOutput:
        """Return the logits at the masked places, and for each sequence."""
        output: PreTrainingOutput = self.model(
            batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            position_ids=batch["position_ids"],
            cu_seqlens=batch["cu_seqlens"],
            sequence_starts=batch["sequence_starts"],
            masked_lm_positions=batch["masked_lm_positions"],
        )
        return output

    def losses(self, output: PreTrainingOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the means over masked words and over sequences: of the whole step, where the batch says how many."""
        return (
            mean_loss(output.prediction_logits, batch[WORDS], _total(batch, WORDS)),
            mean_loss(output.seq_relationship_logits, batch[RELATION], _total(batch, RELATION)),
        )

    def samples_in(self, batch: Batch) -> int:
        """Return the sequences of a batch, by its shapes: rows of one each, or all in a row without padding."""
        return len(batch["sequence_starts"])

    def on_fit_start(self) -> None:
        """Make what evaluations count in: a captured step takes what hangs on the module as given."""
        self._scores = self._none_counted()

    def on_validation_epoch_start(self) -> None:
        """Begin to count."""
        if self._scores is None:  # there is no fit
            self._scores = self._none_counted()
        self._scores.zero_()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count, on the device: words and relations that are right, all of them, and the words' summed loss."""
        assert self._scores is not None
        output = self.outputs(batch)
        words, relations = batch[WORDS], batch[RELATION]
        summed = mean_loss(output.prediction_logits, words, torch.ones((), device=self.device))
        self._scores += torch.stack(
            [
                *_right_of(output.prediction_logits, words),
                *_right_of(output.seq_relationship_logits, relations),
                summed.double(),
            ]
        )

    def on_validation_epoch_end(self) -> None:
        """Log the scores over all ranks' sequences."""
        assert self._scores is not None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self._scores)
        right, words, right_relations, relations, loss = self._scores.cpu()
        self.log_dict(
            {
                "mlm_accuracy": right / words.clamp(min=1),
                "nsp_accuracy": right_relations / relations.clamp(min=1),
                "val_mlm_loss": loss / words.clamp(min=1),
            }
        )

    def _none_counted(self) -> Tensor:
        return torch.zeros(5, dtype=torch.float64, device=self.device)

    def configure_optimizers(self) -> Any:
        """Return the optimizer over all parameters, and the schedule by step."""
        return make_optimizer(self, self.config.optimizer, self.trainer.estimated_stepping_batches)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return what evaluates by samples, if that is asked for."""
        every = self.config.evaluate_every_samples
        return [EvaluateEvery(every)] if every is not None else []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the learning rate: a host value, or the device's where the step is captured."""
        self.log("lr", torch.as_tensor(optimizer.param_groups[0]["lr"]))


def _total(batch: Batch, name: str) -> Tensor:
    totals = batch.get("totals")
    return over_ranks(totals[name] if totals is not None else (batch[name] != IGNORED).sum().float())


def _right_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    there = targets != IGNORED
    return ((logits.argmax(dim=-1) == targets) & there).sum().double(), there.sum().double()
