# mypy: ignore-errors
"""The Triton functions of GELU and its derivative, and the kernel of a pass that does nothing else.

GELU is computed as x * sigmoid(x * Q(x * x)) for a polynomial Q, which holds for both forms. For the tanh form it is an
identity: (1 + tanh(u)) / 2 = sigmoid(2 u), and 2 u = x (a + b x^2) (Hendrycks and Gimpel, arXiv 1606.08415). For the
erf form Q was fitted to log(P / (1 - P)) / x, P the normal distribution function: see `form.py`. The derivative comes
from the same exponential.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # as decided when this module is imported
MINUS_LOG2E = tl.constexpr(-1.4426950408889634)


@triton.jit
def gelu_pass_kernel(before, hidden, count, FORM: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Write hidden = gelu(before).

    Blocks are gone through from the last to the first: the product that wrote `before` has left its end in the cache,
    and the product that reads `hidden` begins with the first.

    Args:
        before: count elements, dense.
        hidden: likewise.
        count: of elements.
        FORM: coefficients of Q.
        LARGEST: of x * x in Q, None for no bound.
        BLOCK: elements of a program.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(before + at, mask=at < count).to(tl.float32)
    activation, _ = gelu_and_slope(x, FORM, LARGEST)
    tl.store(hidden + at, activation.to(hidden.dtype.element_ty), mask=at < count)


@triton.jit
def gelu_and_slope(x, FORM: tl.constexpr, LARGEST: tl.constexpr):
    """Return gelu(x) and its derivative, for float32 x."""
    square = x * x
    if LARGEST is not None:
        square = tl.minimum(square, LARGEST)
    DEGREE: tl.constexpr = len(FORM) - 1
    q = tl.full(x.shape, FORM[DEGREE] * MINUS_LOG2E, tl.float32)
    # Of x Q(x^2): each power's own exponent comes down, so that a coefficient is multiplied by 1, 3, 5, ...
    q_slope = tl.full(x.shape, FORM[DEGREE] * (2 * DEGREE + 1), tl.float32)
    for i in tl.static_range(DEGREE):
        q = q * square + FORM[DEGREE - 1 - i] * MINUS_LOG2E
        q_slope = q_slope * square + FORM[DEGREE - 1 - i] * (2 * (DEGREE - 1 - i) + 1)
    sigmoid = _reciprocal(1.0 + tl.exp2(x * q))
    activation = x * sigmoid
    return activation, sigmoid + (activation - activation * sigmoid) * q_slope


@triton.jit
def _reciprocal(x):
    if INTERPRETED:
        y = 1.0 / x
    else:
        # A division is six instructions; this is one, wrong by a unit in float32's last place. Of infinity it is 0.
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y
