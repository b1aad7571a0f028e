"""DALI's loader by itself: lengths, epochs, shards, resuming, bad files, and nothing that stays behind."""

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoded_pictures import CONFIG, SIZE, Pictures, keys_of, loader, seen, targets
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("nvidia.dali")

from fasttrain.callbacks import DALIConfig, DALILoader, DetectionGraph, EncodedFiles, UsableSamples
from fasttrain.callbacks.dali_loader.pipeline import GraphPipeline
from fasttrain.callbacks.dali_loader.reading import HostBatch
from fasttrain.callbacks.dali_loader.reference import TOLERANCE, reference
from fasttrain.errors import ConfigError, DataError
from fasttrain.order import EpochOrder, EvaluationOrder, ResumableLoader, SampleKey

PICTURES = Pictures(12)


def keys_in_order(order: EpochOrder, batch_size: int, drop_last: bool) -> list[list[tuple[int, int]]]:
    """Return what the torch loader gives."""

    class Keys(torch.utils.data.Dataset[Any]):
        def __getitem__(self, key: SampleKey) -> Any:
            return tuple(key)

    return list(ResumableLoader(Keys(), order, batch_size=batch_size, drop_last=drop_last, collate_fn=list))


# ---- lengths, epochs, shards: NVIDIA/DALI#2856, #4686, #3865, #5046, #3828 -------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(0, 12), batch_size=st.integers(1, 7), drop_last=st.booleans(), prefetch=st.integers(1, 3),
    ranks=st.integers(1, 3), shuffle=st.booleans(), even=st.booleans(),
)  # fmt: skip
def test_length_and_order_are_the_torch_loaders_for_every_policy(
    size: int, batch_size: int, drop_last: bool, prefetch: int, ranks: int, shuffle: bool, even: bool
) -> None:
    config = replace(CONFIG, prefetch=prefetch)
    shares = []
    for rank in range(ranks):
        order = EpochOrder(size, shuffle=shuffle, seed=3, rank=rank, world_size=ranks, even=even)
        one = loader(samples=PICTURES, batch_size=batch_size, order=order, drop_last=drop_last, config=config)
        for epoch in range(2):
            found = seen(one, epoch)
            assert found == keys_in_order(order, batch_size, drop_last)
            assert len(one) == len(found), "as long before as it was"
        shares.append([index for batch in found for _, index in batch])
        one.close()
    together = [index for share in shares for index in share]
    assert len(set(together)) == len(together), "no sample twice, on no rank"
    if not drop_last and not even:
        assert sorted(together) == list(range(size)), "none lost, none padded"


def test_every_epoch_is_whole_whatever_became_of_the_one_before() -> None:
    one = loader(10, 3, config=replace(CONFIG, prefetch=3))
    whole = [seen(loader(10, 3), epoch) for epoch in range(4)]
    one.order.set_epoch(0)
    for _, batch in zip(range(2), one, strict=False):  # as `limit_train_batches` or a sanity check leaves it
        assert batch
    assert seen(one, 1) == whole[1]
    iter(one)  # asked for and never used
    assert seen(one, 2) == whole[2]
    assert seen(one, 3) == whole[3]
    assert len({tuple(batch) for epoch in whole for batch in epoch}) == 16, "reshuffled each epoch"


def test_one_pass_at_a_time() -> None:
    one = loader(10, 3)
    first = iter(one)
    next(first)
    assert len(list(one)) == 4
    with pytest.raises(RuntimeError, match=r"^this pass over a DALI loader was ended, by another pass or by close\(\)"):
        next(first)
    assert len(list(one)) == 4, "the older one's end took nothing away"


# ---- pixels ---------------------------------------------------------------------------------------------------------


def test_images_are_the_reference_within_its_tolerance_and_targets_ride_along() -> None:
    largest, mean = TOLERANCE["cpu"]
    mirrored = 0
    for batch in loader(samples=PICTURES, batch_size=5):
        flipped = ((batch["epoch"] + batch["index"]) % 2 == 1).tolist()
        mirrored += sum(flipped)
        wanted = reference([PICTURES.files[index] for index in batch["index"].tolist()], SIZE, flipped)
        apart = (batch["images"].float() - wanted.float()).abs()
        assert batch["images"].dtype == torch.uint8
        assert batch["images"].is_contiguous(memory_format=torch.channels_last)
        assert apart.max() <= largest
        assert apart.mean() <= mean
        assert set(batch) == {"images", "epoch", "index"}
    assert mirrored == 6


@pytest.mark.parametrize(("dtype", "cast"), [("float32", None), ("float16", None), ("float32", torch.bfloat16)])
def test_floats_are_normalized(dtype: Any, cast: torch.dtype | None) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    graph = DetectionGraph(targets, SIZE, dtype=dtype, mean=mean, std=std)
    order = EpochOrder(6, shuffle=False, seed=0)
    casts = {"images": cast} if cast else {}
    (batch,) = DALILoader(PICTURES, graph, order, 6, config=CONFIG, casts=casts)
    images = batch["images"]
    assert images.dtype == (cast or getattr(torch, dtype))
    assert images.is_contiguous(memory_format=torch.channels_last)
    wanted = reference(PICTURES.files[:6], SIZE, [index % 2 == 1 for index in range(6)])
    levels = 255 * (images.float() * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1))
    rounding = {"float32": 0.01, "float16": 0.1}[dtype] + (0.5 if cast else 0.0)
    assert (levels - wanted.float()).abs().max() <= TOLERANCE["cpu"][0] + rounding


def test_batches_that_are_kept_stay_as_they_were() -> None:
    one = loader(10, 3)
    kept = list(one)
    copies = [{name: values.clone() for name, values in batch.items()} for batch in kept]
    list(one)
    one.close()
    for batch, copy in zip(kept, copies, strict=True):
        for name, values in batch.items():
            assert torch.equal(values, copy[name])


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_goes_on_where_it_stood(drop_last: bool) -> None:
    whole = seen(loader(10, 3, drop_last=drop_last), 2)
    for served in range(1, len(whole) + 1):
        stopped = loader(10, 3, drop_last=drop_last)
        stopped.order.set_epoch(2)
        batches = iter(stopped)
        for _ in range(served):
            next(batches)
        state = stopped.state_dict()
        assert state == {"epoch": 2, "batches": served}, "those handed out, not those prepared"
        fresh = loader(10, 3, drop_last=drop_last)
        fresh.load_state_dict(state)
        assert seen(fresh, 2) == whole[served:]
        assert seen(fresh, 3) == seen(loader(10, 3, drop_last=drop_last), 3), "the next epoch is a whole one"


def test_a_pass_draws_nothing_from_the_global_random_state() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    list(loader(4, 2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]


# ---- devices: NVIDIA/DALI#2808 --------------------------------------------------------------------------------------


def test_the_pipeline_is_made_for_the_device_it_was_given() -> None:
    graph = DetectionGraph(targets, SIZE)
    pipeline = GraphPipeline(graph, 2, torch.device("cuda", 3), CONFIG)  # defined; built with the first batch
    assert pipeline._pipe.device_id == 3
    assert GraphPipeline(graph, 2, torch.device("cpu"), CONFIG)._pipe.device_id is None


# ---- bad files ------------------------------------------------------------------------------------------------------


def with_bad(*bad: int, data: bytes = b"no image " * 20) -> Pictures:
    pictures = Pictures(10)
    for index in bad:
        pictures.files[index] = np.frombuffer(data, np.uint8)
    return pictures


def ascending() -> EpochOrder:
    return EpochOrder(10, shuffle=False, seed=0)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("bad", [0, 4])
def test_a_bad_file_is_named_when_it_is_its_batchs_turn(bad: int, wrapped: bool, prefetch: int) -> None:
    pictures = with_bad(bad)
    samples = UsableSamples(pictures) if wrapped else pictures
    one = loader(samples=samples, batch_size=3, order=ascending(), config=replace(CONFIG, prefetch=prefetch))
    given_out = []
    with pytest.raises(DataError, match=rf"^'picture {bad}' can't be decoded \(DALI says: .*\); replace the file\.$"):
        given_out.extend(keys_of(batch) for batch in one)
    assert len(given_out) == bad // 3, "what came before it was handed out"
    assert one.state_dict() == {"epoch": 0, "batches": bad // 3}
    pictures.files[bad] = pictures.files[1]
    assert len(list(one)) == 4, "it goes on once the file is replaced"


def test_two_bad_files_in_neighbouring_batches() -> None:
    samples = UsableSamples(with_bad(0, 1, 5), "substitute")
    batches = list(loader(samples=samples, batch_size=3, order=ascending(), config=replace(CONFIG, prefetch=3)))
    assert [len(batch["index"]) for batch in batches] == [3, 3, 3, 1]
    assert samples.shown[:10].tolist() == [2, 2, 2, 3, 4, 6, 6, 7, 8, 9]
    images = torch.cat([batch["images"] for batch in batches])
    assert torch.equal(images[5], images[6].flip(-1)), "the picture of the next, mirrored as this visit is"
    assert set(samples.faults) == {0, 1, 5}


def test_blank_pictures_for_bad_files() -> None:
    samples = UsableSamples(with_bad(4), "blank")
    images = torch.cat([batch["images"] for batch in loader(samples=samples, order=ascending())])
    assert (images[4] == 0).all()
    assert (images[5] != 0).any()
    assert samples.shown[4] == -1


def test_an_index_of_no_sample_is_a_blank_picture() -> None:
    """As `EvaluationOrder` fills its last batch up, whatever is to become of bad files."""
    samples = UsableSamples(Pictures(4))
    found = loader(samples=samples, order=EvaluationOrder(4, batch_size=3))
    assert [batch["index"].tolist() for batch in found] == [[0, 1, 2], [3, 4, 4]]
    images = torch.cat([batch["images"] for batch in found])
    assert images[3].any()
    assert not images[4:].any()
    assert samples.shown.tolist() == [0, 1, 2, 3, -1]
    assert not samples.faults


def test_files_without_their_end_are_bad_though_decoders_make_something_of_them() -> None:
    pictures = Pictures(10)
    for index, data in {2: pictures.files[2][:-40], 3: pictures.files[3][:0]}.items():
        pictures.files[index] = data
    sentences = {2: "'picture 2' is cut off before its end", 3: r"'picture 3' is empty \(0 bytes\)"}
    for index, sentence in sentences.items():
        with pytest.raises(DataError, match=f"^{sentence}; download or copy it again.$"):
            UsableSamples(pictures).read(index)
    samples = UsableSamples(pictures, "substitute")
    list(loader(samples=samples, order=ascending()))
    assert set(samples.faults) == {2, 3}


def test_a_set_without_a_usable_file() -> None:
    samples = UsableSamples(with_bad(*range(10), data=b""), "substitute")
    with pytest.raises(DataError) as error:
        list(loader(samples=samples, order=ascending()))
    assert str(error.value) == (
        "'picture 0' and the 9 samples after it can't be used; replace them, or have bad ones be an error to see what "
        "is wrong with the first."
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    PICTURES.files[0].tofile(tmp_path / "0.jpg")
    files = EncodedFiles([tmp_path / "0.jpg", tmp_path / "1.jpg"])
    one = loader(samples=files, batch_size=1, order=EpochOrder(2, shuffle=False, seed=0))
    batches = iter(one)
    assert keys_of(next(batches)) == [(0, 0)]
    with pytest.raises(DataError, match=r"1\.jpg' can't be read: No such file or directory\.$"):
        next(batches)


def test_an_error_that_is_no_samples_is_not_blamed_on_one() -> None:
    class CutsOutside(DetectionGraph):
        def outputs(self, *given: Any) -> dict[str, Any]:
            from nvidia.dali import fn

            found = super().outputs(*given)
            return {**found, "images": fn.slice(found["images"], [SIZE[0] + 1], [8], axes=[0], normalized_anchor=False)}

    one = DALILoader(PICTURES, CutsOutside(targets, SIZE), EpochOrder(12, shuffle=False, seed=0), 4, config=CONFIG)
    with pytest.raises(RuntimeError, match=r"(?i)slice"):
        list(one)


def test_a_graph_that_gives_too_few_rows_is_told_which() -> None:
    def too_few(keys: Any) -> dict[str, Any]:
        found = targets(keys)
        return {**found, "index": found["index"][: max(len(keys) - 1, 0)]}

    one = DALILoader(PICTURES, DetectionGraph(too_few, SIZE), EpochOrder(12, shuffle=False, seed=0), 4, config=CONFIG)
    with pytest.raises(ValueError, match="gave 3 rows of 'index' for 4 samples; it must give one for each"):
        list(one)


# ---- what the decoder sees first -------------------------------------------------------------------------------------


def test_the_first_batch_that_dali_works_on_is_as_large_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = []
    feed = GraphPipeline._feed

    def noted(self: GraphPipeline, batch: HostBatch) -> None:
        fed.append([key.index for key in batch.keys])
        feed(self, batch)

    monkeypatch.setattr(GraphPipeline, "_feed", noted)
    one = loader(2, 5, config=replace(CONFIG, prefetch=2))  # as when a run goes on with an epoch's last batch
    assert [index for batch in seen(one, 0) for _, index in batch] == fed[-1]
    assert [len(batch) for batch in fed] == [5, 5, 2], "DALI's decoder on a GPU is thrice as slow after a small one"
    assert set(fed[0]) == {0, 1}


# ---- memory and ends: NVIDIA/DALI#486, #5087, #328 -------------------------------------------------------------------


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def test_fifty_epochs_take_no_more_memory_than_ten() -> None:
    one = loader(samples=PICTURES, batch_size=4)
    for epoch in range(60):
        if epoch == 10:
            gc.collect()
            before, threads = resident_mb(), threading.active_count()
        assert len(seen(one, epoch)) == 3
    gc.collect()
    assert resident_mb() - before < 8
    assert threading.active_count() == threads


def test_closed_it_leaves_no_pipeline_and_no_thread() -> None:
    def readers() -> int:
        return sum(thread.name.startswith("dali-read") for thread in threading.enumerate())

    gc.collect()
    before = readers()
    one = loader(6, 2)
    list(one)
    pipeline = weakref.ref(one._open.pipeline)
    assert readers() > before
    one.close()
    assert pipeline() is None
    for thread in threading.enumerate():
        if thread.name.startswith("dali-read"):
            thread.join(timeout=5)
    assert readers() == 0
    list(one)
    pipeline = weakref.ref(one._open.pipeline)
    del one
    gc.collect()
    assert pipeline() is None, "nor does one that nobody closed"


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"num_threads": 0}, r"a DALI loader's num_threads is 0; it must be at least 1\."),
        ({"prefetch": 0}, r"a DALI loader's prefetch is 0; it must be at least 1\."),
        ({"device_memory_mb": -1}, r"a DALI loader's device_memory_mb is -1; it must be at least 0\."),
        ({"hw_decoder_load": 1.5}, r"a DALI loader's hw_decoder_load is 1\.5; it is a share from 0 to 1\."),
    ],
)
def test_values_that_cannot_be(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        DALIConfig(**values)
