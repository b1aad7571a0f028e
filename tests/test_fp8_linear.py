"""FP8 products: the cast against PyTorch's operators, layers against rounded operands, scales from step to step."""

import copy
import pickle
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from everything import Data, Module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear
from torch.utils.data import DataLoader, TensorDataset

from fasttrain.callbacks import FP8LinearOptimization, FP8Linears
from fasttrain.callbacks.fp8_linear import (
    FP8JoinedLinear,
    FP8LinearConfig,
    FP8Patches,
    Scales,
    Scaling,
    fp8_feed_forward,
    fp8_linear,
    in_fp8,
    in_torch,
    in_triton,
    no_scales,
)
from fasttrain.callbacks.fp8_linear.cast import Cast, Request
from fasttrain.callbacks.fp8_linear.in_triton import Tiling
from fasttrain.callbacks.fp8_linear.modules import HasScales
from fasttrain.callbacks.fp8_linear.reference import (
    ROUNDING,
    TOLERANCE,
    quantized,
    reference,
    reference_feed_forward,
    reference_gradients,
)
from fasttrain.callbacks.layer_norm_dropout.sites import LayerNormDropoutPatches
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError, OptimizationError
from fasttrain.optimization import Applies, Context, Refuses
from fasttrain.patches import PatchSurgery
from fasttrain.recipes.bert.config import BertConfig
from fasttrain.recipes.bert.model import BertForPreTraining

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOPPER = Hardware("gpu", "cpu", "an H200", 2, (9, 0))
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64,
         "max_positions": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
CLOSED = Tiling(rows=16, columns=32, programs=4)


def scales(tensors: int = 1, scaling: Scaling | None = None) -> Scales:
    return Scales(no_scales(tensors), set(), scaling or Scaling())


def largest_error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).abs().max() / wanted.abs().max())


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def numbers(cast: Cast) -> list[list[int] | None]:
    return [None if part is None else part.view(torch.uint8).tolist() for part in (cast.rows, cast.turned)]


@pytest.mark.parametrize(
    ("kind", "dtype", "count", "along", "shape"),
    [
        ("delayed", E4M3, 1, 0, (32, 64)),
        ("delayed", E5M2, 2, 1, (36, 24)),
        ("current", E5M2, 1, 0, (20, 40)),
        ("current", E4M3, 2, 0, (16, 50)),
    ],
)
def test_the_kernel_casts_as_pytorch_does(
    kind: Any, dtype: torch.dtype, count: int, along: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    ours, plain = scales(scaling=Scaling(kind)), scales(scaling=Scaling(kind))
    for step in range(2):
        # Strided parts as an attention's gradients may be, growing beyond the last step's range.
        parts = [(torch.randn(shape[0], 2 * shape[1]) * 4**step)[:, : shape[1]] for _ in range(count)]
        found = in_triton.cast(Request(parts, ours, 0, dtype, along, sums=True), CLOSED)
        wanted = in_torch.cast(Request(parts, plain, 0, dtype, along, sums=True))
        assert numbers(found) == numbers(wanted)
        assert found.rows is not None
        assert found.turned is not None
        torch.testing.assert_close(found.turned.float(), found.rows.float().t(), rtol=0, atol=0)
        torch.testing.assert_close(found.inverse, wanted.inverse, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.sums, wanted.sums, rtol=1e-4, atol=1e-4)
        assert ours.values.tolist() == plain.values.tolist()


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("backward", [False, True])
def test_gelu_is_computed_in_the_cast(form: Any, backward: bool) -> None:
    torch.manual_seed(0)
    x, before = torch.randn(48, 40), torch.randn(48, 40) * 2
    request = {"gelu": form, "before": before if backward else None, "sums": True}
    found = in_triton.cast(Request([x], scales(), 0, E4M3, **request), CLOSED)  # type: ignore[arg-type]
    wanted = in_torch.cast(Request([x], scales(), 0, E4M3, **request))  # type: ignore[arg-type]
    assert found.rows is not None
    assert wanted.rows is not None
    differ = found.rows.view(torch.uint8) != wanted.rows.view(torch.uint8)
    assert differ.float().mean() < 0.02, "the last bits of GELU decide about few roundings"
    torch.testing.assert_close(found.rows.float(), wanted.rows.float(), rtol=0.13, atol=2e-3 * 448)
    torch.testing.assert_close(found.sums, wanted.sums, rtol=1e-3, atol=1e-3)


def test_what_is_not_asked_for_is_not_written() -> None:
    x = torch.randn(16, 32)
    for cast in (in_triton.cast, in_torch.cast):
        found = cast(Request([x], scales(), 0, E4M3, rows=False))
        assert found.rows is None
        assert found.sums is None
        assert cast(Request([x], scales(), 0, E4M3, turned=False)).turned is None


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), wide=st.booleans())
def test_a_rounding_is_off_by_half_a_unit_at_most(values: list[float], wide: bool) -> None:
    x, dtype = torch.tensor([values]), E5M2 if wide else E4M3
    cast = in_torch.cast(Request([x], scales(scaling=Scaling("current")), 0, dtype))
    assert cast.rows is not None
    bits, least = (2, -16) if wide else (3, -9)
    half_a_unit = torch.maximum(x.abs() * 2.0 ** -(bits + 1), cast.inverse * 2.0 ** (least - 1))
    assert bool(((cast.rows.float() * cast.inverse - x).abs() <= half_a_unit * (1 + 1e-5)).all())


@pytest.mark.parametrize("cast", [in_triton.cast, in_torch.cast])
def test_a_delayed_scale_follows_what_was_seen(cast: Any) -> None:
    ours = scales(scaling=Scaling(decay=0.5, headroom=2.0))

    def seen(value: float) -> tuple[float, float]:
        found = cast(Request([torch.full((16, 16), value)], ours, 0, E4M3))
        assert float(ours.values.view(torch.float32)[0, 1]) == 0.0
        return float(found.rows.float()[0, 0] * found.inverse), float(ours.values.view(torch.float32)[0, 0])

    def about(value: float, used: float) -> Any:
        return pytest.approx(value, rel=1 / 16), used

    assert seen(8.0) == about(8.0, 8.0), "a first tensor is measured before"
    assert seen(1.0) == about(1.0, 4.0), "and forgotten step by step"
    assert seen(7.0) == about(7.0, 7.0), "there is room to double"
    assert seen(100.0) == (14.0, 100.0), "a larger value is set to the largest number, and the next is not"
    assert seen(96.0) == about(96.0, 96.0)


@pytest.mark.parametrize("cast", [in_triton.cast, in_torch.cast])
def test_an_overflow_stays_one_and_is_not_remembered(cast: Any) -> None:
    ours = scales()
    cast(Request([torch.ones(16, 16)], ours, 0, E5M2))
    x = torch.ones(16, 16)
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    found = cast(Request([x], ours, 0, E5M2)).rows.float()
    assert found.isnan().nonzero().tolist() == [[3, 4], [5, 6]]
    assert float(ours.values.view(torch.float32)[0, 0]) == 1.0
    zeros = cast(Request([torch.zeros(16, 16)], scales(), 0, E4M3))
    assert not zeros.rows.float().any()
    assert zeros.inverse.isfinite()


@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_layer_is_the_product_of_rounded_operands(tier: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 32, 48, dtype=dtype, requires_grad=True)
    weights = [torch.randn(32, 48).requires_grad_() for _ in range(2)]
    biases = [torch.randn(32).requires_grad_() for _ in range(2)]
    ys = fp8_linear(x, weights, biases, scales(3), tier)
    dys = [torch.randn_like(y) * 1e-3 for y in ys]
    dx, *others = torch.autograd.grad(ys, [x, *weights, *biases], dys)
    y, dy, tokens = torch.cat(ys, dim=-1).flatten(0, 1), torch.cat(dys, dim=-1).flatten(0, 1), x.flatten(0, 1).detach()
    weight, bias = torch.cat(weights).detach(), torch.cat(biases).detach()
    assert y.dtype == dx.dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in others)
    assert largest_error(y, reference(tokens, weight, bias, headroom=2.0)) < TOLERANCE[dtype]
    wanted = reference_gradients(dy, tokens, weight, headroom=2.0)
    found = (dx.flatten(0, 1), torch.cat(others[:2]), torch.cat(others[2:]))
    for one, other in zip(found, wanted, strict=True):
        assert largest_error(one, other) < TOLERANCE[dtype]
    exact = tokens.double() @ weight.double().t() + bias.double()
    assert 0.01 < error(y, exact) < ROUNDING["y"]
    assert error(found[0], dy.double() @ weight.double()) < ROUNDING["dx"]
    assert error(found[1], dy.double().t() @ tokens.double()) < ROUNDING["dw"]


@pytest.mark.parametrize("tier", ["torch", "triton"])
def test_a_feed_forward_block_is_that_of_rounded_operands(tier: Any) -> None:
    torch.manual_seed(0)
    shapes = ((64, 32), (48, 32), (48,), (32, 48), (32,))
    leaves = [torch.randn(shape).mul(0.3).requires_grad_() for shape in shapes]
    dy, ours = torch.randn(64, 32) * 1e-3, scales(6, Scaling(headroom=1.0))
    y = fp8_feed_forward(*leaves, ours, "tanh", tier)
    assert largest_error(y, reference_feed_forward(*(leaf.detach() for leaf in leaves), "tanh")) < 0.01  # type: ignore[arg-type]
    x, w, b, w_2, b_2 = (leaf.detach().double().requires_grad_() for leaf in leaves)
    exact = linear(gelu(linear(x, w, b), approximate="tanh"), w_2, b_2)
    wanted = torch.autograd.grad(exact, [x, w, b, w_2, b_2], dy.double())
    found = torch.autograd.grad(y, leaves, dy)
    assert error(y, exact) < ROUNDING["feed_forward"]
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < ROUNDING["feed_forward"] + ROUNDING["dw"]


def test_only_the_gradients_that_are_wanted_are_computed() -> None:
    x, weight = torch.randn(16, 32), torch.randn(16, 32)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        leaves = [t.clone().requires_grad_(want) for t, want in zip((x, weight, torch.zeros(16)), wanted, strict=True)]
        fp8_linear(leaves[0], [leaves[1]], [leaves[2]], scales(3), "torch")[0].sum().backward()
        assert tuple(leaf.grad is not None for leaf in leaves) == wanted
    assert fp8_linear(x, [weight], [None], scales(3), "torch")[0].shape == (16, 16)
    assert not fp8_linear(x, [weight], [None], scales(3), "torch")[0].requires_grad


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    y = fp8_linear(x, [torch.randn(16, 32)], [None], scales(3), "torch")[0]
    with pytest.raises(OptimizationError, match=r"create_graph=True.*`leave`"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def bert() -> BertForPreTraining:
    torch.manual_seed(0)
    return BertForPreTraining(BertConfig(**SMALL))  # type: ignore[arg-type]


def emulated(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, HasScales):
            module.tier = "torch"
    return model


def bert_loss(model: nn.Module) -> Tensor:
    ids = torch.arange(64).view(2, 32) % 96
    words, relations = model(ids)
    return cross_entropy(words.flatten(0, 1), ids.flatten()) + cross_entropy(relations, torch.tensor([0, 1]))


def test_bert_s_layers_are_sites_and_its_heads_can_be_left() -> None:
    model = bert()
    assert {site.path for site in FP8Patches(Scaling(), ["cls.*", "*.pooler.*"]).sites(model)} == {
        f"bert.encoder.layer.{layer}{part}"
        for layer in range(2)
        for part in ("", ".attention.self.joined", ".attention.output.dense")
    }
    every = {site.path for site in FP8Patches(Scaling()).sites(model)}
    assert "cls.predictions.transform.dense" in every
    assert "cls.predictions.decoder" not in every, "its weight is the embeddings'"
    assert "cls.seq_relationship" not in every, "it has two outputs"
    only_decoder = nn.ModuleDict({"a": (words := nn.Embedding(16, 16)), "b": nn.Linear(16, 16)})
    only_decoder["b"].weight = words.weight
    assert "whose weight is an embedding's" in FP8Patches(Scaling()).why_no_site(only_decoder)


def test_bert_in_fp8_trains_as_before_and_can_be_undone() -> None:
    model = bert()
    plain = bert_loss(model)
    wanted = torch.autograd.grad(plain, list(model.parameters()), allow_unused=True)
    names = list(model.state_dict())
    surgery = PatchSurgery(model, FP8Patches(Scaling()))
    kinds = {change.what for change in surgery.apply()}
    assert kinds == {"FP8BertLayer", "FP8JoinedLinear", "FP8Linear"}
    assert list(model.state_dict()) == names
    assert bert_loss(model).item() == pytest.approx(plain.item(), rel=1e-6), "nothing is rounded where FP8 can't be"
    emulated(model)
    fused = PatchSurgery(model, LayerNormDropoutPatches())
    assert len(fused.apply()) == 4, "another room finds its places in it"
    loss = bert_loss(model)
    assert loss.item() != plain.item()
    assert loss.item() == pytest.approx(plain.item(), rel=2e-3)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for (name, parameter), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        if other is not None and other.norm() > 1e-3 * parameter.numel() ** 0.5:
            assert error(one, other) < 0.15, name
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert bert_loss(copied).item() == bert_loss(model).item()
    assert bert_loss(emulated(model).eval()).item() == pytest.approx(plain.item(), rel=1e-6), "evaluation is plain"
    fused.undo()
    surgery.undo()
    assert {type(module) for module in model.modules()} == {type(module) for module in bert().modules()}
    assert not list(model.buffers())


def test_joined_layers_are_cast_once() -> None:
    torch.manual_seed(0)
    attention = bert().bert.encoder.layer[0].attention.self  # type: ignore[union-attr, index]
    joint: Any = in_fp8(attention.joined, Scaling())
    assert isinstance(joint, FP8JoinedLinear)
    joint.tier = "torch"
    layers = (attention.query, attention.key, attention.value)
    x = torch.randn(16, 32)
    for found, layer in zip(joint(x, *layers), layers, strict=True):
        assert error(found, layer(x)) < ROUNDING["y"] + 0.01
    assert joint.scales.values[:2, 0].view(torch.float32)[0] == x.abs().max()


@pytest.mark.parametrize(
    ("hardware", "precision", "reason"),
    [
        (Hardware("cpu", "cpu", "a CPU", 2), "bf16-mixed", r"8\.9 \(Ada, Hopper\) or later; a CPU is no CUDA device"),
        (Hardware("gpu", "cpu", "an A100", 2, (8, 0)), "bf16-mixed", r"or later; an A100 is 8\.0"),
        (HOPPER, "32-true", "precision=32-true keeps activations in 32 bits; set it to bf16-mixed"),
    ],
)
def test_it_refuses_where_fp8_can_not_be(hardware: Hardware, precision: str, reason: str) -> None:
    verdict = FP8LinearOptimization(FP8LinearConfig(measure=False)).check(
        Context(Module(), Data(), hardware, precision)
    )
    assert isinstance(verdict, Refuses)
    assert re.search(reason, verdict.reason)


def test_it_applies_on_hopper_and_says_to_how_many() -> None:
    room = FP8LinearOptimization(FP8LinearConfig(measure=False))
    assert room.check(Context(Module(), Data(), HOPPER, "bf16-mixed")) == Applies("2 sites; not measured, as asked")
    with pytest.raises(ConfigError, match=r"gradients is 'e5m3'.*e5m2"):
        FP8LinearConfig(gradients="e5m3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scaling is 'late'.*delayed"):
        FP8LinearConfig(scaling="late")  # type: ignore[arg-type]


class Classifier(pl.LightningModule):
    """Tells which of 16 directions a vector is nearest to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def directions(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 32, generator=generator)
    return TensorDataset(x, (x @ torch.randn(32, 16, generator=generator)).argmax(dim=1))


def last_losses(seed: int, in_eight_bits: bool) -> float:
    torch.manual_seed(seed)
    module, (x, y) = Classifier(), directions(seed).tensors
    if in_eight_bits:
        assert len(PatchSurgery(module, FP8Patches(Scaling())).apply()) == 3
        emulated(module)
    optimizer = module.configure_optimizers()
    for step in range(112):
        part = slice(step % 16 * 64, step % 16 * 64 + 64)
        optimizer.zero_grad()
        module.training_step([x[part], y[part]], step).backward()
        optimizer.step()
    return sum(module.losses[-16:]) / 16


def test_a_small_network_learns_as_much_in_fp8() -> None:
    plain, fp8 = (sum(last_losses(seed, eight) for seed in range(2)) / 2 for eight in (False, True))
    assert plain < 1.5, "something is learned: it begins at 2.8"
    assert plain != fp8 == pytest.approx(plain, rel=0.05)


class Emulated(FP8Linears):
    """FP8 on a CPU, by PyTorch's operators."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        emulated(pl_module)


def fitted(steps: int, resume: Any = None, folder: Any = None) -> Classifier:
    torch.manual_seed(0)
    module = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[Emulated()], logger=False, max_steps=steps, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(directions(0), batch_size=1024), ckpt_path=resume)
    if folder is not None:
        trainer.save_checkpoint(folder / "it.ckpt")
    return module


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*logging interval.*")
def test_scales_are_in_the_checkpoint_so_that_a_resumed_run_goes_on_exactly(tmp_path: Any) -> None:
    whole = fitted(6)
    fitted(4, folder=tmp_path)
    saved = torch.load(tmp_path / "it.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(Classifier().state_dict())
    assert list(saved["callbacks"]["Emulated"]) == ["net.0", "net.2", "net.4"]
    assert fitted(6, tmp_path / "it.ckpt").losses == whole.losses[4:]
    saved["callbacks"].clear()
    torch.save(saved, tmp_path / "without.ckpt")
    assert fitted(6, tmp_path / "without.ckpt").losses != whole.losses[4:], "their scales are of what they see first"


def test_the_reference_rounds_to_the_format() -> None:
    x = torch.tensor([[448.0, 17.0, 1e-9]])
    assert quantized(x).tolist() == [[448.0, 16.0, 0.0]]
