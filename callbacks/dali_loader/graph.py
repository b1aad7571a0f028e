"""What a task adds to a DALI loader: the operators between encoded bytes and a batch, and their random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fasttrain.order import SampleKey

Device = Literal["cpu", "gpu"]


class LoaderGraph(Protocol):
    """The part of a pipeline that differs between tasks.

    All randomness is drawn here, on the host, from (seed, epoch, index): a batch is then a function of its keys, and
    resuming needs no state of DALI's.
    """

    def parameters(self, keys: Sequence[SampleKey]) -> Mapping[str, NDArray[np.generic]]:
        """Return arrays whose first dimension is the batch, by name: crop windows, flips, labels, padded boxes.

        Names and dtypes are the same for each call; for no keys, arrays of length 0 with the right dtypes.
        """

    def outputs(self, encoded: Any, parameters: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
        """Return the batch's data nodes by name, called once while the pipeline is built.

        Args:
            encoded: data node of the samples' bytes, uint8, on the CPU.
            parameters: a CPU data node for each name that `parameters` returns.
            device: where the results are to be; "gpu" decodes there, too.
        """
