"""The parts of BERT's encoder, under the names that the transformers library gives them.

Tokens of a batch are one long list, (tokens, hidden): rows behind one another. Which of them may look at which is said
by `Sequences`, so that padded rows and packed rows take the same way.
"""

from typing import NamedTuple

from torch import Tensor, nn

from fasttrain.callbacks.joined_linear import JoinedLinear
from fasttrain.callbacks.sequence_packing import AttentionBackend, AttentionMask, packed_attention
from fasttrain.recipes.bert.config import BertConfig


class Sequences(NamedTuple):
    """Where the sequences of a batch begin and end."""

    cu_seqlens: Tensor
    """(sequences + 1,) int32 offsets into the flattened rows."""
    rows: int
    length: int
    """Tokens of the longest sequence, at most."""
    backend: AttentionBackend
    mask: AttentionMask | None
    """What `sequence_packing.mask_for` makes, the same in all layers."""


class BertEmbeddings(nn.Module):
    """Sum of a token's word, position and segment, normalized."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.token_types, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return (tokens, hidden) for three (tokens,)."""
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        normalized: Tensor = self.dropout(self.LayerNorm(embedded + self.position_embeddings(position_ids)))
        return normalized


class BertSelfAttention(nn.Module):
    """Attention within each sequence.

    With `fused_qkv` the three projections are one product.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.num_heads, config.attention_dropout
        self.joined = JoinedLinear("query", "key", "value") if config.fused_qkv else None
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Return (tokens, hidden)."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self._projected(hidden))
        attended = packed_attention(
            query,
            key,
            value,
            sequences.cu_seqlens,
            sequences.length,
            dropout=self.dropout if self.training else 0.0,
            rows=sequences.rows,
            backend=sequences.backend,
            mask=sequences.mask,
        )
        return attended.flatten(-2)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, ...]:
        parts = (self.query, self.key, self.value)
        return tuple(part(hidden) for part in parts) if self.joined is None else self.joined(hidden, *parts)


class BertSelfOutput(nn.Module):
    """What follows attention: a linear layer, dropout, the residual and a normalization."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Return (tokens, hidden); `input_tensor` is the residual."""
        normalized: Tensor = self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)
        return normalized


class BertAttention(nn.Module):
    """Attention with its residual."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Return (tokens, hidden)."""
        attended: Tensor = self.output(self.self(hidden, sequences), hidden)
        return attended


class BertIntermediate(nn.Module):
    """The feed-forward block's first linear layer, and GELU."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = config.activation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (tokens, intermediate)."""
        activated: Tensor = self.intermediate_act_fn(self.dense(hidden_states))
        return activated


class BertOutput(nn.Module):
    """The feed-forward block's second linear layer, dropout, the residual and a normalization."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Return (tokens, hidden); `input_tensor` is the residual."""
        normalized: Tensor = self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)
        return normalized


class BertLayer(nn.Module):
    """Attention and the feed-forward block. `feed_forward_chunk` is where `gemm_gelu` looks for the latter."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Return (tokens, hidden)."""
        return self.feed_forward_chunk(self.attention(hidden, sequences))

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Return the feed-forward block's result, (tokens, hidden)."""
        output: Tensor = self.output(self.intermediate(attention_output), attention_output)
        return output
