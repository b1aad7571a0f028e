"""Where gemm_gelu is put: its module, sequences and layers like BERT's, why a model has no site, and the plan."""

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.vision_transformer import MLPBlock

from fasttrain.callbacks.gemm_gelu import (
    FeedForward,
    FeedForwardPatches,
    FusedGemmGELU,
    FusedSequential,
    GemmGELUConfig,
    GemmGELUOptimization,
)
from fasttrain.callbacks.gemm_gelu.reference import reference
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Change, Context, Refuses
from fasttrain.patches import PatchSurgery

pytest.importorskip("triton")


CPU = Hardware("cpu", "cpu", "a CPU", 2)


def test_the_module_is_a_sequential_of_three() -> None:
    block = FeedForward(8, 32, 4, bias=False, approximate="tanh")
    assert list(block.state_dict()) == ["0.weight", "2.weight"]
    plain = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU("tanh"), nn.Linear(32, 4, bias=False))
    plain.load_state_dict(block.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(block(x), plain(x))
    assert FeedForward(8, 32)(x).shape == (3, 8)


class Activation(nn.Module):
    """GELU as a library may write it."""

    def __init__(self, compute: Any = F.gelu) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)  # type: ignore[no-any-return]


def tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Intermediate(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 32)
        self.intermediate_act_fn = Activation(compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))  # type: ignore[no-any-return]


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 8)
        self.LayerNorm = nn.LayerNorm(8, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        hidden = self.dropout(self.dense(hidden))
        return self.LayerNorm(hidden + residual)  # type: ignore[no-any-return]


class OutputBeforeNorm(Output):
    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.dropout(self.dense(hidden)) + residual  # type: ignore[no-any-return]


class BertLike(nn.Module):
    """A layer in the structure of the transformers library's, without its attention."""

    def __init__(self, compute: Any = F.gelu, output: type[Output] = Output) -> None:
        super().__init__()
        self.intermediate = Intermediate(compute)
        self.output = output()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        return (self.feed_forward_chunk(x),)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        return self.output(self.intermediate(attention_output), attention_output)  # type: ignore[no-any-return]


def sequential(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), *between, nn.Linear(32, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = sequential(nn.Dropout(0.0))
        self.mlps = nn.ModuleList([shared, sequential(nn.Dropout(0.5)), shared, sequential(nn.Identity())])
        self.vit = MLPBlock(8, 32, 0.0)
        self.bert = BertLike(tanh_by_hand)
        self.longer = nn.Sequential(nn.LayerNorm(8), *sequential(), *sequential(), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for module in self.mlps:
            x = x + module(x)
        return self.longer(self.bert(self.vit(x))[0])  # type: ignore[no-any-return]


def test_it_is_put_to_every_site_and_undone() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 8)
    names, untouched = list(model.state_dict()), copy.deepcopy(model)
    paths = ["vit", "bert", "longer", "mlps.0", "mlps.2", "mlps.3"]
    patches = FeedForwardPatches()
    assert [site.path for site in patches.sites(model)] == paths
    surgery = PatchSurgery(model, patches)
    fused = ["FusedSequential", "FusedBertLike", *["FusedSequential"] * 4]
    changes = surgery.apply()
    assert changes == [Change(path, what) for path, what in zip(paths, fused, strict=True)]
    assert patches.sites(model) == []
    assert model.mlps[0] is model.mlps[2]
    assert list(model.state_dict()) == names
    parameters = [id(parameter) for parameter in model.parameters()]
    for version in (model, copy.deepcopy(model), untouched):
        torch.manual_seed(1)
        result = version(x)
        result.square().sum().backward()
        torch.manual_seed(1)
        torch.testing.assert_close(result, untouched(x))
    for ours, plain in zip(model.parameters(), untouched.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)
    untouched.load_state_dict(model.state_dict())
    surgery.undo()
    assert str(model) == str(untouched)
    assert [id(parameter) for parameter in model.parameters()] == parameters


def test_the_fused_modules_run_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[str] = []

    def counted(x: Tensor, w: Any, b: Any, w2: Any, b2: Any, form: Any, tier: Any = "auto") -> Tensor:
        forms.append(form)
        return reference(x, w, b, w2, b2, form)

    for module in ("modules", "bert"):
        monkeypatch.setattr(f"fasttrain.callbacks.gemm_gelu.{module}.linear_gelu_linear", counted)
    model = Model()
    PatchSurgery(model, FeedForwardPatches()).apply(only=["vit", "bert", "longer"])
    model(torch.randn(2, 8))
    assert forms == ["none", "tanh", "none", "none"]


def test_a_fused_bert_layer_can_be_pickled() -> None:
    layer = nn.ModuleList([BertLike()])
    PatchSurgery(layer, FeedForwardPatches()).apply()
    again = pickle.loads(pickle.dumps(layer))
    assert type(again[0]) is type(layer[0])
    assert isinstance(again[0], BertLike)
    torch.testing.assert_close(again.eval()[0](x := torch.randn(2, 8)), layer.eval()[0](x))


def test_hooks_on_the_whole_stay_and_hooks_inside_are_respected() -> None:
    model = nn.ModuleList([sequential()])
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("whole"))
    PatchSurgery(model, FeedForwardPatches()).apply()
    fused: Any = model[0]
    assert type(fused) is FusedSequential
    fused[1].register_forward_hook(lambda *_: seen.append("gelu"))
    fused(torch.randn(2, 8))
    assert seen == ["gelu", "whole"]


def hooked() -> nn.Module:
    model = sequential()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(2, 2), "Wrapped has no nn.GELU in an nn.Sequential"),
        (sequential(nn.Dropout(0.1)), "1 followed by dropout of 0.1, which the fused block doesn't have"),
        (hooked(), "1 beside or in a module watched by hooks"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.GELU()), "1 behind Conv2d"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Tanh()), "1 before Tanh"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), "1 before nothing"),
        (nn.TransformerEncoderLayer(8, 2, activation=nn.GELU()), "1 a child of TransformerEncoderLayer, whose forward"),
        (BertLike(torch.tanh), "Wrapped has no nn.GELU in an nn.Sequential"),
        (BertLike(F.gelu, OutputBeforeNorm), "Wrapped has no nn.GELU"),
    ],
)
def test_why_there_is_no_site(module: nn.Module, words: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

    patches = FeedForwardPatches()
    assert patches.sites(Wrapped()) == []
    assert words in patches.why_no_site(Wrapped())


def test_the_model_itself_is_not_replaced() -> None:
    patches = FeedForwardPatches()
    assert patches.sites(sequential()) == []
    assert "1 in the model itself, which can't be replaced" in patches.why_no_site(sequential())
    assert "1 fused already" in patches.why_no_site(FeedForward(8, 32))


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(4, 8)), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_the_callback_acts_and_undoes() -> None:
    module, callback = Module(Model()), FusedGemmGELU()
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module)
    assert [change.path for change in callback.changes][:2] == ["net.vit", "net.bert"]
    callback.undo()
    assert not any(isinstance(part, FusedSequential) for part in module.modules())
    with pytest.raises(OptimizationError, match=r"^gemm_gelu: Module has no nn\.GELU in an nn\.Sequential; leave it"):
        FusedGemmGELU().setup(trainer, Module(nn.Linear(8, 8)), "fit")


def test_the_plans_door() -> None:
    data = pl.LightningDataModule()
    trusting = GemmGELUOptimization(GemmGELUConfig(measure=False))
    verdict = trusting.check(Context(Module(Model()), data, CPU))
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("6 sites; not measured")
    assert isinstance(GemmGELUOptimization(GemmGELUConfig()).check(Context(Module(nn.GELU()), data, CPU)), Refuses)
