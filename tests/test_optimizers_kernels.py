"""LAMB's and LARS's Triton kernels against the multi-tensor operators and the papers' formulas."""

import copy
import io
from typing import Any

import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optimizers import Reference, as_parameters, assert_close, gradients, rate, set_gradients, train, values
from torch import Tensor, nn
from torch.optim import Optimizer

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.optimizers import LAMB, LARS
from fasttrain.callbacks.optimizers.reference import TOLERANCE
from fasttrain.callbacks.optimizers.tables import DeviceTables
from fasttrain.callbacks.optimizers.tiers import Tiling, is_dense, takes_kernels

pytest.importorskip("triton")
from fasttrain.callbacks.optimizers.kernel import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED.value, reason="parameters on the CPU are for Triton's interpreter")

CPU = torch.device("cpu")
SMALL = Tiling(chunk=8, block=4)
"""Tensors of several chunks, whole blocks and blocks in part."""
SHAPES = ((5, 4), (), (0, 3))
MAKERS: list[Any] = [
    lambda params, **options: LAMB(params, betas=(0.9, 0.99), **options),
    lambda params, **options: LARS(params, 0.1, weight_decay=0.01, **options),
]


def by_kernels(optimizer: Any, tiling: Tiling = SMALL) -> Any:
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.tiling = tiling
    return optimizer


def state_of(optimizer: Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    return [value for param in params for value in (param.detach(), *optimizer.state[param].values())]


LAMB_OPTIONS = [
    {},
    {"max_grad_norm": None, "adam_w_mode": False},
    {"bias_correction": False, "grad_averaging": False, "weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True, "max_grad_norm": 0.5},
    {"adapt": False, "betas": (0.0, 0.5)},
]
LARS_OPTIONS = [
    {},
    {"nesterov": True, "lr_in_momentum": False},
    {"momentum": 0.0, "eps": 1e-3, "trust_coefficient": 0.1},
    {"adapt": False, "weight_decay": 0.0},
]


@pytest.mark.parametrize("options", LAMB_OPTIONS)
def test_lamb_equals_the_paper(options: dict[str, Any]) -> None:
    numbers = {"betas": (0.9, 0.99), **options}
    most = numbers.pop("max_grad_norm", 1.0)
    start = [value.float().double() for value in values(SHAPES, 1)]
    reference, params = Reference(start, [numbers] * len(SHAPES), most), as_parameters(start, torch.float32)
    for step in range(4):
        reference.lamb(gradients(step, SHAPES), rate(step))
    optimizer = by_kernels(LAMB(params, max_grad_norm=most, **numbers))
    train(optimizer, params, range(4))
    assert_close(params, reference.params, TOLERANCE[torch.float32])
    assert [int(optimizer.state[param]["step"]) for param in params] == reference.steps


@pytest.mark.parametrize("options", LARS_OPTIONS)
def test_lars_equals_the_paper(options: dict[str, Any]) -> None:
    start = [value.float().double() for value in values(SHAPES, 1)]
    reference, params = Reference(start, [options] * len(SHAPES)), as_parameters(start, torch.float32)
    for step in range(4):
        reference.lars(gradients(step, SHAPES), rate(step))
    train(by_kernels(LARS(params, 0.1, **{"weight_decay": 0.01, **options})), params, range(4))
    assert_close(params, reference.params, TOLERANCE[torch.float32])


@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), min_size=2, max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    is_lamb=st.booleans(),
    master=st.booleans(),
    keep=st.booleans(),
    size=st.sampled_from([1e-3, 100.0]),
)
def test_they_equal_the_multi_tensor_operators(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, is_lamb: bool, master: bool, keep: bool, size: float
) -> None:
    start = values(shapes, 1)
    mine, its = as_parameters(start, dtype), as_parameters(start, dtype)
    make = MAKERS[0 if is_lamb else 1]
    ours = by_kernels(make(mine, master_weights=master), Tiling(chunk=8, block=4, keep_updates=keep))
    theirs = make(its, master_weights=master)
    train(ours, mine, range(2), size)
    train(theirs, its, range(2), size)
    # Both are that near to the reference, so twice that to each other; a weight of which the update leaves little shows
    # it. The interpreter truncates to bfloat16 where a GPU rounds.
    tolerance = 2 * TOLERANCE[dtype] if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert_close(state_of(ours, mine), [each.double() for each in state_of(theirs, its)], tolerance)
    if dtype != torch.float32 and master:
        for param, other in zip(mine, its, strict=True):
            assert_close(
                [ours.state[param]["master_weight"]],
                [theirs.state[other]["master_weight"].double()],
                2 * TOLERANCE[torch.float32],
            )


def test_groups_have_their_own_numbers_and_share_the_clip_with_those_of_other_operators() -> None:
    options: list[dict[str, Any]] = [{}, {"weight_decay": 0.0, "betas": (0.5, 0.6)}, {"use_nvlamb": True}]
    reference = Reference([value.float().double() for value in values(SHAPES, 1)], options, 1.0)
    params = [nn.Parameter(p.float() if i < 2 else p.clone()) for i, p in enumerate(reference.params)]
    groups = [
        {"params": [p], **numbers, "fused": i < 2} for i, (p, numbers) in enumerate(zip(params, options, strict=True))
    ]
    optimizer = LAMB(groups, betas=(0.9, 0.99))
    optimizer.tiling = SMALL
    for step in range(3):
        reference.lamb(gradients(step, SHAPES), rate(step))
    train(optimizer, params, range(3))
    assert_close(params, reference.params, TOLERANCE[torch.float32])


@pytest.mark.parametrize("make", MAKERS)
def test_memory_in_any_order(make: Any) -> None:
    image = torch.randn(2, 3, 2, 2)
    mine = [nn.Parameter(image.clone(memory_format=torch.channels_last)), nn.Parameter(torch.randn(3, 2).t())]
    mine.append(nn.Parameter(torch.randn(9)[1:]))  # at no multiple of 16 bytes
    its = [nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)) for param in mine]
    ours, theirs = by_kernels(make(mine)), make(its)
    for step in range(2):
        for param, other in zip(mine, its, strict=True):
            other.grad = torch.randn(other.shape)
            param.grad = other.grad.clone()  # contiguous
            if step == 1:
                other.grad = torch.full((1,) * other.dim(), 0.5).expand(other.shape)
                param.grad = other.grad
        ours.step()
        theirs.step()
        if step == 0:  # as a checkpoint from before the model was put in this order has it
            for param in mine:
                state = ours.state[param]
                state |= {key: value.contiguous() for key, value in state.items()}
    for param, other in zip(mine, its, strict=True):
        torch.testing.assert_close(param, other)
        assert not param.is_contiguous() or param.dim() == 1
        for key, value in ours.state[param].items():
            torch.testing.assert_close(value, theirs.state[other][key])
            assert value.dim() == 0 or value.stride() == param.stride()


@pytest.mark.parametrize("make", MAKERS)
def test_numbers_on_the_device_are_followed(make: Any) -> None:
    plain_params, params = as_parameters(values(SHAPES), torch.float32), as_parameters(values(SHAPES), torch.float32)
    plain, ours = make(plain_params), by_kernels(make(params))
    (group,) = ours.param_groups
    for name, value in list(group.items()):
        if type(value) is float:
            group[name] = torch.tensor(value, dtype=torch.float64 if name == "eps" else torch.float32)
    if "betas" in group:
        group["betas"] = tuple(map(torch.tensor, group["betas"]))
    train(plain, plain_params, range(3))
    for step in range(3):
        set_gradients(params, gradients(step, SHAPES))
        group["lr"].fill_(rate(step))
        ours.step()
    assert_close(params, [p.detach().double() for p in plain_params], 1e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_a_step_is_the_same_twice_and_after_a_checkpoint(make: Any) -> None:
    params = as_parameters(values(SHAPES), torch.float16)
    optimizer = by_kernels(make(params, master_weights=True))
    train(optimizer, params, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copied, others = copy.deepcopy((optimizer, params))
    assert copied.tables is not optimizer.tables
    copied.tiling = SMALL  # of this one object
    third = as_parameters([p.detach() for p in params], torch.float16)
    loaded = make(third, master_weights=True)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    loaded.tiling = SMALL
    assert loaded.param_groups[0]["fused"]
    for each, its in ((optimizer, params), (copied, others), (loaded, third)):
        train(each, its, range(2, 4))
    for each, its in ((copied, others), (loaded, third)):
        found, wanted = state_of(each, its), state_of(optimizer, params)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("make", MAKERS)
def test_training_goes_on_by_the_other_operators_and_back(make: Any) -> None:
    mine, its = as_parameters(values(SHAPES), torch.float32), as_parameters(values(SHAPES), torch.float32)
    ours, theirs = make(mine), make(its)
    saved = ours.state_dict()
    del saved["param_groups"][0]["fused"]  # as saved before there was one
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["fused"] is None
    ours.tiling = SMALL
    for step, fused in enumerate((True, False, True, None)):
        ours.param_groups[0]["fused"] = fused
        train(ours, mine, range(step, step + 1))
    train(theirs, its, range(4))
    assert_close(state_of(ours, mine), [each.double() for each in state_of(theirs, its)], 1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_gradients_that_are_no_numbers_come_through_a_clip_as_with_the_other_operators(bad: float) -> None:
    mine, its = as_parameters(values(SHAPES, 2), torch.float32), as_parameters(values(SHAPES, 2), torch.float32)
    ours, theirs = by_kernels(LAMB(mine)), LAMB(its)
    for params, optimizer in ((mine, ours), (its, theirs)):
        set_gradients(params, [torch.full(SHAPES[0], bad), torch.ones(()), torch.zeros(SHAPES[2])])
        optimizer.step()
    for found, wanted in zip(state_of(ours, mine), state_of(theirs, its), strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
    assert mine[0].isnan().all()


def test_a_lightning_fit_replays_their_steps() -> None:
    ours, plain = same_start(lambda: Small(lambda params: LAMB(list(params), lr=0.01)))
    ours.make = lambda params: LAMB(list(params), lr=0.01, fused=True)
    graph = CUDAGraphStep(on_failure="error", stand_in=True)
    trainer, expected = fit(ours, batches(3), graph), fit(plain, batches(3))
    assert graph.pool.hits > 0, graph.notes
    assert not [note for note in graph.notes if "outside" in note], graph.notes
    assert_same_state(trainer, expected, rtol=1e-5, atol=1e-6)


def test_tables_are_made_once_and_never_changed() -> None:
    tables = DeviceTables()
    assert tables.last("a", CPU) is None
    first = tables.get("a", [3, 2**60 + 1], torch.int64, CPU)
    assert first.tolist() == [3, 2**60 + 1]
    assert tables.get("a", (3, 2**60 + 1), torch.int64, CPU) is first
    assert tables.last("a", CPU) == (3, 2**60 + 1)
    second = tables.get("a", [4], torch.int64, CPU, lambda numbers: [*numbers, *numbers])
    assert (first.tolist(), second.tolist()) == ([3, 2**60 + 1], [4, 4])
    assert tables.get("b", [0.1], torch.float64, CPU).item() == 0.1
    assert copy.deepcopy(tables).last("a", CPU) is None
    assert tables.kept == []


def test_what_is_dense() -> None:
    made = torch.empty(2, 3, 4, 5)
    ordered = made.contiguous(memory_format=torch.channels_last)
    for dense in (
        made,
        made.permute(2, 0, 3, 1),
        made[1:],
        ordered,
        ordered[1:],
        torch.empty(()),
        torch.empty(0, 3).t(),
    ):
        assert is_dense(dense)
    assert [is_dense(each) for each in (made[:, 1:], made[..., ::2], made[:, 0], torch.ones(1).expand(3))] == [
        False
    ] * 4


@pytest.mark.parametrize(
    ("param", "reason"),
    [
        (torch.zeros(3, dtype=torch.float64), "it is float64, and they take float32, float16, bfloat16"),
        (torch.zeros(3, device="meta"), "it is on meta, and they run on NVIDIA GPUs"),
        (
            torch.zeros(3, 2)[:, 1],
            r"its elements don't fill its memory, with strides \(2,\), and they walk through it",
        ),
    ],
)
def test_parameters_without_a_kernel(param: Tensor, reason: str) -> None:
    param = nn.Parameter(param)
    param.grad = torch.ones_like(param)
    message = rf"^LAMB\(fused=True\) has no kernel for a parameter of shape \(3,\): {reason}; with fused=None such "
    with pytest.raises(RuntimeError, match=message):
        LAMB([param], fused=True).step()
    LAMB([param]).step()


def test_by_default_parameters_on_the_cpu_take_the_other_operators() -> None:
    assert not takes_kernels(torch.zeros(3), None, "LAMB")
    assert takes_kernels(torch.zeros(3), True, "LAMB")
    assert not takes_kernels(torch.zeros(3), False, "LAMB")
