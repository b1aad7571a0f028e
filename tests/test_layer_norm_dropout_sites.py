"""Where layer_norm_dropout is put: outputs like BERT's, PyTorch's encoder layers, and the module by itself."""

import copy
import io
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_norm_calls import DEVICE
from torch import Tensor, nn

from fasttrain.callbacks.layer_norm_dropout import (
    DropoutAddLayerNorm,
    LayerNormDropoutPatches,
    dropout_add_layer_norm,
)
from fasttrain.callbacks.layer_norm_dropout.modules import DenseDropoutAddNorm, FusedTransformerEncoderLayer
from fasttrain.optimization import Change
from fasttrain.patches import PatchSurgery


class BertSelfOutput(nn.Module):
    """As Hugging Face's."""

    def __init__(self, hidden: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.LayerNorm(hidden_states + input_tensor)  # type: ignore[no-any-return]


class OtherOrder(BertSelfOutput):
    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(torch.add(residual, self.dropout(x)))  # type: ignore[no-any-return]


class DropsAfterwards(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states) + input_tensor))  # type: ignore[no-any-return]


class DoesMore(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return super().forward(hidden_states, input_tensor) * 2


class Branches(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return super().forward(hidden_states, input_tensor) if hidden_states.sum() > 0 else input_tensor


class Subtracts(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(operator.sub(self.dropout(hidden_states), input_tensor))  # type: ignore[no-any-return]


class Scales(BertSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(torch.add(self.dropout(hidden_states), input_tensor, alpha=2))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers' ends, the second fed by the first."""

    def __init__(self, kind: type[BertSelfOutput] = BertSelfOutput, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = kind(p=p), kind(p=p)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, x)
        return self.second(hidden_states=x.tanh(), input_tensor=x)  # type: ignore[no-any-return]


def paths(model: nn.Module) -> list[str]:
    return [site.path for site in LayerNormDropoutPatches().sites(model)]


def results(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    y = model(*inputs, **named)
    torch.manual_seed(9)
    y.backward(torch.randn_like(y))
    return {"": y.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(params=["torch", "triton"])
def tier_of_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Modules take the best tier for the device; here each of them in turn."""
    from fasttrain.callbacks.layer_norm_dropout import modules

    def call(*arguments: Any, **options: Any) -> Tensor:
        return dropout_add_layer_norm(*arguments, tier=request.param, **options)

    monkeypatch.setattr(modules, "dropout_add_layer_norm", call)
    return str(request.param)


def test_outputs_like_berts_are_replaced_and_put_back(tier_of_modules: str) -> None:
    torch.manual_seed(0)
    model, x = Model().to(DEVICE), torch.randn(2, 3, 16, device=DEVICE)
    wanted, names, first = results(model, x), list(model.state_dict()), model.first
    surgery = PatchSurgery(model, LayerNormDropoutPatches())
    assert surgery.apply() == [Change("first", "DenseDropoutAddNorm"), Change("second", "DenseDropoutAddNorm")]
    assert_same(results(model, x), wanted)
    assert list(model.state_dict()) == names
    assert model.first.dense is first.dense
    assert_same(results(copy.deepcopy(model), x), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_same(results(torch.load(buffer, weights_only=False), x), wanted)
    assert paths(model) == [], "fused already"
    surgery.undo()
    assert model.first is first
    assert_same(results(model, x), wanted)


def test_the_end_of_an_output_alone_is_what_follows_dense() -> None:
    model, (x, z) = Model(), torch.randn(2, 3, 16)
    wanted = model.first(x, z)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    end: Any = model.first.end
    torch.testing.assert_close(end(model.first.dense(x), z), wanted, rtol=1e-4, atol=1e-5)


def test_hooks_inside_are_still_called() -> None:
    model, x, seen = Model(), torch.randn(3, 16), list[str]()
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    wanted = results(model, x)
    model.first.dense.register_forward_hook(lambda *_: seen.append("dense"))
    model.first.register_forward_hook(lambda *_: seen.append("first"))
    assert_same(results(model, x), wanted)
    assert seen == ["dense", "first"]


def test_other_names_and_orders_are_seen_and_other_forwards_are_left() -> None:
    model = Model(OtherOrder)
    x, z = torch.randn(2, 3, 16)
    wanted = model.first(z, x)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert isinstance(model.first, DenseDropoutAddNorm)
    torch.testing.assert_close(model.first(z, x=x), wanted, rtol=1e-4, atol=1e-5)
    for kind in (DropsAfterwards, DoesMore, Branches, Subtracts, Scales):
        assert paths(Model(kind)) == [], kind
    model = Model()
    model.first.LayerNorm.register_forward_hook(lambda *_: None)
    model.second.LayerNorm = nn.LayerNorm((2, 16))
    assert paths(model) == []
    wide = Model(lambda p: BertSelfOutput(8193))  # type: ignore[arg-type]
    assert paths(wide) == []


def test_a_module_at_two_paths_stays_shared() -> None:
    model = Model()
    model.second = model.first
    assert paths(model) == ["first", "second"]
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert model.second is model.first


def encoder(p: float = 0.0, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=p, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor="norm_first" not in options).to(DEVICE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masks", ["none", "padding", "causal"])
def test_pytorchs_encoder(tier_of_modules: str, masks: str) -> None:
    model, x = encoder(activation="gelu"), torch.randn(2, 5, 16, device=DEVICE)
    named: dict[str, Any] = {}
    if masks == "padding":
        named["src_key_padding_mask"] = torch.arange(5, device=DEVICE) >= torch.tensor([[3], [5]], device=DEVICE)
    elif masks == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(5, device=DEVICE)
        named |= {"mask": mask, "is_causal": True}
    wanted = results(model, x, **named)
    plain = model.eval()(x, **named)
    with torch.no_grad():
        fast = model(x, **named)
    surgery = PatchSurgery(model.train(), LayerNormDropoutPatches())
    assert surgery.apply() == [Change(f"layers.{i}", "FusedTransformerEncoderLayer") for i in range(2)]
    assert_same(results(model, x, **named), wanted)
    assert torch.equal(model.eval()(x, **named), plain)
    with torch.no_grad():
        assert torch.equal(model(x, **named), fast), "the fast path is taken as before"
    surgery.undo()
    assert type(model.layers[0]) is nn.TransformerEncoderLayer


def test_pytorchs_encoder_without_biases_or_batch_first(tier_of_modules: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, bias=False)).to(DEVICE)
    x = torch.randn(5, 2, 8, device=DEVICE)
    wanted = results(model, x)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    assert_same(results(model, x), wanted)


def test_rates_and_modes_are_those_of_the_dropouts(tier_of_modules: str) -> None:
    model, x = Model(p=0.5).to(DEVICE), torch.randn(6, 16, device=DEVICE)
    plain = model.eval()(x)
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    model.train()
    assert not torch.equal(model(x), model(x))
    model.first.dropout.p = model.second.dropout.p = 0.0
    assert torch.equal(model(x), model(x))


def test_reasons() -> None:
    def reason(model: nn.Module) -> str:
        assert paths(model) == []
        return LayerNormDropoutPatches().why_no_site(model)

    assert reason(nn.Linear(2, 2)) == "Linear has no nn.LayerNorm to fuse dropout and a residual addition with"
    assert reason(nn.LayerNorm(3)).startswith("LayerNorm has 1 nn.LayerNorm, but neither an nn.TransformerEncoderLayer")
    assert reason(encoder(norm_first=True)).endswith(
        "; 2 nn.TransformerEncoderLayer: norm_first=True, where no normalization follows the addition alone"
    )
    model = encoder()
    model.layers[0].norm2 = nn.Identity()
    model.layers[1].dropout1 = nn.AlphaDropout()
    assert "; 1 nn.TransformerEncoderLayer: Identity(), where an nn.LayerNorm of up to 8192 elements" in reason(model)
    assert "; 1 nn.TransformerEncoderLayer: AlphaDropout(p=0.5, inplace=False), where an nn.Dropout" in reason(model)
    assert reason(nn.TransformerEncoderLayer(4, 1)).endswith("the model itself, which can't be replaced")


def test_the_module_is_a_layer_norm_with_more_inputs(tier_of_modules: str) -> None:
    torch.manual_seed(0)
    plain, module = nn.LayerNorm(12).to(DEVICE), DropoutAddLayerNorm(12, p=0.25).to(DEVICE)
    nn.init.normal_(plain.weight)
    module.load_state_dict(plain.state_dict())
    x, z, b = torch.randn(3, 12, device=DEVICE), torch.randn(3, 12, device=DEVICE), torch.randn(12, device=DEVICE)
    assert repr(module) == "DropoutAddLayerNorm((12,), eps=1e-05, elementwise_affine=True, bias=True, p=0.25)" or (
        repr(module) == "DropoutAddLayerNorm((12,), eps=1e-05, elementwise_affine=True, p=0.25)"
    )
    assert not torch.equal(module(x), module(x))
    module.eval()
    torch.testing.assert_close(module(x), plain(x))
    torch.testing.assert_close(module(x, z, b), plain(x + z + b))
    without = DropoutAddLayerNorm(12, elementwise_affine=False).to(DEVICE).eval()
    torch.testing.assert_close(without(x, z), F.layer_norm(x + z, (12,)))


@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_it_is_pytorchs_operators(autocast: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = Model()
    if autocast:
        model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), DropoutAddLayerNorm(16, p=0.0))
    PatchSurgery(model, LayerNormDropoutPatches()).apply()
    x = torch.randn(2, 5, 16)

    def run(call: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = call(x)
        y.float().sum().backward()
        return y  # type: ignore[no-any-return]

    wanted = run(model)
    found = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 if autocast else 1e-5)


def test_the_fused_layer_is_still_pytorchs() -> None:
    assert issubclass(FusedTransformerEncoderLayer, nn.TransformerEncoderLayer), "nn.TransformerEncoder asks for it"
