"""LAMB and LARS against their papers' formulas, as torch optimizers, and prepared for a graph."""

import copy
import io
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fasttrain.callbacks import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.loss_scaler import DeviceGradScaler
from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer
from fasttrain.callbacks.cuda_graph_step.optimizer.dry_step import LEARNING_RATE, HostReads
from fasttrain.callbacks.optimizers import LAMB, LARS, parameter_groups
from fasttrain.callbacks.optimizers.reference import TOLERANCE, clip_divisor, lamb, lars
from fasttrain.callbacks.optimizers.tensor_lists import buckets, each

DEVICE = torch.device("cpu")
SHAPES: tuple[tuple[int, ...], ...] = ((5, 4), (4,), (), (1, 1), (0, 3), (2, 3, 2, 2))
FEW = ((3, 2), (2,), (1, 1))  # for tests of many combinations
LAMB_OPTIONS = ("bias_correction", "grad_averaging", "adam_w_mode", "use_nvlamb")
Gradients = Sequence[Tensor | None]


def values(shapes: Sequence[tuple[int, ...]] = SHAPES, zeros: int = 3) -> list[Tensor]:
    """Return start values in float64; the one at index `zeros` is 0."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.zeros_like(value) if index == zeros else value for index, value in enumerate(made)]


@cache
def gradients(step: int, shapes: tuple[tuple[int, ...], ...] = SHAPES, size: float = 1.0) -> Gradients:
    """Return a step's gradients in float64, that fp16 holds exactly; one is 0 at times, one is not there at times."""
    generator = torch.Generator().manual_seed(100 + step)
    made: list[Tensor | None] = [size * torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]
    if step % 3 == 1:
        made[1] = torch.zeros(shapes[1], dtype=torch.float64)
    if step % 4 == 2:
        made[0] = None
    return made


def rate(step: int) -> float:
    return 0.02 * min(1.0, (step + 1) / 5) * (1 - step / 100)


class Reference:
    """The papers' steps in float64 on parameters in groups, each with options of its own."""

    def __init__(self, params: Sequence[Tensor], options: Sequence[dict[str, Any]], max_grad_norm: float | None = None):
        self.params, self.options, self.max_grad_norm = [p.clone() for p in params], options, max_grad_norm
        self.first, self.second = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.steps = [0] * len(self.params)

    def lamb(self, grads: Gradients, lr: float) -> None:
        divisor = clip_divisor([g for g in grads if g is not None], self.max_grad_norm)
        for i, grad in enumerate(grads):
            if grad is not None:
                self.steps[i] += 1
                self.params[i], self.first[i], self.second[i] = lamb(
                    self.params[i], grad, self.first[i], self.second[i], self.steps[i], divisor=divisor,
                    **{"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01, **self.options[i]},
                )  # fmt: skip

    def lars(self, grads: Gradients, lr: float) -> None:
        for i, grad in enumerate(grads):
            if grad is not None:
                numbers = {"lr": lr, "momentum": 0.9, "weight_decay": 0.01, **self.options[i]}
                self.params[i], self.first[i] = lars(self.params[i], grad, self.first[i], **numbers)


def as_parameters(params: Sequence[Tensor], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(value.to(dtype, copy=True)) for value in params]


def set_gradients(params: Sequence[nn.Parameter], grads: Gradients) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.to(param.dtype)


def train(optimizer: Optimizer, params: Sequence[nn.Parameter], steps: range, size: float = 1.0) -> None:
    shapes = tuple(tuple(p.shape) for p in params)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        set_gradients(params, gradients(step, shapes, size))
        optimizer.step()


def assert_close(params: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for index, (found, wanted) in enumerate(zip(params, expected, strict=True)):
        if wanted.numel():
            error = (found.double() - wanted).abs().max() / wanted.abs().max()
            assert error <= tolerance, f"parameter {index}: relative error {error:.1e}"


@pytest.mark.parametrize(("decay", "max_norm"), [(0.0, None), (0.0, 1.0), (0.01, None), (0.01, 1.0)])
@pytest.mark.parametrize("switches", list(product([True, False], repeat=4)))
def test_lamb_equals_the_paper_in_every_combination(
    switches: tuple[bool, ...], decay: float, max_norm: float | None
) -> None:
    options = {**dict(zip(LAMB_OPTIONS, switches, strict=True)), "weight_decay": decay}
    reference = Reference(values(FEW, 2), [options] * len(FEW), max_norm)
    params = as_parameters(values(FEW, 2), torch.float64)
    optimizer = LAMB(params, betas=(0.9, 0.99), max_grad_norm=max_norm, **options)  # type: ignore[arg-type]
    for step in range(8):
        reference.lamb(gradients(step, FEW), rate(step))
    train(optimizer, params, range(8))
    assert_close(params, reference.params, TOLERANCE[torch.float64])


LARS_OPTIONS = {
    "nesterov": (False, True),
    "lr_in_momentum": (True, False),
    "adapt": (True, False),
    "weight_decay": (0.0, 0.01),
    "momentum": (0.9, 0.0),
    "eps": (0.0, 1e-3),
}


@pytest.mark.parametrize("choice", list(product(*LARS_OPTIONS.values())))
def test_lars_equals_the_paper_in_every_combination(choice: tuple[Any, ...]) -> None:
    options = {"trust_coefficient": 0.1, **dict(zip(LARS_OPTIONS, choice, strict=True))}
    if options["nesterov"] and not options["momentum"]:
        return
    reference = Reference(values(FEW, 2), [options] * len(FEW))
    params = as_parameters(values(FEW, 2), torch.float64)
    optimizer = LARS(params, 0.1, **options)
    for step in range(8):
        reference.lars(gradients(step, FEW), rate(step))
    train(optimizer, params, range(8))
    assert_close(params, reference.params, TOLERANCE[torch.float64])


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_dtype_is_within_its_tolerance(dtype: torch.dtype, capturable: bool, master: bool) -> None:
    start = [value.to(dtype).double() for value in values()]
    reference, other = Reference(start, [{}] * len(SHAPES), 1.0), Reference(start, [{}] * len(SHAPES))
    params, others = as_parameters(start, dtype), as_parameters(start, dtype)
    for step in range(50):
        reference.lamb(gradients(step), rate(step))
        other.lars(gradients(step), rate(step))
    train(LAMB(params, betas=(0.9, 0.99), capturable=capturable, master_weights=master), params, range(50))
    train(LARS(others, 0.1, weight_decay=0.01, master_weights=master), others, range(50))
    tolerance = TOLERANCE[dtype] if dtype == torch.float32 or not master else torch.finfo(dtype).eps
    assert_close(params, reference.params, tolerance)
    assert_close(others, other.params, tolerance)
    assert all(p.dtype == dtype for p in params)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=2, max_size=5).map(tuple),
    zeros=st.integers(0, 4),
    size=st.sampled_from([1e-3, 1.0, 100.0]),
    most_elements=st.sampled_from([1, 7, 10**6]),
    is_lamb=st.booleans(),
)
def test_any_shapes_in_any_buckets(
    shapes: tuple[tuple[int, ...], ...], zeros: int, size: float, most_elements: int, is_lamb: bool
) -> None:
    start = values(shapes, zeros)
    params = as_parameters(start, torch.float64)
    reference = Reference(start, [{}] * len(shapes), 1.0)
    optimizer = LAMB(params, betas=(0.9, 0.99)) if is_lamb else LARS(params, 0.1, weight_decay=0.01)
    optimizer.most_elements = most_elements
    for step in range(5):
        (reference.lamb if is_lamb else reference.lars)(gradients(step, shapes, size), rate(step))
    train(optimizer, params, range(5), size)
    assert_close(params, reference.params, TOLERANCE[torch.float64])


def test_buckets_hold_one_dtype_and_so_many_elements() -> None:
    params = as_parameters(values(), torch.float32) + as_parameters(values(FEW), torch.float16)
    params.append(nn.Parameter(torch.zeros(3)))  # without a gradient it is left out
    for param in params[:-1]:
        param.grad = torch.zeros_like(param)
    sizes = [[param.numel() for param in bucket] for bucket in buckets(params, 24)]
    assert sizes == [[20, 4], [1, 1, 0], [24], [6, 2, 1]]
    assert [len(bucket) for bucket in buckets(params)] == [6, 3]


def test_groups_have_their_own_numbers_and_share_the_clip() -> None:
    options = [{}] * 2 + [{"weight_decay": 0.0}] + [{"weight_decay": 0.0, "use_nvlamb": True, "betas": (0.5, 0.6)}] * 3
    reference = Reference(values(), options, 1.0)
    params = as_parameters(values(), torch.float64)
    groups = [{"params": params[:2]}, {"params": params[2:3], **options[2]}, {"params": params[3:], **options[3]}]
    for step in range(20):
        reference.lamb(gradients(step), rate(step))
    train(LAMB(groups, betas=(0.9, 0.99)), params, range(20))
    assert_close(params, reference.params, TOLERANCE[torch.float64])


def test_the_clip_makes_large_gradients_the_same_as_small_ones() -> None:
    moved = []
    for size in (1.0, 1000.0):
        params = as_parameters(values(), torch.float64)
        train(LAMB(params, eps=0.0, betas=(0.9, 0.99)), params, range(5), size)
        moved.append([p.detach() for p in params])
    assert_close(moved[1], moved[0], 1e-9)
    for max_norm in (0.5, 4.0):
        optimizer = LAMB(params, max_grad_norm=max_norm)
        set_gradients(params, [torch.full_like(p, 50.0) for p in params])
        optimizer.step()
        clipped = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in params]) / 0.1
        assert clipped.norm().item() == pytest.approx(max_norm)
        assert all(bool((p.grad == 50).all()) for p in params if p.grad is not None), "the gradients are left alone"


def test_a_layer_without_adaptation_takes_adamws_and_sgds_steps() -> None:
    ours, theirs = as_parameters(values(), torch.float64), as_parameters(values(), torch.float64)
    numbers: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
    train(LAMB(ours, max_grad_norm=None, adapt=False, **numbers), ours, range(20))
    train(AdamW(theirs, **numbers), theirs, range(20))
    assert_close(ours, theirs, 1e-10)
    ours, theirs = as_parameters(values(), torch.float64), as_parameters(values(), torch.float64)
    numbers = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    train(LARS(ours, 0.1, adapt=False, lr_in_momentum=False, **numbers), ours, range(20))
    train(SGD(theirs, 0.1, **numbers), theirs, range(20))
    assert_close(ours, theirs, 1e-10)


MAKERS = [
    lambda params, **options: LAMB(params, **options),
    lambda params, **options: LAMB(params, capturable=True, max_grad_norm=None, adam_w_mode=False, **options),
    lambda params, **options: LARS(params, 0.1, weight_decay=0.01, **options),
    lambda params, **options: LARS(params, 0.1, nesterov=True, lr_in_momentum=False, **options),
]


@pytest.mark.parametrize("make", MAKERS)
def test_numbers_on_the_device_are_followed_and_never_read(make: Any) -> None:
    plain_params, params = as_parameters(values(), torch.float32), as_parameters(values(), torch.float32)
    plain, ours = make(plain_params), make(params)
    (group,) = ours.param_groups
    for name, value in list(group.items()):
        if type(value) is float:
            group[name] = torch.tensor(value)
    if "betas" in group:
        group["betas"] = tuple(map(torch.tensor, group["betas"]))
    train(plain, plain_params, range(4))
    for step in range(4):
        set_gradients(params, gradients(step))
        group["lr"].fill_(rate(step))
        with HostReads([(group["lr"], LEARNING_RATE)], DEVICE) as reads:
            ours.step()
        assert reads.problems == {}
    assert_close(params, [p.detach().double() for p in plain_params], 1e-5)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("make", MAKERS[1:])
def test_steps_run_where_there_is_nothing_to_read(make: Any, master: bool) -> None:
    params = [nn.Parameter(torch.ones(3, 2, dtype=d, device="meta")) for d in (torch.float32, torch.bfloat16)]
    optimizer = make(params, master_weights=master)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(value.device.type == "meta" for state in optimizer.state.values() for value in state.values())


def test_steps_counted_on_the_host_are_numbers_to_a_device() -> None:
    param = nn.Parameter(torch.ones(3, 2, device="meta"))
    param.grad = torch.ones_like(param)
    optimizer = LAMB([param])
    optimizer.step()
    optimizer.step()
    assert optimizer.state[param]["step"].device == DEVICE
    assert optimizer.state[param]["step"] == 2
    vector = torch.tensor([0.5, 2.0], dtype=torch.float64)
    assert each(vector, torch.device("meta"), torch.float32) == [0.5, 2.0]
    assert [type(scalar) for scalar in each(vector, DEVICE, torch.float32)] == [Tensor, Tensor]


@pytest.mark.parametrize("make", MAKERS)
def test_the_graph_step_takes_them_and_follows_a_schedule(make: Any) -> None:
    plain_params, params = as_parameters(values(), torch.float32), as_parameters(values(), torch.float32)
    plain, ours = make(plain_params), make(params)
    set_gradients(params, gradients(0))
    capturable = CapturableOptimizer(ours, DEVICE)
    assert capturable.problem() is None
    schedulers = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (plain, ours)]
    for step in range(12):
        set_gradients(plain_params, gradients(step))
        set_gradients(params, gradients(step))
        plain.step()
        with capturable.prepared():
            assert isinstance(ours.param_groups[0]["lr"], Tensor)
            ours.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_close(params, [p.detach().double() for p in plain_params], 1e-5)
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert capturable.changed_inside == ()


@pytest.mark.parametrize("make", [MAKERS[0], MAKERS[2]])
def test_a_lightning_fit_replays_their_steps(make: Any) -> None:
    def schedule(optimizer: Optimizer) -> Any:
        return {"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}

    ours, plain = same_start(lambda: Small(lambda params: make(list(params)), schedule))
    graph = CUDAGraphStep(on_failure="error", stand_in=True)
    trainer, expected = fit(ours, batches(12), graph), fit(plain, batches(12))
    assert graph.pool.hits > 10, graph.notes
    assert not [note for note in graph.notes if "outside" in note], graph.notes
    assert_same_state(trainer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, DeviceGradScaler])
@pytest.mark.parametrize("make", MAKERS)
def test_loss_scalers_unscale_and_skip(make: Any, scaler_class: Any) -> None:
    plain_params, params = as_parameters(values(), torch.float32), as_parameters(values(), torch.float32)
    plain, ours, scaler = make(plain_params), make(params), scaler_class("cpu", init_scale=2.0**8)
    for step, is_bad in enumerate((False, False, True, False)):
        scale = float(scaler.scale(torch.ones(())))
        set_gradients(params, [None if g is None else g * scale for g in gradients(step)])
        set_gradients(plain_params, gradients(step))
        if is_bad:
            params[2].grad = torch.tensor(torch.inf)
        else:
            plain.step()
        scaler.step(ours)
        scaler.update()
    assert_close(params, [p.detach().double() for p in plain_params], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_resumed_training_is_the_same_bit_for_bit(make: Any, dtype: torch.dtype) -> None:
    params = as_parameters(values(), dtype)
    optimizer = make(params, master_weights=True)
    train(optimizer, params, range(7))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach() for p in params]], file)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=True)
    others = as_parameters(weights, dtype)
    other = make(others, master_weights=True)
    other.load_state_dict(saved)
    assert [{k: v.dtype for k, v in s.items()} for s in other.state.values()] == [
        {k: v.dtype for k, v in s.items()} for s in optimizer.state.values()
    ]
    train(optimizer, params, range(7, 14))
    train(other, others, range(7, 14))
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_state_has_torchs_names_and_half_precision_keeps_it_in_fp32() -> None:
    (param,) = params = as_parameters([torch.randn(3, 2)], torch.bfloat16)
    optimizer = LAMB(params, master_weights=True)
    set_gradients(params, [torch.randn(3, 2)])
    optimizer.step()
    assert {key: value.dtype for key, value in optimizer.state[param].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master_weight"), torch.float32
    )
    sgd = LARS(params, 0.1)
    sgd.step()
    assert list(sgd.state[param]) == ["momentum_buffer"]
    assert LARS(params, 0.1, momentum=0.0).step() is None


def test_a_step_becomes_capturable_in_the_middle_of_training() -> None:
    plain_params, params = as_parameters(values(), torch.float64), as_parameters(values(), torch.float64)
    plain, ours = LAMB(plain_params), LAMB(params)
    for optimizer, its in ((plain, plain_params), (ours, params)):
        train(optimizer, its, range(3))
    ours.param_groups[0]["capturable"] = True
    for optimizer, its in ((plain, plain_params), (ours, params)):
        train(optimizer, its, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(params, plain_params, strict=True))


def test_closures_and_copies() -> None:
    params = as_parameters(values(), torch.float32)
    optimizer = copy.deepcopy(LAMB(params))

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 0.5

    assert optimizer.step(closure) == 0.5
    assert not optimizer.state, "without gradients nothing happens"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LAMB(p, lr=-1.0), "LAMB's lr is -1.0; give a number of 0 or more."),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "LAMB's beta is 1.0; give a number of 0 or more and less than 1."),
        (lambda p: LAMB(p, eps=float("nan")), "LAMB's eps is nan; give a number of 0 or more."),
        (
            lambda p: LAMB(p, max_grad_norm=0.0),
            "LAMB's max_grad_norm is 0.0; give a number above 0, or None to clip nothing.",
        ),
        (
            lambda p: LAMB([{"params": p, "lr": torch.ones(1)}]),
            "LAMB's lr is a tensor of shape (1,); give a number or a 0-dim tensor.",
        ),
        (lambda p: LARS(p, 0.1, momentum=-0.5), "LARS's momentum is -0.5; give a number of 0 or more."),
        (
            lambda p: LARS(p, 0.1, momentum=0.0, nesterov=True),
            "LARS's nesterov is true with momentum 0; give a momentum, 0.9 for instance.",
        ),
    ],
)
def test_numbers_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match="give a") as caught:
        make(as_parameters(values(), torch.float32))
    assert str(caught.value) == message


@pytest.mark.parametrize("cls", [LAMB, LARS])
def test_what_has_no_update_is_refused(cls: Any) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer = cls(embedding.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"^a sparse gradient of shape \(4, 2\) has no layer-wise update here: "):
        optimizer.step()
    param = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"^a complex parameter of shape \(3,\) has no layer-wise update here: "):
        cls([param], lr=0.1).step()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
        self.rnn = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.out.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(()))


def test_parameter_groups_by_path() -> None:
    net = Net()
    names = {parameter: name for name, parameter in net.named_parameters()}
    decayed, others = parameter_groups(net, 0.01)
    assert {names[p] for p in decayed["params"]} == {
        "stem.0.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "attention.in_proj_weight",
        "attention.out_proj.weight", "embedding.weight", "temperature",
    }  # fmt: skip
    assert {names[p] for p in others["params"]} == set(names.values()) - {names[p] for p in decayed["params"]}
    assert (decayed["weight_decay"], others["weight_decay"], others["adapt"]) == (0.01, 0.0, False)
    for cls in (LAMB, LARS):
        made = cls(parameter_groups(net, 0.01), lr=0.1)
        assert [group["adapt"] for group in made.param_groups] == [True, False]
    (only,) = parameter_groups(nn.LayerNorm(3), 0.01)
    assert only["weight_decay"] == 0.0


def test_parameter_groups_by_the_users_own_rule() -> None:
    net = Net()
    decayed, others = parameter_groups(net, 0.1, lambda path, owner: path in ("temperature", "out.weight"))
    assert {id(p) for p in others["params"]} == {id(net.temperature), id(net.embedding.weight)}, "shared by one path"
    assert len(decayed["params"]) == len(list(net.parameters())) - 2
