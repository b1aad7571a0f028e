"""Images a second of the torch loader and of DALI's, each alone, and the times of DALI's first batches."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fasttrain.bench import Case
from fasttrain.callbacks.dali_loader.bench_annotations import detection_files
from fasttrain.callbacks.dali_loader.bench_images import photo_like_classes, photo_like_jpegs
from fasttrain.callbacks.dali_loader.config import DALIConfig
from fasttrain.callbacks.dali_loader.containers import labelled_images
from fasttrain.environment import cache_folder, usable_cores
from fasttrain.measure import Row, make_row, synchronize
from fasttrain.order import EpochOrder
from fasttrain.recipes.resnet50 import loaders as classification_loaders
from fasttrain.recipes.resnet50.dataset import Augmentation, ClassificationDataset
from fasttrain.recipes.retinanet.coco import read_annotations
from fasttrain.recipes.retinanet.dataset import DetectionDataset
from fasttrain.recipes.retinanet.loaders import dali_loader, torch_loader

ROOM = "dali_loader"
HEIGHT, WIDTH, SIZE, BATCH = 768, 1024, (800, 800), 32
FIRST = 50
FILES, QUALITY = 256, 75  # 215 kB a file
DETECTION = DALIConfig(num_threads=12, prefetch=3, hw_decoder_load=0.9, image_size_hint=(HEIGHT, WIDTH))
PREALLOCATED = DALIConfig(
    num_threads=12, prefetch=3, hw_decoder_load=0.9, image_size_hint=(HEIGHT, WIDTH),
    device_memory_mb=2048, host_memory_mb=512,
)  # fmt: skip
CLASS_SIZE, CLASS_FILES, CLASS_BATCH = (500, 375), 2048, 256  # 91 kB a file, quality 90
CLASSIFICATION = DALIConfig(num_threads=12, hw_decoder_load=1.0)
Loaders = Mapping[str, tuple[Callable[[], Iterable[Mapping[str, torch.Tensor]]], str]]


def cases() -> list[Case]:
    """Return the room's bench cases."""
    work = f"JPEGs of {WIDTH} x {HEIGHT} to {SIZE[0]}², boxes padded, batches of {BATCH} on the device"
    return [
        Case(ROOM, "detection_800", work, detection, needs_gpu=True),
        Case(
            ROOM,
            "classification_224",
            f"JPEGs of {CLASS_SIZE[0]} x {CLASS_SIZE[1]} to random windows of 224², batches of {CLASS_BATCH} on the "
            "device",
            classification,
            needs_gpu=True,
        ),
        Case(ROOM, "detection_800_start", f"{work}: the first {FIRST} batches of a process", starts, needs_gpu=True),
    ]


def images_per_second(
    case: str, loaders: Loaders, warm_up: int = 20, window: int = 50, windows: int = 6
) -> Iterator[Row]:
    """Yield a row for each variant: images a second over windows of so many batches of one pass.

    Args:
        loaders: by variant, what makes a loader of at least `warm_up + windows * window` batches, and a note. Batches
            that are on the CPU are copied to the device, as a Trainer does.
    """
    for variant, (make, note) in loaders.items():
        loader = make()
        rates = []
        batches = iter(loader)
        for _ in range(warm_up):
            _to_device(next(batches))
        for _ in range(windows):
            synchronize(_device())
            begun, images = time.perf_counter(), 0
            for _ in range(window):
                images += len(next(iter(_to_device(next(batches)).values())))
            synchronize(_device())
            rates.append(images / (time.perf_counter() - begun))
        del batches
        if hasattr(loader, "close"):
            loader.close()
        del loader  # and torch's processes, before the next one's time is taken
        yield make_row(ROOM, case, variant, "images_per_second", "images/s", rates, note)


def detection(config: DALIConfig = DETECTION, **windows: int) -> Iterator[Row]:
    """Yield the rows of detection data, torch's loader with at most 16 processes against ours."""
    dataset, order = detection_set()
    workers = min(16, usable_cores())

    def torchs() -> Any:
        on_gpu = torch.cuda.is_available()
        return torch_loader(dataset, order, BATCH, drop_last=True, workers=workers, on_gpu=on_gpu)

    def ours() -> Any:
        return dali_loader(dataset, order, BATCH, drop_last=True, device=_device(), config=config)

    yield from _compared("detection_800", torchs, ours, lambda: _by_dali_alone(config), config, windows)


def classification(config: DALIConfig = CLASSIFICATION, **windows: int) -> Iterator[Row]:
    """Yield the rows of the ResNet recipe's training data, in grey levels, likewise."""
    dataset, order = classification_set()

    def torchs() -> Any:
        workers, on_gpu = min(16, usable_cores()), torch.cuda.is_available()
        return classification_loaders.torch_loader(dataset, order, CLASS_BATCH, workers=workers, on_gpu=on_gpu)

    def ours() -> Any:
        return classification_loaders.dali_loader(dataset, order, CLASS_BATCH, device=_device(), config=config)

    windows = {"warm_up": 10, "window": 20, "windows": 5, **windows}
    yield from _compared("classification_224", torchs, ours, lambda: _windows_by_dali_alone(config), config, windows)


def _compared(
    case: str,
    torchs: Callable[[], Any],
    ours: Callable[[], Any],
    alone: Callable[[], Any],
    config: DALIConfig,
    windows: Mapping[str, int],
) -> Iterator[Row]:
    note = (
        f"{config.threads} threads, {config.readers} reading, {config.prefetch} ahead, {config.hw_decoder_load} by unit"
    )
    loaders: dict[str, tuple[Callable[[], Any], str]] = {
        "torch": (torchs, f"{min(16, usable_cores())} processes"),
        "ours": (ours, note),
    }
    if torch.cuda.is_available():
        loaders["dali_reader"] = (alone, f"{note}; fn.readers.file, no targets")
    yield from images_per_second(case, loaders, **windows)


def starts(configs: Mapping[str, DALIConfig] | None = None, batches: int = FIRST) -> Iterator[Row]:
    """Yield milliseconds of the first batches, each variant in a process of its own: memory pools are a process's."""
    configs = configs or {"ours": DETECTION, "ours_preallocated": PREALLOCATED}
    detection_set()  # drawn before any clock runs
    for variant, config in configs.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            times = pool.apply(first_batches_ms, (config, batches))
        note = f"pools of {config.device_memory_mb} MiB device and {config.host_memory_mb} MiB pinned memory at first"
        for metric, values in (("first_batch_ms", times[:1]), ("early_batch_ms", times[1:]),
                               ("slowest_early_batch_ms", [max(times[1:])])):  # fmt: skip
            yield make_row(ROOM, "detection_800_start", variant, metric, "ms", values, note)


def first_batches_ms(config: DALIConfig, batches: int) -> list[float]:
    """Return the milliseconds from one batch to the next, from a new loader's first on."""
    dataset, order = detection_set()
    torch.zeros(1, device=_device())  # torch's own start is not DALI's
    loader = dali_loader(dataset, order, BATCH, drop_last=True, device=_device(), config=config)
    times, begun = [], time.perf_counter()
    for _, _ in zip(range(batches), loader, strict=False):
        synchronize(_device())
        now = time.perf_counter()
        times.append((now - begun) * 1e3)
        begun = now
    loader.close()
    return times


def detection_set(images: int = 12800) -> tuple[DetectionDataset, EpochOrder]:
    """Return a set of so many images, the same few files over and over, which are then in the page cache."""
    paths = photo_like_jpegs(_pictures(), FILES, (WIDTH, HEIGHT), QUALITY)
    annotations = detection_files(paths, HEIGHT, WIDTH, images)
    found = read_annotations(annotations, paths[0].parent)
    dataset = DetectionDataset(found, SIZE, 1000, augment=True)
    return dataset, EpochOrder(images, shuffle=True, seed=0)


def classification_set(images: int = 102_400) -> tuple[ClassificationDataset, EpochOrder]:
    """Return a set of so many images in a thousand classes, the same few files over and over, with augmentation."""
    place = photo_like_classes(_pictures(), images, 1000, CLASS_FILES, CLASS_SIZE)
    augmentation = Augmentation(0, (0.05, 1.0), (0.75, 4 / 3), flip=True, mixup=0.0)
    dataset = ClassificationDataset(labelled_images(place), 224, 256, augmentation)
    return dataset, EpochOrder(images, shuffle=True, seed=0)


def _by_dali_alone(config: DALIConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end, read, decoded and resized by DALI from its own file reader."""
    from nvidia.dali import Pipeline, fn, types

    files = [str(path) for path in photo_like_jpegs(_pictures(), FILES, (WIDTH, HEIGHT), QUALITY)]
    pipe = Pipeline(BATCH, config.threads, torch.cuda.current_device(), prefetch_queue_depth=config.prefetch)
    with pipe:
        encoded, _ = fn.readers.file(files=files, random_shuffle=True)
        images = fn.decoders.image(encoded, device="mixed", output_type=types.RGB, **config.decoder_options())
        pipe.set_outputs(fn.resize(images, size=SIZE, interp_type=types.INTERP_LINEAR, antialias=False))
    while True:
        (output,) = pipe.run(torch.cuda.current_stream())
        yield {"images": from_dlpack(output.as_tensor()).clone()}


def _windows_by_dali_alone(config: DALIConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end, read, cropped at random and resized by DALI from its own file reader."""
    from nvidia.dali import Pipeline, fn, types

    files = [str(path) for path in photo_like_jpegs(_pictures(), CLASS_FILES, CLASS_SIZE)]
    pipe = Pipeline(CLASS_BATCH, config.threads, torch.cuda.current_device(), prefetch_queue_depth=config.prefetch)
    with pipe:
        encoded, _ = fn.readers.file(files=files, random_shuffle=True)
        window = fn.decoders.image_random_crop(
            encoded, device="mixed", output_type=types.RGB, random_area=[0.05, 1.0], **config.decoder_options()
        )
        images = fn.resize(window, size=[224, 224], interp_type=types.INTERP_LINEAR, antialias=True)
        pipe.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()))
    while True:
        (output,) = pipe.run(torch.cuda.current_stream())
        yield {"images": from_dlpack(output.as_tensor()).clone()}


def _pictures() -> Path:
    return cache_folder() / "bench-images"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _to_device(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values.to(_device(), non_blocking=True) for name, values in batch.items()}
