"""The graph step on networks that nobody here wrote, unchanged: torchvision's, timm's and transformers'.

Each is built with random weights inside a plain LightningModule and trained in bf16-mixed on random data, its dropout
and stochastic depth on as its library has them. A package that isn't there is told of and left out.
"""

import copy
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchvision.models import resnet50, vit_b_16

from fasttrain.callbacks.cuda_graph_step.bench_fit import NOTE, Classifier, StepTimer, pinned, timed_fit
from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.measure import Row, make_row

BATCH_SIZES = (1, 4, 16, 64)
CLASSES = 1000

WARM_UP, WINDOW, MOST_WINDOWS, ENOUGH_S = 20, 10, 60, 2.0
"""Steps before the first timed one, steps a window, and after which windows or seconds enough has been seen."""


@dataclass(frozen=True)
class Network:
    """One network in a module, and the batches that it takes."""

    name: str
    """`package_network`."""
    what: str
    """Network, input and optimizer, for the row's note."""
    make: Callable[[], pl.LightningModule]
    batch: Callable[[int], Any]
    """Number of rows -> random batch on the CPU."""

    @property
    def package(self) -> str:
        """The library that it comes from."""
        return self.name.partition("_")[0]


class SentenceClassifier(Classifier):
    """A transformers network, which computes its loss from a batch that holds its labels."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the network's own loss."""
        loss: Tensor = self.net(**batch).loss
        return loss


def foreign() -> Iterator[Row]:
    """Yield milliseconds a step, seconds until captured and memory of each network at each batch size."""
    for network in networks():
        module = network.make()
        for rows in BATCH_SIZES:
            yield from compare(network, module, rows)


def networks(side: int = 224, tokens: int = 128) -> Iterator[Network]:
    """Yield the networks whose package is installed; say which others there would be.

    Args:
        side: of images, in pixels.
        tokens: of sentences.
    """
    makers = (_resnet50, partial(_vit_b_16, side), _efficientnet_b0, _bert_base)
    images, sentences = partial(image_batch, side), partial(sentence_batch, tokens)
    for name, what, make, batch in (
        ("torchvision_resnet50", f"ResNet-50, {side}², SGD with momentum", makers[0], images),
        ("torchvision_vit_b_16", f"ViT-B/16, {side}², AdamW", makers[1], images),
        ("timm_efficientnet_b0", f"EfficientNet-B0, {side}², dropout and drop path 0.2, AdamW", makers[2], images),
        ("transformers_bert_base", f"BERT-base, {tokens} tokens, padded, dropout 0.1, AdamW", makers[3], sentences),
    ):
        network = Network(name, what, make, batch)
        if importlib.util.find_spec(network.package) is None:
            print(f"cuda_graph_step: {name} is left out, since {network.package} is not installed")
        else:
            yield network


def image_batch(side: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return random pictures and labels."""
    return torch.randn(rows, 3, side, side), torch.randint(CLASSES, (rows,))


def sentence_batch(tokens: int, rows: int) -> dict[str, Tensor]:
    """Return random tokens of BERT's vocabulary, a mask that leaves padding at each sentence's end, and two classes.

    transformers looks whether a mask masks anything, and takes another kernel if not. In a capture it can't look and
    keeps the mask, so that without padding a replay would differ from the eager step by that kernel's rounding.
    """
    lengths = torch.randint(tokens // 4, tokens, (rows, 1))
    return {
        "input_ids": torch.randint(1000, 30000, (rows, tokens)),
        "attention_mask": (torch.arange(tokens) < lengths).long(),
        "labels": torch.randint(2, (rows,)),
    }


def compare(network: Network, module: pl.LightningModule, rows: int) -> Iterator[Row]:
    """Yield the rows of one network at one batch size; plain ones alone where the graph step fell back."""
    batches = [pinned(network.batch(rows)) for _ in range(4)]
    graph = CUDAGraphStep()
    plain, plain_gb = measure(module, batches, None)
    ours, ours_gb = measure(module, batches, graph)
    version = importlib.metadata.version(network.package)
    note = f"{network.what}; {network.package} {version}; {NOTE}"
    row = partial(make_row, "cuda_graph_step", f"{network.name}_b{rows}_bf16")
    if ours.why_not_credited is not None:
        note = f"{note}; ours is left out: {ours.why_not_credited}"
    yield row("plain", "step_ms", "ms", plain.step_ms, note)
    yield row("plain", "memory_gb", "GB", [plain_gb], note)
    if ours.why_not_credited is not None or ours.capture_s is None:
        return
    note = "; ".join((note, *graph.notes, f"noise in the self-check {ours.noise:.2g}"))
    yield row("ours", "step_ms", "ms", ours.step_ms, note)
    yield row("ours", "memory_gb", "GB", [ours_gb], note)
    yield row("ours", "capture_s", "s", [ours.capture_s], f"{note}; inspection, warm-up and checks included")


def measure(module: pl.LightningModule, batches: list[Any], graph: CUDAGraphStep | None) -> tuple[StepTimer, float]:
    """Fit a copy of a module; return what its timer found, and the most memory reserved on the device in GB (10⁹)."""
    timer = StepTimer(WARM_UP, WINDOW, ENOUGH_S, graph)
    timed_fit(copy.deepcopy(module), batches, timer, WARM_UP + WINDOW * MOST_WINDOWS + 1, "bf16-mixed")
    return timer, torch.cuda.max_memory_reserved() / 1e9


def _resnet50() -> pl.LightningModule:
    return Classifier(resnet50(num_classes=CLASSES), partial(torch.optim.SGD, lr=0.01, momentum=0.9))


def _vit_b_16(side: int) -> pl.LightningModule:
    return Classifier(vit_b_16(image_size=side, num_classes=CLASSES), partial(torch.optim.AdamW, lr=1e-4))


def _efficientnet_b0() -> pl.LightningModule:
    timm = importlib.import_module("timm")
    net = timm.create_model("efficientnet_b0", num_classes=CLASSES, drop_rate=0.2, drop_path_rate=0.2)
    return Classifier(net, partial(torch.optim.AdamW, lr=1e-4))


def _bert_base() -> pl.LightningModule:
    transformers = importlib.import_module("transformers")
    net = transformers.BertForSequenceClassification(transformers.BertConfig())
    return SentenceClassifier(net, partial(torch.optim.AdamW, lr=1e-4))
