"""The example of a causal model on packed rows: its loss and gradients are those of its sequences one by one."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).parent.parent / "examples" / "gpt_packed.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("gpt_packed", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_packed_rows_train_as_their_sequences_do() -> None:
    gpt = example()
    torch.manual_seed(0)
    model = gpt.GPT().double()
    data = gpt.packed()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["num_sequences"] > len(batch["input_ids"]), "rows hold several"
    loss = model.loss(batch)
    found = torch.autograd.grad(loss, list(model.parameters()))

    total, targets = torch.zeros((), dtype=torch.float64), 0
    for row, ids in zip(batch["input_ids"], batch["sequence_ids"], strict=True):
        for number in range(1, int(ids.max()) + 1):
            tokens = row[ids == number][None]
            length = tokens.shape[1]
            alone = {
                "input_ids": tokens,
                "position_ids": torch.arange(length)[None],
                "sequence_ids": torch.ones(1, length, dtype=torch.int32),
                "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
            }
            total = total + model.loss(alone) * (length - 1)
            targets += length - 1
    wanted = torch.autograd.grad(total / targets, list(model.parameters()))
    torch.testing.assert_close(loss, total / targets, rtol=1e-10, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
