"""What handing over weights costs the training: the copy into one buffer, beside other ways to copy them."""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torchvision.models import resnet50

from fasttrain.bench import Case
from fasttrain.callbacks.evaluation_ranks.weights import FlatWeights
from fasttrain.floor import H200_BYTES_PER_SECOND
from fasttrain.measure import Row, make_row, sample_ms

ROOM = "evaluation_ranks"


def cases() -> list[Case]:
    """Return the room's bench cases."""
    return [
        Case(ROOM, "snapshot_resnet50", "a copy of ResNet-50's weights, 102 MB in 320 tensors",
             partial(snapshot, "snapshot_resnet50", resnet50)),
        Case(ROOM, "snapshot_bert_large", "a copy of 24 encoder layers of BERT-large's size, 1.2 GB",
             partial(snapshot, "snapshot_bert_large", bert_large), needs_gpu=True),
    ]  # fmt: skip


def bert_large() -> nn.Module:
    """Return an encoder of BERT-large's size."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    return nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)


def snapshot(case: str, build: Callable[[], nn.Module], repeats: int = 20) -> Iterator[Row]:
    """Yield the milliseconds for which training stands still to have its weights copied.

    `plain` clones each tensor, `deepcopy` copies the module, `cat` makes one buffer of clones as the submission did.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = build()
    flat = FlatWeights(model)
    variants: dict[str, Callable[[], object]] = {
        "plain": lambda: {name: value.clone() for name, value in model.state_dict().items()},
        "deepcopy": lambda: copy.deepcopy(model),
        "cat": lambda: torch.cat([value.detach().reshape(-1) for value in model.parameters()]),
        "ours": flat.take,
    }
    for variant, call in variants.items():
        times = sample_ms(call, device, warmup=3, repeats=repeats)
        yield make_row(ROOM, case, variant, "ms", "ms", times, f"{flat.flat.numel() / 1e6:.0f} MB")
    if device == "cuda":
        floor_ms = 2 * flat.flat.numel() / H200_BYTES_PER_SECOND * 1e3
        yield make_row(ROOM, case, "floor", "ms", "ms", [floor_ms], "bytes read and written over 4.3 TB/s")
