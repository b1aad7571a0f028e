"""compile on a GPU, by inductor: against its reference, in captured graphs, through fits, cold and warm."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import batches
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.compile import CompileConfig, CompiledRegions, CompileOptimization, RegionalCompile
from fasttrain.callbacks.compile.cache import kept_in
from fasttrain.callbacks.compile.reference import TOLERANCE
from fasttrain.callbacks.compile.work import encoder
from fasttrain.environment import Hardware
from fasttrain.measure import captured
from fasttrain.optimization import Applies, Context, ExampleBatch, Refuses

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _exact_and_from_nothing(tmp_path: Path) -> Iterator[None]:
    torch.manual_seed(0)
    flags = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    with kept_in(tmp_path / "compiled"):
        yield
    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = flags


def residual() -> nn.Module:
    return resnet18(weights=None, norm_layer=FrozenBatchNorm2d).to(memory_format=torch.channels_last)


def transformer() -> nn.Module:
    model = encoder(3, 64, 4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


MODELS = {"residual": (residual, (3, 3, 75, 61)), "transformer": (transformer, (3, 17, 64))}


@cache
def direction(shape: torch.Size) -> Tensor:
    """What gradients are taken along: the mean square of what a LayerNorm gives is constant, its gradient rounding."""
    return torch.randn(shape, device="cuda", dtype=torch.float64)


def values(model: nn.Module, inputs: Tensor, dtype: torch.dtype) -> list[Tensor]:
    model.zero_grad()
    x = inputs.clone().requires_grad_()
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32, cache_enabled=False):
        output = model(x)
    (output * direction(output.shape).to(output)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [output.detach(), x.grad, *gradients]  # type: ignore[list-item]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        error = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
        assert error <= tolerance, f"tensor {index}: {error:.2e}, at most {tolerance:.0e}"


def assert_as_near(found: list[Tensor], plain: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    """Rounding adds up over a network and over steps: how far off eager is itself tells how far one may be."""
    for one, eager, other in zip(found, plain, exact, strict=True):
        scale = other.abs().max().clamp(min=1e-30)
        ours, theirs = ((tensor.double() - other).abs().max() / scale for tensor in (one, eager))
        assert ours <= 2 * theirs + tolerance, f"{ours:.2e} from float64, and eager is {theirs:.2e}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_as_near_to_float64_as_the_reference_is(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    model, inputs = make().cuda(), torch.randn(shape, device="cuda")
    exact = values(copy.deepcopy(model).double(), inputs.double(), torch.float32)
    plain = values(copy.deepcopy(model), inputs, dtype)
    assert CompiledRegions(model).apply()
    found = values(model, inputs, dtype)
    assert_as_near(found, plain, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_gives_the_compiled_numbers(name: str) -> None:
    make, shape = MODELS[name]
    model, inputs = make().cuda(), torch.randn(shape, device="cuda")
    regions = CompiledRegions(model)
    regions.apply()
    wanted = values(model, inputs, torch.bfloat16)
    graphs = [tally.counts.graphs for tally in regions.tallies]
    kept: dict[str, list[Tensor]] = {}

    def step() -> None:
        kept["values"] = values(model, inputs, torch.bfloat16)

    replay = captured(step)
    for tensor in kept["values"]:
        tensor.zero_()
    replay()
    torch.cuda.synchronize()
    assert_close(kept["values"], wanted, TOLERANCE[torch.bfloat16])
    assert [tally.counts.graphs for tally in regions.tallies] == graphs, "nothing is compiled at the capture"


def test_other_sizes_layouts_and_a_shared_block() -> None:
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    other = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(block, other, block).cuda()
    plain = copy.deepcopy(model)
    regions = CompiledRegions(model)
    assert len(regions.apply()) == 2
    for inputs in (torch.randn(2, 9, 64), torch.randn(5, 9, 64), torch.randn(9, 5, 64).transpose(0, 1)):
        inputs = inputs.cuda()
        assert_close(values(model, inputs, torch.float32), values(plain, inputs, torch.float32), 1e-4)


def test_evaluation_and_training_of_a_mode_with_graphs_of_its_own() -> None:
    model = transformer().cuda()
    plain = copy.deepcopy(model)
    CompiledRegions(model, mode="reduce-overhead").apply()
    inputs = torch.randn(3, 17, 64, device="cuda")
    for _ in range(4):
        assert_close(values(model, inputs, torch.float32), values(plain, inputs, torch.float32), 1e-4)
    with torch.no_grad():
        assert_close([model.eval()(inputs)], [plain.eval()(inputs)], 1e-4)


def test_tuned_kernels_give_the_same_numbers() -> None:
    model = transformer().cuda()
    plain = copy.deepcopy(model)
    CompiledRegions(model, mode="max-autotune-no-cudagraphs").apply()
    inputs = torch.randn(3, 17, 64, device="cuda")
    assert_close(values(model, inputs, torch.bfloat16), values(plain, inputs, torch.bfloat16), 6e-2)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential
        self.blocks = nn.Sequential(*(block(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2**-6)


def weights(module: nn.Module) -> list[Tensor]:
    return list(module.state_dict().values())


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return batches(4, rows=(64,))


def fitted(*callbacks: pl.Callback, precision: Any = "32-true") -> Lit:
    pl.seed_everything(0)
    module = Lit()
    trainer = pl.Trainer(accelerator="gpu", devices=1, callbacks=list(callbacks), logger=False, max_epochs=3,
                         enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                         precision=precision)  # fmt: skip
    trainer.fit(module, batches(4, rows=(64,)), batches(1, rows=(33,)))  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)],
    ids=str,
)
def test_a_fit_whose_step_is_captured(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    exact, plain = fitted(precision="64-true"), fitted(precision=precision)
    starts = []
    for _ in range(2):
        torch._dynamo.reset()
        callback = RegionalCompile(cache_dir=str(tmp_path / "kept"))
        step = CUDAGraphStep(on_failure="error")
        module = fitted(callback, step, precision=precision)
        assert sum(tally.hits for tally in step.pool.tallies.values()) >= 6
        assert_as_near(weights(module), weights(plain), weights(exact), TOLERANCE[dtype])
        starts.append(callback.table().rows[-1][6])
        assert {tally.counts.failed for tally in callback.tallies} == {0}
    assert starts[0] in ("cold", "partly warm"), "graphs that are equal are found again in the same run"
    assert starts[1] == "warm"


def test_the_plan_measures() -> None:
    context = Context(Lit(), Data(), Hardware.here(), example=ExampleBatch(Data()))
    verdict = CompileOptimization(CompileConfig(least_gain=-1e9)).check(context)
    assert isinstance(verdict, Applies), verdict
    assert ", compiled in " in verdict.note
    in_graph = Context(Lit(), Data(), Hardware.here(), example=ExampleBatch(Data()),
                       asked_for=frozenset({"cuda_graph_step"}))  # fmt: skip
    assert isinstance(CompileOptimization(CompileConfig(least_gain=-1e9)).check(in_graph), Applies)
    refused = CompileOptimization(CompileConfig(mode="reduce-overhead")).check(in_graph)
    assert isinstance(refused, Refuses)
    assert "mode='default' goes with it" in refused.reason
