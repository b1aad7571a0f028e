"""GELU as x * sigmoid(x * Q(x * x)): the coefficients of Q, for both of its forms.

tanh form: (1 + tanh(u)) / 2 is sigmoid(2 u), so Q is the paper's own polynomial, twice (Hendrycks and Gimpel, arXiv
1606.08415), and nothing is approximated.

erf form: Q(x^2) stands for log(P / (1 - P)) / x with P the normal distribution function. The coefficients are this
project's: a least-squares fit on |x| <= 5.6 to three times GELU's error and to its derivative's, weighted again and
again towards the largest error until all peaks were alike. Largest errors for all x, against float64:

    degree      of GELU     of GELU'      half a unit in the last place of numbers from 1 to 2
    2           3.1e-5      9.4e-5        bfloat16: 3.9e-3
    4           3.9e-6      1.2e-5        float16:  4.9e-4
"""

from typing import Literal, NamedTuple, get_args

import torch

from fasttrain.errors import OptimizationError, nearest

Approximate = Literal["none", "tanh"]
"""torch's names: "none" is the erf form."""


class Form(NamedTuple):
    """One polynomial Q."""

    coefficients: tuple[float, ...]
    """Of the powers of x * x, from 0 on."""
    largest: float | None = None
    """Of x * x, to which greater ones are set, where the polynomial would turn back; there GELU is 0 or x anyway."""


_ROOT_8_BY_PI = 1.5957691216057308
TANH = Form((_ROOT_8_BY_PI, _ROOT_8_BY_PI * 0.044715))
ERF_OF_DEGREE_2 = Form((1.59501351938, 0.0739436593181, -0.000689589900604), largest=25.0)
ERF_OF_DEGREE_4 = Form((1.59566555953, 0.0729027018525, -2.29904202202e-4, -6.48238422063e-5, 2.43102471585e-6))


def form_for(approximate: str, dtype: torch.dtype) -> Form:
    """Return the cheapest Q whose error disappears in the rounding to a dtype.

    Raises:
        OptimizationError: there is no such form of GELU.
    """
    if approximate not in get_args(Approximate):
        known = get_args(Approximate)
        raise OptimizationError(f"gemm_gelu: GELU has no form '{approximate}'; {nearest(approximate, known)}")
    if approximate == "tanh":
        return TANH
    return ERF_OF_DEGREE_2 if dtype == torch.bfloat16 else ERF_OF_DEGREE_4
