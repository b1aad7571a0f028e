"""What a BERT is made of; the defaults are MLPerf Training v2.0's BERT-large."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fasttrain.errors import ConfigError


@dataclass(frozen=True)
class BertConfig:
    """Sizes and choices of the model."""

    vocab_size: int = 30522
    """Words; the data's, unless set."""
    vocab_multiple: int = 8
    """Rows of the word embeddings are filled up to a multiple of this, as tensor cores like it."""
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    intermediate_size: int = 4096
    max_positions: int = 512
    token_types: int = 2
    gelu: Literal["tanh", "erf"] = "tanh"
    """The form of GELU: MLPerf's, or that of the checkpoints on the transformers library's hub."""
    layer_norm_eps: float = 1e-12
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_std: float = 0.02
    fused_qkv: bool = True
    """One product for query, key and value; the state dict is the same."""
    dense_sequence_output: bool = True
    """Words are predicted at masked places only; else at all of them, of which most are then not looked at."""
    attention: Literal["auto", "dense", "varlen", "flash_attn", "cudnn", "triton"] = "auto"
    """Backend, see `sequence_packing.packed_attention`."""
    weights: str | None = None
    """File of a BertForPreTraining's state dict to begin with: .pt, .bin, .ckpt or .safetensors."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"module.model.hidden_size is {self.hidden_size}, which {self.num_heads} heads can't share evenly; "
                "make it a multiple of num_heads."
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embeddings."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def activation(self) -> nn.Module:
        """Return GELU in the configured form."""
        return nn.GELU("tanh" if self.gelu == "tanh" else "none")
