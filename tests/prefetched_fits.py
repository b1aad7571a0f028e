"""What the tests of device_prefetch share: a prefetcher on the CPU, and a look for threads that were left behind."""

import threading
from collections.abc import Iterator
from typing import Any

import torch

from fasttrain.callbacks import DevicePrefetcher
from fasttrain.callbacks.device_prefetch.streams import ImmediateStreams

CPU = torch.device("cpu")


def prefetcher(**parameters: Any) -> DevicePrefetcher:
    return DevicePrefetcher(ImmediateStreams(CPU), **{"ahead": "always", **parameters})


def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "device_prefetch"] == []
