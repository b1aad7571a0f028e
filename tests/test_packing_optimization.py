"""The plan's door to packing: it applies, or refuses with a reason."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from packed_sequences import CPU, MOST, Data, Stream, Texts, Trained, sequence, tokens_in
from torch import Tensor

from fasttrain.callbacks.sequence_packing import (
    SequencePackingConfig,
    SequencePackingDataModule,
    SequencePackingOptimization,
)
from fasttrain.optimization import Applies, Context, Refuses


def optimization(**options: Any) -> SequencePackingOptimization:
    values = {"max_length": MOST, "lists": ["masked_lm_ids"], "positions": ["masked_lm_positions"], "list_capacity": 12}
    return SequencePackingOptimization(SequencePackingConfig(**{**values, **options}))


def checked(module: pl.LightningModule, data: pl.LightningDataModule | None = None, **options: Any) -> Any:
    return optimization(**options).check(Context(module, data or Data(), CPU))


def test_the_plan_says_what_it_will_do() -> None:
    asked = optimization(seed=3)
    verdict = asked.check(context := Context(Trained(), Data(), CPU))
    assert isinstance(verdict, Applies), verdict
    assert verdict.note.startswith("41 sequences in ")
    assert "expected speed-up 1.8" in verdict.note
    data = asked.attach(context).data
    assert isinstance(data, SequencePackingDataModule)
    (change,) = asked.applied()
    assert (change.path, change.count) == ("data.train_dataloader", data.packed.plan.rows)
    assert len(list(tokens_in(data.train_dataloader()))) == 41


def test_what_was_cut_off_is_told() -> None:
    asked = optimization(too_long="truncate")
    assert isinstance(asked.check(Context(Trained(), Data(Texts(longest=20)), CPU)), Applies)
    assert [(change.what, change.count) for change in asked.applied()][1:] == [("sequences cut off", 8)]


class Silent(Trained):
    fasttrain_packed_rows = False


class Leaky(Trained):
    """Forgets where sequences begin and end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = len(batch["input_ids"])
        return super().training_step(
            {**batch, "cu_seqlens": torch.arange(rows + 1, dtype=torch.int32) * MOST}, batch_idx
        )


class Running(Trained):
    """Goes on counting positions from one sequence to the next."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positions = torch.arange(MOST).expand_as(batch["input_ids"])
        return super().training_step({**batch, "position_ids": positions}, batch_idx)


class Asking(Trained):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.max_epochs  # type: ignore[operator]


@pytest.mark.parametrize(
    ("module", "data", "options", "message"),
    [
        (Silent, None, {}, "Silent does not say that it keeps the sequences of a row apart; "),
        (Leaky, None, {}, "Leaky does not treat packed sequences as it treats each in a row of its own: loss "),
        (Running, None, {}, "Running does not treat packed sequences as it treats each in a row of its own: "),
        (Asking, None, {}, "the step of Asking could not be tried on packed rows outside of a Trainer (RuntimeError: "),
        (Trained, Data(Texts(longest=20)), {}, "8 of 41 sequences are longer than a row of 16 tokens, "),
        (
            Trained,
            Data([sequence(15, i) for i in range(9)]),
            {},
            "9 sequences fill 93.8% of rows of 16 tokens by thems",
        ),
        (Trained, Data(Stream(), shuffle=False), {}, "Stream is an iterable data set, "),
        (Trained, pl.LightningDataModule(), {}, "LightningDataModule gives no training loader to plan with before the"),
        (Trained, None, {"length_key": "ids"}, "sample 0 has no 'ids', whose length says how many tokens it has; "),
    ],
)
def test_it_refuses_with_a_reason(module: Any, data: Any, options: dict[str, Any], message: str) -> None:
    verdict = checked(module(), data, **options)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith(message)
    assert not verdict.reason.endswith(".")


def test_a_trial_may_be_left_out_and_changes_nothing() -> None:
    assert isinstance(checked(Leaky(), trial=False), Applies)
    module = Trained()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.random.get_rng_state()
    assert isinstance(checked(module), Applies)
    assert torch.equal(state, torch.random.get_rng_state())
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
