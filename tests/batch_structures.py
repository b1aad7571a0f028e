"""Batches of every structure that people use, for tests."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Point(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Sample:
    image: Tensor
    boxes: list[Tensor]
    size: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Tensor
    label: int


@dataclass
class Masked:
    """Computes more than its fields, as collators do."""

    ids: Tensor
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.ids > 0
        self.length = self.ids.sum(1)


class Encoding(UserDict):  # type: ignore[type-arg]
    """What transformers' tokenizers return is made like this: data, and more that a copy keeps."""

    def __init__(self, data: dict[str, Any], encodings: Any) -> None:
        super().__init__(data)
        self.encodings = encodings


class Output(dict):  # type: ignore[type-arg]
    """A dict whose constructor takes something else."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self["loss"] = loss


class Split(Enum):
    TRAIN = 1


def some(*shape: int) -> Tensor:
    return torch.rand(*shape)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: some(2),
    "nested": lambda: [some(2), (some(3), {"a": [some(1)], "b": None}), 2.5, "text", Split.TRAIN],
    "named tuple": lambda: Point(some(2), "p"),
    "dataclass": lambda: Sample(some(2), [some(1), some(4)]),
    "frozen": lambda: Frozen(some(2), 3),
    "computed": lambda: Masked(torch.ones(2, 3, dtype=torch.int64)),
    "encoding": lambda: Encoding({"input_ids": some(2), "labels": some(3)}, "kept"),
    "output": lambda: Output(some(2)),
    "ordered": lambda: OrderedDict(b=some(1), a=some(2)),
    "default": lambda: defaultdict(list, {"a": some(1)}),
    "proxy": lambda: MappingProxyType({"a": some(1)}),
    "torch's": lambda: [torch.Size([1, 2]), torch.float32, torch.device("cpu"), some(1)],
}
