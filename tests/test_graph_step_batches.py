"""The graph step with batches of any structure and many shapes: how many captures they need, and padding."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from graph_fits import Batches, Small, adamw, assert_same_state, batches, fit, same_start
from torch import Tensor, nn

from fasttrain.callbacks import CUDAGraphStep


class Nested(NamedTuple):
    inputs: dict[str, Tensor]
    extra: list[Any]


@dataclass
class Holder:
    nested: Nested
    name: str


class OfStructures(Small):
    """Takes a dataclass with a named tuple with a dict in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step((batch.nested.inputs["x"], batch.nested.extra[0]), batch_idx)
        return {"loss": loss * batch.nested.extra[1], "predictions": loss.detach() + 1}


def test_batches_and_outputs_of_any_structure() -> None:
    def structured(scale: float) -> list[Any]:
        return [Holder(Nested({"x": x}, [y, scale]), "batch") for x, y in batches(5).made]

    data = Batches([*structured(1.0), *structured(0.5), *structured(1.0), *structured(0.5)])
    ours, plain = same_start(OfStructures)
    graph, kept = CUDAGraphStep(stand_in=True), KeptOutputs()
    expected = KeptOutputs()
    assert_same_state(fit(ours, data, graph, callbacks=[kept]), fit(plain, data, callbacks=[expected]))
    assert graph.pool.captures == 2  # one for each value of the constant
    assert [o["predictions"] for o in kept.outputs] == [o["predictions"] for o in expected.outputs]


class KeptOutputs(pl.Callback):
    """Keeps every output it is given, as users do who plot at the end of an epoch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.outputs.append(outputs)


def test_a_batch_that_holds_an_unknown_object_is_named() -> None:
    data = Batches([(x, y, object()) for x, y in batches(4).made])

    class Tolerant(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[:2], batch_idx)

    with pytest.warns(UserWarning, match=r"since batch\[2\] is a builtins.object, which is neither a tensor nor"):
        fit(Tolerant(), data, CUDAGraphStep(stand_in=True))


def test_five_shapes_need_five_captures_and_give_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(4, 5, 6, 7, 8)[int(i)] for i in torch.randint(5, (60,), generator=generator)]
    data = Batches([batches(1, (n,), seed=i).made[0] for i, n in enumerate(sizes)])
    ours, plain = same_start(lambda: Small(adamw))
    graph = CUDAGraphStep(stand_in=True)
    assert_same_state(fit(ours, data, graph), fit(plain, data))
    assert graph.pool.captures == 5
    assert graph.pool.evictions == 0
    replays = {row[0]: row[1] for row in graph.table().rows}
    assert sum(replays.values()) == graph.pool.hits >= 100


def test_a_small_pool_evicts_and_stays_right() -> None:
    data = batches(40, rows=(3, 4, 5))
    ours, plain = same_start(Small)
    graph = CUDAGraphStep(stand_in=True, max_graphs=2)
    assert_same_state(fit(ours, data, graph), fit(plain, data))
    assert graph.pool.evictions > 0
    assert len(graph.pool) == 0


def test_padding_makes_one_shape_of_many() -> None:
    class Masked(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch["x"], batch["y"]
            loss = nn.functional.cross_entropy(self.net[0](x), y, ignore_index=-100)
            self.log("loss", loss)
            return loss

    data = Batches([{"x": x, "y": y} for x, y in batches(20, rows=(3, 4, 5, 6)).made])
    ours, plain = same_start(Masked)
    pad = {"values": {"x": 0.0, "y": -100.0}, "sizes": (8,), "dimension": 0}
    from fasttrain.callbacks.cuda_graph_step import PadConfig

    graph = CUDAGraphStep(stand_in=True, pad=PadConfig(**pad))
    assert_same_state(fit(ours, data, graph), fit(plain, data), rtol=1e-5, atol=1e-6)
    assert graph.pool.captures == 1
