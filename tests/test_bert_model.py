"""BERT is the transformers library's, and packed rows are the same as padded ones: loss and every gradient."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttrain.callbacks.gemm_gelu.sites import FeedForwardPatches
from fasttrain.callbacks.layer_norm_dropout.sites import LayerNormDropoutPatches
from fasttrain.errors import ConfigError, DataError
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.model import BertForPreTraining
from fasttrain.recipes.bert.pretrained import load_weights

SIZES: dict[str, Any] = {
    "vocab_size": 38, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "max_positions": 12,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def bert(**options: Any) -> BertForPreTraining:
    torch.manual_seed(0)
    return BertForPreTraining(BertConfig(**{**SIZES, **options})).double()


def with_waves(model: nn.Module) -> nn.Module:
    """Give every weight a value that anybody can compute again: waves over its elements, another one for each name."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(dict(model.named_parameters()).items())):
            waves = torch.sin(1.7 * torch.arange(parameter.numel(), dtype=torch.float64) ** 1.1 + number)
            parameter.copy_((float("LayerNorm.weight" in name) + 0.4 * waves).view_as(parameter))
    return model


def rows() -> dict[str, Tensor]:
    tokens = torch.arange(3 * 12).view(3, 12) * 7 % 38
    mask = (torch.arange(12) < torch.tensor([12, 7, 4])[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "token_type_ids": (torch.arange(12) > 3).long() * mask}


def losses(words: Tensor, relations: Tensor) -> Tensor:
    labels = torch.full((3, 12), -100)
    labels[0, [2, 9]], labels[1, 5], labels[2, 0] = torch.tensor([3, 30]), 17, 8
    by_word = nn.functional.cross_entropy(words.flatten(0, 1), labels.flatten())
    return by_word + nn.functional.cross_entropy(relations, torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_logits_and_gradients_are_transformers(gelu: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=38, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        hidden_act={"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[gelu],
    )  # fmt: skip
    theirs = with_waves(transformers.BertForPreTraining(config).double())
    ours = bert(gelu=gelu, vocab_multiple=1)
    ours.load_state_dict(theirs.state_dict())
    assert set(dict(ours.named_parameters())) == set(dict(theirs.named_parameters()))
    batch, there = rows(), rows()["attention_mask"].bool()
    wanted, found = theirs(**batch), ours(**batch)
    torch.testing.assert_close(found[0][there], wanted[0][there], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-12)
    for output in (wanted, found):
        losses(output[0], output[1]).backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=0, atol=1e-11)
    theirs.load_state_dict(ours.state_dict())


# By transformers 5.24.0's BertForPreTraining (hidden_act gelu, gelu_pytorch_tanh), float64, with the same weights.
BY_TRANSFORMERS = {
    "erf": {
        "loss": 4.67513647765,
        "all": 9.0747440148,
        "bert.embeddings.word_embeddings.weight": 2.53168059627,
        "bert.encoder.layer.0.attention.self.query.weight": 1.51293341695,
        "bert.encoder.layer.1.attention.output.LayerNorm.bias": 0.741260865719,
        "bert.pooler.dense.bias": 0.12290024731,
        "cls.predictions.bias": 0.480608739345,
    },
    "tanh": {
        "loss": 4.67538981151,
        "all": 9.07869832068,
        "bert.embeddings.word_embeddings.weight": 2.53235074383,
        "bert.encoder.layer.0.attention.self.query.weight": 1.51419360742,
        "bert.encoder.layer.1.attention.output.LayerNorm.bias": 0.741352606711,
        "bert.pooler.dense.bias": 0.122899384936,
        "cls.predictions.bias": 0.480611000464,
    },
}


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
@pytest.mark.parametrize("options", [{}, {"fused_qkv": False}, {"dense_sequence_output": False}])
def test_loss_and_gradients_are_those_that_transformers_gave(gelu: str, options: dict[str, Any]) -> None:
    model = with_waves(bert(gelu=gelu, vocab_multiple=1, **options))
    loss = losses(*model(**rows()))
    loss.backward()
    norms = {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}
    found = {"loss": float(loss.detach()), "all": math.sqrt(sum(norm**2 for norm in norms.values()))}
    found |= {name: norms[name] for name in BY_TRANSFORMERS[gelu] if name in norms}
    assert found == pytest.approx(BY_TRANSFORMERS[gelu], rel=1e-9)


def test_bert_large_has_mlperfs_398_tensors() -> None:
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig())
    assert len(list(model.parameters())) == 398
    assert sum(parameter.numel() for parameter in model.parameters()) == 336_226_108 + 6 * 1025
    assert model.bert.embeddings.word_embeddings.weight.shape == (30528, 1024)


def test_words_are_predicted_at_the_masked_places() -> None:
    places = torch.tensor([[1, 9, 0], [2, 0, 0], [3, 3, 1]])
    for options in ({}, {"dense_sequence_output": False}):
        model = bert(**options)
        every = model(**rows())[0]
        some = model(**rows(), masked_lm_positions=places)[0]
        torch.testing.assert_close(some, every[torch.arange(3)[:, None], places], rtol=0, atol=1e-14)


def test_rooms_find_their_places() -> None:
    model = nn.Sequential(bert())
    assert [site.path for site in FeedForwardPatches().sites(model)] == [
        "0.bert.encoder.layer.0",
        "0.bert.encoder.layer.1",
    ]
    of_norms = {site.path.removeprefix("0.bert.encoder.") for site in LayerNormDropoutPatches().sites(model)}
    assert of_norms == {f"layer.{i}.{part}" for i in range(2) for part in ("attention.output", "output")}


def test_rows_longer_than_the_model() -> None:
    with pytest.raises(DataError, match=r"^rows have 13 tokens, and the model has 12 positions; lower data\.max_leng"):
        bert()(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"^module\.model\.hidden_size is 16, which 3 heads can't share evenly; "):
        bert(num_heads=3)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_checkpoint_of_a_smaller_vocabulary(tmp_path: Path, prefix: str) -> None:
    small, large = with_waves(bert(vocab_multiple=1)), bert()
    state = {prefix + name.replace("LayerNorm.weight", "LayerNorm.gamma"): v for name, v in small.state_dict().items()}
    del state[f"{prefix}bert.pooler.dense.weight"]
    torch.save({"state_dict": state} if prefix else state, tmp_path / "bert.pt")
    large.bert.pooler.load_state_dict(small.bert.pooler.state_dict())  # type: ignore[attr-defined]
    assert load_weights(large, tmp_path / "bert.pt") == ["bert.pooler.dense.weight"]
    wanted, found = small(**rows()), large(**rows())
    torch.testing.assert_close(found[0][..., :38], wanted[0])
    torch.testing.assert_close(losses(*found), losses(*wanted))


def test_checkpoints_that_cant_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^module\.model\.weights: .*none\.pt does not exist\.$"):
        load_weights(bert(), tmp_path / "none.pt")
    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(DataError, match=r"has no 'bert\.embeddings\.word_embeddings\.weight', so it is no BERT under "):
        load_weights(bert(), tmp_path / "other.pt")
    torch.save(bert(hidden_size=8).state_dict(), tmp_path / "narrow.pt")
    with pytest.raises(DataError, match=r"word_embeddings\.weight' is \[40, 8\], and the model's is \[40, 16\]; set "):
        load_weights(bert(), tmp_path / "narrow.pt")
