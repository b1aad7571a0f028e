"""LAMB and LARS captured in a graph, in every precision, and torch's fused steps, on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer
from fasttrain.callbacks.optimizers import (
    LAMB,
    LARS,
    FusedOptimizers,
    FusedOptimizersConfig,
    FusedOptimizersOptimization,
)
from fasttrain.callbacks.optimizers.probe import OptimizerProbe
from fasttrain.environment import Hardware
from fasttrain.optimization import Applies, Context, Refuses

pytestmark = pytest.mark.gpu

STEPS = 20
SHAPES = ((64, 3, 3, 3), (257, 129), (129,), (), (0, 4), (1, 1))
GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "max_epochs": 2}

BY_HAND: list[Any] = [
    lambda groups, **options: LAMB(groups, **options),
    lambda groups, **options: LAMB(groups, bias_correction=False, max_grad_norm=None, adam_w_mode=False, **options),
    lambda groups, **options: LARS(groups, 0.1, weight_decay=1e-4, **options),
    lambda groups, **options: LARS(groups, 0.1, nesterov=True, lr_in_momentum=False, **options),
]
# By the kernels, which is the default here, and by multi-tensor operators.
MAKERS: list[Any] = [partial(make, fused=fused) for fused in (None, False) for make in BY_HAND]


def made(make: Any, dtype: torch.dtype, **options: Any) -> tuple[Optimizer, list[Tensor]]:
    """Return an optimizer with two groups, and its gradients, which stay where they are in memory."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in SHAPES]
    params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
    gradients = []
    for param in params:
        param.grad = torch.zeros_like(param)
        gradients.append(param.grad)
    return make([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], **options), gradients


def write(gradients: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for gradient in gradients:
        gradient.copy_(torch.randn(gradient.shape, generator=generator))


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    found = {}
    for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"parameter {index}"] = param.detach()
        found |= {f"{key} {index}": value for key, value in optimizer.state.get(param, {}).items()}
    return found


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Any) -> torch.cuda.CUDAGraph:
    """Take one step eagerly on a side stream, then capture one, which is not taken."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_replays_with_a_changing_rate_equal_eager_steps(make: Any, dtype: torch.dtype, master: bool) -> None:
    (graphed, its_gradients), (stepped, other_gradients), (plain, plain_gradients) = (
        made(make, dtype, master_weights=master) for _ in range(3)
    )
    device = torch.device("cuda", torch.cuda.current_device())
    ours, theirs = CapturableOptimizer(graphed, device), CapturableOptimizer(stepped, device)
    assert ours.problem() is None
    schedulers = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (graphed, stepped, plain)]

    def prepared_step(optimizer: Optimizer, capturable: CapturableOptimizer) -> None:
        with capturable.prepared():
            optimizer.step()

    for gradients in (its_gradients, other_gradients, plain_gradients):
        write(gradients, 0)
    graph = captured(lambda: prepared_step(graphed, ours))
    prepared_step(stepped, theirs)
    plain.step()
    for step in range(1, STEPS + 1):
        for scheduler in schedulers:
            scheduler.step()
        for gradients in (its_gradients, other_gradients, plain_gradients):
            write(gradients, step)
        with no_waiting():
            ours.upload()
            graph.replay()
        prepared_step(stepped, theirs)
        plain.step()
    found, wanted, unprepared = tensors_of(graphed), tensors_of(stepped), tensors_of(plain)
    assert found.keys() == wanted.keys() == unprepared.keys()
    assert not [name for name in found if not torch.equal(found[name], wanted[name])]
    assert not any(tensor.isnan().any() for tensor in found.values())
    for name, tensor in unprepared.items():
        if tensor.numel():
            # A rate and corrections in fp32 on the device, in place of Python numbers.
            tolerance = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            error = (found[name].double().cpu() - tensor.double().cpu()).abs().max()
            assert error <= tolerance * tensor.double().abs().max().cpu().clamp_min(1e-3), name


@pytest.mark.parametrize("make", MAKERS)
def test_a_capturable_step_with_all_numbers_on_the_device_waits_for_nothing(make: Any) -> None:
    (graphed, its_gradients), (stepped, other_gradients) = made(make, torch.float32), made(make, torch.float32)
    for group in graphed.param_groups + stepped.param_groups:
        for name, value in list(group.items()):
            if type(value) is float:
                group[name] = torch.tensor(value, device="cuda")
        if "betas" in group:
            group["betas"] = tuple(torch.tensor(beta, device="cuda") for beta in group["betas"])
            group["capturable"] = True
    for gradients in (its_gradients, other_gradients):
        write(gradients, 0)
    stepped.step()
    graph = captured(graphed.step)
    for step in range(1, 6):
        for optimizer, gradients in ((graphed, its_gradients), (stepped, other_gradients)):
            write(gradients, step)
            for group in optimizer.param_groups:
                group["lr"].mul_(0.5)
                group["weight_decay"].add_(0.01)
        with no_waiting():
            graph.replay()
            stepped.step()
    found, wanted = tensors_of(graphed), tensors_of(stepped)
    assert not [name for name in found if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("cls", [LAMB, LARS])
def test_a_lightning_fit_replays_their_steps(cls: Any, precision: Any) -> None:
    def schedule(optimizer: Optimizer) -> Any:
        return {"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step / 10)), "interval": "step"}

    ours, eager = same_start(lambda: Small(lambda params: cls(list(params), lr=0.01, weight_decay=0.01), schedule))
    graph = CUDAGraphStep(on_failure="error")
    data = batches(50, rows=(16,))
    trainer = fit(ours, data, graph, **GPU, precision=precision)
    expected = fit(eager, data, CUDAGraphStep(warm_up=10**9), **GPU, precision=precision)
    assert graph.pool.hits > 60, graph.notes
    assert not [note for note in graph.notes if "outside" in note], graph.notes
    assert_same_state(trainer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("make", BY_HAND)
def test_the_kernels_equal_the_multi_tensor_operators(make: Any, master: bool, dtype: torch.dtype) -> None:
    (ours, mine), (theirs, its) = (made(make, dtype, master_weights=master, fused=fused) for fused in (True, False))
    (again, same) = made(make, dtype, master_weights=master, fused=True)
    for step in range(STEPS):
        for optimizer, gradients in ((ours, mine), (theirs, its), (again, same)):
            write(gradients, step)
            optimizer.step()
    found, wanted, repeated = tensors_of(ours), tensors_of(theirs), tensors_of(again)
    assert not [name for name in found if not torch.equal(found[name], repeated[name])], "the same bits twice"
    for name, tensor in wanted.items():
        if tensor.numel():
            tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            error = (found[name].double().cpu() - tensor.double().cpu()).abs().max()
            assert error <= tolerance * tensor.double().abs().max().cpu().clamp_min(1e-3), name


@pytest.mark.parametrize("make", BY_HAND)
def test_captures_with_gradients_at_addresses_of_their_own(make: Any) -> None:
    """Two captures in a row, the second without pinned memory left, then eager steps and both replays by turns."""

    def another(optimizer: Optimizer) -> Any:
        if isinstance(optimizer, LAMB):
            optimizer.param_groups[0]["capturable"] = True
        sources = [torch.zeros_like(p) for group in optimizer.param_groups for p in group["params"]]

        def step() -> None:
            params = (p for group in optimizer.param_groups for p in group["params"])
            for param, source in zip(params, sources, strict=True):
                param.grad = source * 2
            optimizer.step()

        return step, sources

    (graphed, _), (stepped, _) = made(make, torch.float32, fused=True), made(make, torch.float32, fused=True)
    (step, sources), (eager_step, eager_sources) = another(graphed), another(stepped)
    write(sources, 0)
    write(eager_sources, 0)
    first = captured(step)
    eager_step()
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, capture_error_mode="thread_local"):
        step()
    for number in range(1, 10):
        write(sources, number)
        write(eager_sources, number)
        if number % 3 == 0:
            step()
        else:
            (first if number % 3 == 1 else second).replay()
        with no_waiting():
            eager_step()
        filler = [torch.full((number * 100,), -1, device="cuda") for _ in range(50)]  # over what was freed
        pinned = torch.full((2**12,), -1).pin_memory()
    torch.cuda.synchronize()
    assert len(filler) == 50
    assert pinned.is_pinned()
    assert len(graphed.tables.kept) > 0  # type: ignore[attr-defined]
    found, wanted = tensors_of(graphed), tensors_of(stepped)
    assert not [name for name in found if not torch.equal(found[name], wanted[name])]


def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    elements = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 22 * elements:
        pytest.skip("needs 47 GB of GPU memory")
    param = nn.Parameter(torch.ones(elements, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = LAMB([param], lr=0.5, fused=True)
    optimizer.step()
    first = optimizer.state[param]["exp_avg"]
    assert first[-1] > 0
    assert torch.equal(first[-1], first[0])
    assert torch.equal(param[-5:], param[:5])
    assert param[-1] < 1


class Deep(pl.LightningModule):
    """Many small parameters, which is where the implementations differ."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)])
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.parametrize(
    "make", [lambda params: AdamW(params, lr=0.01), lambda params: SGD(params, lr=0.1, momentum=0.9)]
)
def test_the_plan_measures_and_chooses_here(make: Any) -> None:
    module = Deep(make)
    times = OptimizerProbe(module, "cuda:0").compare_implementations(["fused", "foreach"])
    assert set(times) == {"plain", "fused", "foreach"}
    verdict = FusedOptimizersOptimization(FusedOptimizersConfig()).check(Context(module, None, Hardware.here()))  # type: ignore[arg-type]
    assert isinstance(verdict, Applies | Refuses)
    assert "fused " in (verdict.note if isinstance(verdict, Applies) else verdict.reason)
    assert next(module.parameters()).device.type == "cpu", "the module itself stays where it is"


class Seen(pl.Callback):
    """Keeps the optimizer's saved state, and where its own is while training."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        # Copied, because Lightning moves the tensors of the optimizer's own dictionaries to the CPU at the end.
        self.saved = {key: dict(state) for key, state in optimizer.state_dict()["state"].items()}
        self.inside = {state["step"].device.type for state in optimizer.state.values() if "step" in state}


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_checkpoints_are_those_of_the_plain_optimizer(implementation: Any) -> None:
    ours, plain, seen, plain_seen = *same_start(lambda: Small(lambda p: AdamW(p, lr=0.01))), Seen(), Seen()
    fit(ours, batches(4, rows=(16,)), callbacks=[FusedOptimizers(implementation), seen], **GPU)
    fit(plain, batches(4, rows=(16,)), callbacks=[plain_seen], **GPU)
    assert seen.inside == ({"cuda"} if implementation == "fused" else {"cpu"})
    places = [
        {key: (value.device, value.dtype) for key, value in state.items()}
        for saved in (seen.saved, plain_seen.saved)
        for state in saved.values()
    ]
    assert places[: len(places) // 2] == places[len(places) // 2 :]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_fused_steps_train_as_plain_ones_with_clipping(cls: Any, precision: Any, graph: bool) -> None:
    numbers = {"momentum": 0.9} if cls is SGD else {}
    ours, plain = same_start(lambda: Small(lambda params: cls(params, lr=2**-8, **numbers)))
    options: dict[str, Any] = {**GPU, "precision": precision, "gradient_clip_val": 0.5}
    callback, exact = FusedOptimizers(), precision == "32-true"
    trainer = fit(
        ours, batches(50, rows=(16,)), CUDAGraphStep(on_failure="error") if graph else None, callbacks=[callback],
        **options,
    )  # fmt: skip
    expected = fit(plain, batches(50, rows=(16,)), **options)
    assert callback.changes
    # Under autocast a weight that differs by a rounding may be cast to the neighbouring number.
    assert_same_state(trainer, expected, **({"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 5e-2, "atol": 5e-3}))
    steps = [state["step"] for state in trainer.optimizers[0].state.values() if "step" in state]
    assert all(step.device.type == "cpu" for step in steps), "given back as a plain optimizer has it"
