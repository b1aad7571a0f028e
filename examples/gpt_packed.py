"""A small causal language model in plain Lightning on packed rows: `python examples/gpt_packed.py`, a minute on a CPU.

What packing asks of a model is in three places: positions that begin again in each sequence, attention that is told
where sequences end, and targets that don't cross those ends.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fasttrain.callbacks import SequencePackingDataModule, packed_attention
from fasttrain.callbacks.sequence_packing import mean_loss, next_tokens

WORDS, LONGEST, WIDTH, HEADS = 64, 64, 64, 4


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count on, by a step of their own, to a length of their own."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        length, first, step = (int(torch.randint(low, high, (), generator=random)) for low, high in
                               ((8, LONGEST + 1), (0, WORDS), (1, 8)))  # fmt: skip
        return {"input_ids": (first + step * torch.arange(length)) % WORDS}


class Texts(pl.LightningDataModule):
    """An ordinary data module; its batches' size is all that packing takes from the loader."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return samples of different lengths, which by itself would not make a batch."""
        return DataLoader(Counting(), batch_size=32)


class Block(nn.Module):
    """A layer of GPT's kind, on tokens in one long list."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
        """Return (tokens, width)."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)) for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )  # fmt: skip
        x = x + self.out(packed_attention(query, key, value, cu_seqlens, LONGEST, causal=True, rows=rows).flatten(1))
        return x + self.mlp(x)


class GPT(pl.LightningModule):
    """Predicts each sequence's next tokens."""

    fasttrain_packed_rows = True  # for `optimizations: {sequence_packing: {}}`, which asks

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over all tokens that have a next one."""
        tokens = batch["input_ids"]
        x = (self.words(tokens) + self.places(batch["position_ids"])).flatten(0, 1)
        for block in self.blocks:
            x = block(x, batch["cu_seqlens"], len(tokens))
        return mean_loss(self.head(x), next_tokens(tokens, batch["sequence_ids"]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def packed() -> SequencePackingDataModule:
    """Return the data in rows of 64 tokens that hold up to four sequences."""
    return SequencePackingDataModule(Texts(), max_length=LONGEST, max_sequences_per_row=4)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = pl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False)
    trainer.fit(GPT(), datamodule=packed())
    print(f"loss {float(trainer.callback_metrics['loss']):.3f}; it began at {torch.log(torch.tensor(WORDS)):.2f}")
