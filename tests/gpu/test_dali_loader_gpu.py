"""DALI's loader decoding on a GPU: the CPU's pictures, buffers that nobody overwrites, and memory that stays."""

from typing import Any

import pytest
import torch
from encoded_pictures import CONFIG, SIZE, NotesKeys, PictureData, Pictures, loader, targets
from repeated_colours import Repeated
from torch import Tensor

pytest.importorskip("nvidia.dali")

from fasttrain.callbacks import CATALOGUE, DALIConfig, DALILoader, DetectionGraph, EncodedSamples, UsableSamples
from fasttrain.callbacks.dali_loader.reference import TOLERANCE
from fasttrain.environment import Hardware
from fasttrain.errors import DataError
from fasttrain.optimization import Applies, Context
from fasttrain.order import EpochOrder
from fasttrain.trainer import make_trainer

pytestmark = pytest.mark.gpu

COUNT, BATCH = 40, 4
LARGE = (800, 800)


def batches(
    size: tuple[int, int] = SIZE, device: str = "cuda", samples: EncodedSamples | None = None, **config: Any
) -> DALILoader:
    order = EpochOrder(COUNT, shuffle=False, seed=0)
    graph = DetectionGraph(targets, size, DALIConfig(**config))
    return DALILoader(samples or Pictures(COUNT), graph, order, BATCH, device=device, config=DALIConfig(**config))


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.9])
@pytest.mark.parametrize("fancy_upsampling", [False, True])
def test_pictures_are_the_cpus_within_the_tolerance(hw_decoder_load: float, fancy_upsampling: bool) -> None:
    ours = batches(hw_decoder_load=hw_decoder_load, fancy_upsampling=fancy_upsampling)
    pictures = Pictures(COUNT) if fancy_upsampling else Repeated(Pictures(COUNT), dict.fromkeys(range(COUNT), 0))
    largest, mean = TOLERANCE["gpu"]
    for found, wanted in zip(ours, batches(device="cpu", samples=pictures), strict=True):
        assert list(found) == list(wanted)
        assert all(values.device.type == "cuda" for values in found.values())
        assert found["images"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found["index"].cpu(), wanted["index"])
        assert torch.equal(found["epoch"].cpu(), wanted["epoch"])
        apart = (found["images"].cpu().float() - wanted["images"].float()).abs()
        assert apart.max() <= largest
        assert apart.mean(dim=(1, 2, 3)).max() <= mean


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_a_slow_consumer_reads_what_it_was_given(on_side_stream: bool) -> None:
    """The host runs far ahead of the device, so DALI would reuse its memory while the device has not read it."""

    def sums(sleep_cycles: int) -> list[list[float]]:
        found: list[Tensor] = []
        for batch in batches(LARGE, prefetch=3):
            if sleep_cycles:
                torch.cuda._sleep(sleep_cycles)
            found.append(batch["images"].double().sum(dim=(1, 2, 3)))
            del batch
            if not sleep_cycles:
                torch.cuda.synchronize()
        return [each.tolist() for each in found]

    wanted = sums(0)
    with torch.cuda.stream(torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()):
        assert sums(100_000_000) == wanted


def test_another_stream_may_read_a_batch_that_is_deleted() -> None:
    side = torch.cuda.Stream()
    found, wanted = [], []
    for batch in batches(LARGE):
        images = batch["images"]
        wanted.append(images.double().sum())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            found.append(images.double().sum())
        images.record_stream(side)
        del batch, images
    torch.cuda.synchronize()
    assert torch.stack(found).tolist() == torch.stack(wanted).tolist()


def test_fifty_epochs_take_no_more_device_memory_than_ten() -> None:
    one = batches()
    used = {}
    for epoch in range(60):
        one.order.set_epoch(epoch)
        for _ in one:
            pass
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used[epoch] = total - free
    assert used[59] <= used[10] + 2**20


@pytest.mark.parametrize("data", [b"no image " * 20, None], ids=["no image", "a hole"])
def test_a_bad_file_on_the_gpu(data: bytes | None) -> None:
    import numpy as np

    pictures = Pictures(10)
    file = pictures.files[4]
    bad = file[: len(file) // 2].tolist() + [0] * 200 + [0xFF, 0xD9] if data is None else list(data)
    pictures.files[4] = np.array(bad, np.uint8)
    order = EpochOrder(10, shuffle=False, seed=0)
    if data is not None:
        with pytest.raises(DataError, match=r"^'picture 4' can't be decoded"):
            list(loader(samples=pictures, order=order, device="cuda"))
    samples = UsableSamples(pictures, "substitute")
    found = list(loader(samples=samples, order=order, device="cuda"))
    assert sum(len(batch["index"]) for batch in found) == 10, "a decoder may make something of a hole"


def test_through_the_plan_into_a_fit() -> None:
    one = CATALOGUE["dali_loader"](CONFIG)
    hardware = Hardware.here()
    context = Context(NotesKeys(), PictureData(), hardware)
    assert isinstance(one.check(context), Applies)
    attachment = one.attach(context)
    from fasttrain.config import TrainerConfig

    trainer = make_trainer(
        TrainerConfig(accelerator="gpu", max_epochs=2), [attachment], [], [], enable_progress_bar=False
    )
    module = NotesKeys()
    trainer.fit(module, datamodule=attachment.data)
    assert len(module.seen["train"]) == 6
    assert all("cuda" in change.what for change in one.applied())
