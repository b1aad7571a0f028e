"""BERT with its two pre-training heads, under the names and shapes of transformers' BertForPreTraining.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", arXiv 1810.04805, in the form of MLPerf
Training v2.0.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fasttrain.callbacks.sequence_packing import attention_backend, mask_for
from fasttrain.errors import DataError
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.layers import BertEmbeddings, BertLayer, Sequences


class PreTrainingOutput(NamedTuple):
    """Logits of the two heads."""

    prediction_logits: Tensor
    """(rows, places, padded vocabulary)."""
    seq_relationship_logits: Tensor
    """(sequences, 2), or in the shape of `sequence_starts`; 0: the second sentence follows the first."""


class BertEncoder(nn.Module):
    """The layers, one behind another."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Return (tokens, hidden)."""
        for layer in self.layer:
            hidden = layer(hidden, sequences)
        return hidden


class BertPooler(nn.Module):
    """A vector for each sequence, from its first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """Return (..., hidden)."""
        return torch.tanh(self.dense(first))


class BertModel(nn.Module):
    """Embeddings, encoder and pooler."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the last layer's (rows * length, hidden), for three (rows, length) and the sequences' offsets."""
        rows, length = input_ids.shape
        words = self.embeddings.word_embeddings.weight
        asked = self.config.attention
        dtype = _dtype_of_products(words)
        backend = attention_backend(words.device, dtype) if asked == "auto" else asked
        mask = mask_for(backend, cu_seqlens, rows, length, dtype)
        hidden = self.embeddings(input_ids.flatten(), token_type_ids.flatten(), position_ids.flatten())
        encoded: Tensor = self.encoder(
            hidden, Sequences(cu_seqlens, rows, min(length, self.config.max_positions), backend, mask)
        )
        return encoded


class PredictionTransform(nn.Module):
    """What comes before words are predicted: a linear layer, GELU and a normalization."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = config.activation()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., hidden)."""
        transformed: Tensor = self.LayerNorm(self.transform_act_fn(self.dense(hidden)))
        return transformed


class Predictions(nn.Module):
    """Logits over the vocabulary, by the word embeddings themselves and a bias."""

    def __init__(self, config: BertConfig, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.padded_vocab_size)
        self.decoder.weight = words.weight
        self.bias = self.decoder.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., padded vocabulary)."""
        logits: Tensor = self.decoder(self.transform(hidden))
        return logits


class PreTrainingHeads(nn.Module):
    """The heads for masked words and for the relation of two sentences."""

    def __init__(self, config: BertConfig, words: nn.Embedding) -> None:
        super().__init__()
        self.predictions = Predictions(config, words)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertForPreTraining(nn.Module):
    """BERT with its heads, on padded or packed rows."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.cls = PreTrainingHeads(config, self.bert.embeddings.word_embeddings)
        self.apply(self._initialize)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        sequence_starts: Tensor | None = None,
        masked_lm_positions: Tensor | None = None,
    ) -> PreTrainingOutput:
        """Return the logits of both heads.

        Args:
            input_ids: (rows, length).
            attention_mask: (rows, length), 1 for tokens and 0 for the padding behind them; for a sequence in each row,
                where there is no `cu_seqlens`. Without both, every row is a full sequence.
            token_type_ids: (rows, length) segments; zeros where there are none.
            position_ids: (rows, length), smaller than the model's positions; None counts from each row's begin.
            cu_seqlens: offsets of the flattened rows' sequences, see `sequence_packing.collate_rows`.
            sequence_starts: places of the sequences' first tokens in the flattened rows, in any shape; None is a
                sequence for each row.
            masked_lm_positions: (rows, places) in each row where words are predicted; None predicts at all.

        Raises:
            DataError: rows are longer than the model has positions, and no positions are given.
        """
        rows, length = input_ids.shape
        if position_ids is None and length > self.config.max_positions:
            raise DataError(
                f"rows have {length} tokens, and the model has {self.config.max_positions} positions; lower "
                "data.max_length, or raise module.model.max_positions."
            )
        places = torch.arange(length, device=input_ids.device)
        token_type_ids = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        position_ids = places.expand(rows, length) if position_ids is None else position_ids
        row_starts = torch.arange(rows, device=input_ids.device) * length
        if cu_seqlens is None:
            cu_seqlens = offsets_of_rows(row_starts, length, attention_mask)
        hidden = self.bert(input_ids, token_type_ids, position_ids, cu_seqlens)
        starts = row_starts if sequence_starts is None else sequence_starts
        # index_select: the backward of an index in brackets sorts all indices.
        pooled = self.bert.pooler(hidden.index_select(0, starts.flatten()))
        related = self.cls.seq_relationship(pooled).unflatten(0, starts.shape)
        if masked_lm_positions is None:
            return PreTrainingOutput(self.cls.predictions(hidden).unflatten(0, (rows, length)), related)
        wanted = (row_starts[:, None] + masked_lm_positions).flatten()
        predicted = hidden if not self.config.dense_sequence_output else hidden.index_select(0, wanted)
        logits = self.cls.predictions(predicted)
        if not self.config.dense_sequence_output:
            logits = logits.index_select(0, wanted)
        return PreTrainingOutput(logits.unflatten(0, (rows, -1)), related)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def offsets_of_rows(row_starts: Tensor, length: int, attention_mask: Tensor | None) -> Tensor:
    """Return (2 * rows + 1,) int32 offsets: of each row its sequence, and its padding as another one.

    Args:
        row_starts: (rows,) places of the rows' first tokens.
        length: tokens in a row.
        attention_mask: (rows, length), 1 for tokens, which come before padding; None is no padding.
    """
    tokens = torch.full_like(row_starts, length) if attention_mask is None else attention_mask.sum(dim=1)
    bounds = torch.stack([row_starts + tokens, row_starts + length], dim=1).flatten()
    return torch.cat([bounds.new_zeros(1), bounds]).to(torch.int32)


def _dtype_of_products(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
