"""SGD, Adam and AdamW with every hyperparameter on the device, against torch's own."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fasttrain.callbacks.cuda_graph_step.optimizer.device_numbers import DeviceNumbers
from fasttrain.callbacks.cuda_graph_step.optimizer.device_update import SGDValues, sgd_
from fasttrain.callbacks.cuda_graph_step.optimizer.dry_step import HostReads
from fasttrain.callbacks.cuda_graph_step.optimizer.group_update import UPDATES

STEPS = 50
# Relative to the largest value of a kind of tensors: a single moment may be what is left of two that cancel. Both round
# the same numbers, each in its own order, once an operation.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}

SGD_OPTIONS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, "maximize": maximize}
    for momentum, dampening, nesterov, decay, maximize in product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.01), (False, True)
    )
    if not (nesterov and (momentum == 0 or dampening != 0))
]
ADAM_OPTIONS = [
    {"amsgrad": amsgrad, "weight_decay": decay, "maximize": maximize, "eps": eps}
    for amsgrad, decay, maximize, eps in product((False, True), (0.0, 0.01), (False, True), (1e-8, 1e-3))
]
CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    *((SGD, {"lr": 0.1, **options}) for options in SGD_OPTIONS),
    *((cls, {"lr": 0.01, **options}) for cls in (Adam, AdamW) for options in ADAM_OPTIONS),
]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in ((7, 5), (5,), (), (2, 3, 4))
    ]


def set_gradients(optimizer: Optimizer, step: int, scale: float = 1.0) -> None:
    """Give each parameter a gradient of its own, the third one at every second step only."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            noise = gradient(parameter.shape, 100 * step + index)
            parameter.grad = None if index == 2 and step % 2 else (noise * scale).to(parameter.dtype)


@cache
def gradient(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def device_step(optimizer: Optimizer) -> None:
    """Take the step that `optimizer` would take, with device values."""
    update = UPDATES[type(optimizer)]
    for group in optimizer.param_groups:
        values = {
            name: torch.tensor(float(value), dtype=torch.float64)
            for name, value in zip(update.names, update.read(group), strict=True)
        }
        with torch.no_grad():
            update.update(optimizer, group, values)


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        found[f"param {index}"] = parameter.detach()
        found |= {f"{key} {index}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def assert_same(found: Optimizer, wanted: Optimizer, tolerance: float) -> None:
    ours, theirs = tensors_of(found), tensors_of(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        kind = name.split()[0]
        largest = max(float(other.abs().max()) for key, other in theirs.items() if key.startswith(f"{kind} "))
        error = (ours[name].double() - tensor.double()).abs().max() / largest
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(("cls", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_torch_over_many_steps(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = cls(parameters(dtype), **options), cls(parameters(dtype), **options)
    for step in range(STEPS):
        for optimizer in (ours, theirs):
            set_gradients(optimizer, step)
            optimizer.param_groups[0]["lr"] = options["lr"] / (1 + step)
        device_step(ours)
        theirs.step()
    assert_same(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize(("cls", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_read_on_the_host(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    optimizer = cls(parameters(dtype), **options)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(2.0)
    set_gradients(optimizer, 0)
    device_step(optimizer)
    with HostReads((), torch.device("cpu")) as reads:
        device_step(optimizer)
    assert reads.problems == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), (AdamW, {"lr": 0.01, "amsgrad": True})],
)
def test_half_precision_is_computed_in_float32_and_rounded_once(
    cls: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    ours, fused = cls(parameters(dtype), **options), cls(parameters(dtype), fused=True, **options)
    for step in range(2):
        for optimizer in (ours, fused):
            set_gradients(optimizer, step)
        device_step(ours)
        fused.step()
    # Where float32 values lie on either side of a rounding border, one unit in the last place.
    assert_same(ours, fused, torch.finfo(dtype).eps)
    equal = [(tensors_of(ours)[name] == tensor).double().mean() for name, tensor in tensors_of(fused).items()]
    assert sum(equal) / len(equal) > 0.98


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_a_skipped_step_changes_no_bit(cls: Any, options: dict[str, Any]) -> None:
    optimizer = cls(parameters(torch.float32), **options)
    for step in (0, 2):
        set_gradients(optimizer, step)
        device_step(optimizer)
    set_gradients(optimizer, 2)
    first, second, *_ = optimizer.param_groups[0]["params"]
    first.grad[0, 0], second.grad[1] = torch.inf, torch.nan
    before = {name: tensor.clone() for name, tensor in tensors_of(optimizer).items()}
    optimizer.found_inf, optimizer.grad_scale = torch.tensor([1.0]), torch.tensor(1024.0)
    device_step(optimizer)
    after = tensors_of(optimizer)
    for name, tensor in before.items():
        # Compared as integers: zeros may not even change their sign.
        assert torch.equal(after[name].view(torch.int32), tensor.view(torch.int32)), name


@pytest.mark.parametrize(("cls", "options"), [(SGD, {"lr": 0.1, "momentum": 0.9}), (Adam, {"lr": 0.01})])
def test_steps_are_skipped_as_by_torchs_grad_scaler(cls: Any, options: dict[str, Any]) -> None:
    scale = 1024.0  # a power of two: to divide by it rounds nothing
    ours, theirs = cls(parameters(torch.float32), **options), cls(parameters(torch.float32), **options)
    ours.grad_scale = torch.tensor(scale)
    for step in range(10):
        overflows = step in (0, 4)
        ours.found_inf = torch.tensor(float(overflows))
        set_gradients(ours, step, scale)
        set_gradients(theirs, step)
        if overflows:
            ours.param_groups[0]["params"][0].grad[0] = torch.inf
        else:
            theirs.step()
        device_step(ours)
    assert_same(ours, theirs, 1e-6)


def test_a_buffer_made_in_a_skipped_step_is_zero() -> None:
    param, grad = torch.ones(3), torch.full((3,), torch.nan)
    buffers: list[Tensor | None] = [None]
    values = SGDValues(*(torch.tensor(value, dtype=torch.float64) for value in (0.1, 0.9)), None, None)
    sgd_([param], [grad], buffers, values, found_inf=torch.tensor(1.0))
    assert buffers[0] is not None
    assert buffers[0].tolist() == [0, 0, 0]
    assert param.tolist() == [1, 1, 1]


def test_gradients_are_not_changed() -> None:
    optimizer = AdamW(parameters(torch.float32), lr=0.1, maximize=True)
    set_gradients(optimizer, 0)
    gradients = [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.grad_scale = torch.tensor(8.0)
    device_step(optimizer)
    assert all(
        torch.equal(p.grad, grad) for p, grad in zip(optimizer.param_groups[0]["params"], gradients, strict=True)
    )


@pytest.mark.parametrize("changed", [1, 3])
def test_only_numbers_that_changed_are_written(changed: int) -> None:
    tensors = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    numbers = DeviceNumbers(tensors)
    numbers.write([0.1, 0.2, 0.3, 0.4])
    versions = [tensor._version for tensor in tensors]
    numbers.write([0.1, 0.2, 0.3, 0.4])
    assert [tensor._version for tensor in tensors] == versions
    wanted = [1.5] * changed + [0.1, 0.2, 0.3, 0.4][changed:]
    assert numbers.differing(wanted) == list(range(changed))
    numbers.write(wanted)
    assert [tensor.item() for tensor in tensors] == wanted
    assert [tensor._version > before for tensor, before in zip(tensors, versions, strict=True)] == [
        index < changed for index in range(4)
    ]
    numbers.forget()
    assert numbers.differing(wanted) == [0, 1, 2, 3]
