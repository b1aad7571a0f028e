"""Which samples of a batch a decoder refuses, and telling whoever can do without them.

DALI fails a whole batch, often without saying at which sample. So the samples are tried one by one, once for each bad
file.
"""

import re
from collections.abc import Callable, Mapping

from fasttrain.callbacks.dali_loader.encoded import EncodedSamples
from fasttrain.callbacks.dali_loader.pipeline import GraphPipeline
from fasttrain.callbacks.dali_loader.reading import HostBatch
from fasttrain.callbacks.dali_loader.usable import ReplacesBad
from fasttrain.errors import DataError

IN_A_DECODER = re.compile(r"operator `[\w.]*decoders\.")
REASON_BEFORE, REASON_AFTER = "encountered:", "Current pipeline object"


def refused_samples(batch: HostBatch, one_at_a_time: Callable[[], GraphPipeline]) -> dict[int, str]:
    """Return the indices that DALI fails at, and what it says of each.

    Args:
        one_at_a_time: makes a pipeline for single samples; one that has failed is of no more use.

    Raises:
        RuntimeError: DALI's, where another operator than a decoder fails: no file is to be blamed for it.
    """
    refused: dict[int, str] = {}
    pipeline = one_at_a_time()
    for place, key in enumerate(batch.keys):
        try:
            pipeline.feed(batch.only(place))
            pipeline.take()
        except RuntimeError as error:
            if not IN_A_DECODER.search(str(error)):
                raise
            refused[key.index] = _reason(error)
            pipeline = one_at_a_time()
    return refused


def reject(samples: EncodedSamples, refused: Mapping[int, str]) -> None:
    """Tell the samples, so that they give something else.

    Raises:
        DataError: they can't or may not; the message names the file.
    """
    for index, reason in refused.items():
        if not isinstance(samples, ReplacesBad):
            raise DataError(f"'{samples.name(index)}' can't be decoded ({reason}); replace the file.")
        samples.reject(index, reason)


def _reason(error: RuntimeError) -> str:
    """Return what DALI says of the cause, without where in the pipeline it was."""
    text = str(error).rpartition(REASON_BEFORE)[2].partition(REASON_AFTER)[0]
    return "DALI says: " + (" ".join(text.split()).rstrip(" :.") or "no reason")
