"""A loader graph in a plain DALI pipeline, without a loader."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.callbacks.dali_loader.encoded import EncodedSamples
from fasttrain.callbacks.dali_loader.graph import Device, LoaderGraph
from fasttrain.order import SampleKey


def one_batch(
    graph: LoaderGraph, encoded: EncodedSamples, keys: Sequence[SampleKey], device: Device = "cpu"
) -> dict[str, NDArray[Any]]:
    """Return the batch that a pipeline makes of some keys."""
    from nvidia.dali import fn, pipeline_def

    drawn = dict(graph.parameters(keys))
    samples = [encoded.read(key.index) for key in keys]
    names: list[str] = []

    device_id = 0 if device == "gpu" else None

    @pipeline_def(batch_size=len(keys), num_threads=1, device_id=device_id, prefetch_queue_depth=1)
    def pipeline() -> tuple[Any, ...]:
        data = fn.external_source(source=lambda: samples)
        parameters = {name: fn.external_source(source=_always(values)) for name, values in drawn.items()}
        outputs = graph.outputs(data, parameters, device)
        names.extend(outputs)
        return tuple(outputs.values())

    built = pipeline()
    return {name: np.asarray(output.as_cpu().as_tensor()) for name, output in zip(names, built.run(), strict=True)}


def _always(values: NDArray[Any]) -> Any:
    return lambda: values
