"""What there is a choice of in the fused block, for measuring."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ways:
    """How the block is computed where something is kept for a backward."""

    gelu: Literal["pass", "epilogue"] = "pass"
    """Where GELU is: in a pass of its own behind a product of cuBLAS, of which its input is kept, or in a product of
    Triton, of which its derivative is. In the backward, the derivative is multiplied in Triton's product both times."""
