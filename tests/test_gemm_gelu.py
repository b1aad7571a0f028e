"""gemm_gelu against its reference in float64, in both tiers and in every tiling; its polynomials; its extremes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gelu_blocks import BOTH_WAYS, DEVICE, assert_close, set_small_tiles, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttrain.callbacks.gemm_gelu import in_triton, linear_gelu_linear, tiling
from fasttrain.callbacks.gemm_gelu.feed_forward import WAYS
from fasttrain.callbacks.gemm_gelu.form import ERF_OF_DEGREE_2, ERF_OF_DEGREE_4, TANH, Form
from fasttrain.callbacks.gemm_gelu.gelu_kernel import INTERPRETED
from fasttrain.callbacks.gemm_gelu.reference import TOLERANCE, reference
from fasttrain.callbacks.gemm_gelu.ways import Ways

# The interpreter says of numpy that exp2 has overflowed, which is what makes a sigmoid 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

small_tiles = pytest.fixture(set_small_tiles)
both_forms = pytest.mark.parametrize("form", ["none", "tanh"])
DTYPES = [torch.float32, torch.float16] if INTERPRETED.value else [torch.float16, torch.bfloat16]


def assert_equals_reference(leaves: list[Tensor], form: Any, tier: Any, ways: Ways = WAYS) -> None:
    """Values and all gradients; leaves are five, or three without biases."""
    x, weight, *rest = leaves
    arguments = (x, weight, *rest) if len(rest) == 3 else (x, weight, None, rest[0], None)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    double = {id(leaf): one for leaf, one in zip(leaves, exact, strict=True)}
    found = linear_gelu_linear(*arguments, form, tier, ways=ways)  # type: ignore[arg-type]
    wanted = reference(*(None if a is None else double[id(a)] for a in arguments), form)  # type: ignore[arg-type]
    tolerance = TOLERANCE[x.dtype]
    assert found.dtype == x.dtype
    assert_close(found.detach(), wanted.detach(), tolerance)
    dy = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, dy)
    for gradient, one in zip(gradients, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        assert gradient.dtype == x.dtype
        assert_close(gradient, one, tolerance)


@pytest.mark.parametrize(("tier", "ways"), [("torch", WAYS), *(("triton", ways) for ways in BOTH_WAYS)], ids=str)
@both_forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=4, deadline=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    tokens=st.integers(0, 70), width=st.integers(1, 40), hidden=st.integers(1, 70), out=st.integers(1, 20),
    bias=st.booleans(), multiple=st.sampled_from([1, 8]),
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(
    small_tiles: None, tier: str, ways: Ways, form: str, dtype: torch.dtype, tokens: int, width: int, hidden: int,
    out: int, bias: bool, multiple: int,
) -> None:  # fmt: skip
    widths = (-(-size // multiple) * multiple for size in (width, hidden, out))  # multiples go by descriptors
    assert_equals_reference(tensors(tokens, *widths, dtype, bias), form, tier, ways)


@pytest.mark.parametrize(
    ("parts", "programs", "group", "rows"), [(1, 1, 3, 16), (2, 0, 3, 16), (4, 1, 3, 16), (1, 0, 0, 16), (2, 1, 0, 128),
                                             (4, 1, 0, 32)],
)  # fmt: skip
@pytest.mark.parametrize("width", [24, 25])
def test_every_tiling_gives_the_same(parts: int, programs: int, group: int, rows: int, width: int) -> None:
    one = tiling.Tiling(rows, 32, 16, parts=parts, programs=programs, group=group, flatten=True, stagger_ns=100)
    x, weight, bias, weight_2, _ = (t.detach().half() for t in tensors(rows + 12, width, 48, width))
    hidden, slope = in_triton.forward(x, weight, bias, "tanh", True, one)
    before = F.linear(x.double(), weight.double(), bias.double()).requires_grad_()
    wanted = F.gelu(before, approximate="tanh")
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), before)
    assert slope is not None
    assert_close(hidden, wanted.detach(), TOLERANCE[torch.float16])
    assert_close(slope, wanted_slope, TOLERANCE[torch.float16])
    dy = torch.randn(rows + 12, width, device=DEVICE).half()
    exact = (dy.double() @ weight_2.double()) * wanted_slope
    for kept, form in ((slope, None), (before.detach().half(), "tanh")):
        result, sums = in_triton.backward(dy, weight_2, kept, form, torch.float32, one)
        assert_close(result, exact, TOLERANCE[torch.float16])
        assert sums is not None
        assert_close(sums, exact.sum(dim=0), TOLERANCE[torch.float16])


@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "most", "wanted"),
    [(128, 32, 264, 8), (64, 32, 132, 4), (128, 24, 264, 11), (1, 5, 264, 1), (8, 300, 264, 4), (100, 264, 264, 1)],
)
def test_columns_are_shared_so_that_all_are_done_the_soonest(
    tiles_m: int, tiles_n: int, most: int, wanted: int
) -> None:
    assert tiling.programs_of_a_column(tiles_m, tiles_n, most) == wanted


@pytest.mark.parametrize(
    ("form", "approximate", "of_gelu", "of_slope"),
    [(TANH, "tanh", 2e-9, 2e-9), (ERF_OF_DEGREE_4, "none", 4e-6, 1.2e-5), (ERF_OF_DEGREE_2, "none", 3.1e-5, 9.5e-5)],
)
def test_the_polynomials_are_as_near_as_they_say(form: Form, approximate: str, of_gelu: float, of_slope: float) -> None:
    x = torch.linspace(-40, 40, 160_001, dtype=torch.float64, requires_grad=True)
    wanted = F.gelu(x, approximate=approximate)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), x)
    square = x.detach().square().clamp(max=form.largest or torch.inf)
    q = sum(c * square**power for power, c in enumerate(form.coefficients))
    sigmoid = torch.sigmoid(x.detach() * q)
    slope = sum(c * (2 * power + 1) * square**power for power, c in enumerate(form.coefficients))
    found_slope = sigmoid + x.detach() * sigmoid * (1 - sigmoid) * slope
    assert float((x.detach() * sigmoid - wanted.detach()).abs().max()) < of_gelu
    assert float((found_slope - wanted_slope).abs().max()) < of_slope


@both_forms
def test_extreme_values(small_tiles: None, form: Any) -> None:
    x = torch.tensor([[60000.0], [-60000.0], [300.0], [-300.0], [0.0], [float("nan")]], device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    hidden, slope = in_triton.forward(x, one, None, form, True)
    assert hidden.flatten()[:5].tolist() == [60000, 0, 300, 0, 0]
    assert slope is not None
    assert slope.flatten()[:5].tolist() == [1, 0, 1, 0, 0.5]
    assert torch.isnan(hidden[5]).all()
    assert torch.isnan(slope[5]).all()
    by_pass = in_triton.gelu(x, form)
    assert by_pass.flatten()[:5].tolist() == hidden.flatten()[:5].tolist()
    assert torch.isnan(by_pass[5]).all()
    dx, _ = in_triton.backward(torch.ones_like(x), one, x, form, None)
    assert dx.flatten()[:5].tolist() == [1, 0, 1, 0, 0.5]
    assert torch.isnan(dx[5]).all()
