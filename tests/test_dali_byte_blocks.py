"""Memory of encoded bytes that is used again: never while something lies in it, always when nothing does."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from encoded_pictures import CONFIG, jpeg, loader

from fasttrain.callbacks.dali_loader.byte_blocks import ByteBlocks, memory_for
from fasttrain.callbacks.dali_loader.encoded import EncodedFiles, whole_file


def test_memory_comes_back_when_the_last_view_is_gone_and_not_before() -> None:
    blocks = ByteBlocks(256)
    with blocks.in_use():
        first, second = memory_for(100), memory_for(100)
        third = memory_for(100)
    assert [len(each) for each in (first, second, third)] == [100] * 3
    assert blocks.made == 2, "two lie in a block of 256, at multiples of 64"
    place, view = first.ctypes.data, second[10:20].data
    del first, second
    with blocks.in_use():
        other = memory_for(256)
        assert blocks.made == 3, "a memoryview of the second is left"
        del view
        again = memory_for(1)
        assert (blocks.made, again.ctypes.data) == (3, place)
    assert not np.shares_memory(other, again)


def test_what_is_larger_than_a_block_has_memory_of_its_own() -> None:
    blocks = ByteBlocks(64)
    with blocks.in_use():
        assert memory_for(65).shape == (65,)
        assert blocks.made == 0
        assert memory_for(64).shape == (64,)
    assert blocks.made == 1
    with blocks.in_use():
        assert memory_for(0).shape == (0,), "an empty file, and the first of its thread"


def test_elsewhere_memory_is_fresh() -> None:
    blocks = ByteBlocks(64)
    with pytest.raises(ValueError, match="stop"), blocks.in_use():
        raise ValueError("stop")
    memory_for(10)
    assert blocks.made == 0


def test_threads_never_share_what_is_in_use() -> None:
    blocks = ByteBlocks(1024)

    def work(seed: int) -> bool:
        chance, held, good = random.Random(seed), dict[int, np.ndarray](), True
        for turn in range(300):
            with blocks.in_use():
                taken = memory_for(chance.randrange(1, 400))
            taken[:] = (seed * 31 + turn) % 256
            held[turn] = taken
            if len(held) > 5:
                oldest = chance.choice(list(held))
                good &= bool((held.pop(oldest) == (seed * 31 + oldest) % 256).all())
        return good

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(8)))
    assert blocks.made <= 4 * 8


def test_a_file_that_became_shorter_while_it_was_read_ends_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with ByteBlocks().in_use():
        assert whole_file(tmp_path / "a").tobytes() == b"abc"
        (tmp_path / "a").write_bytes(b"")
        assert whole_file(tmp_path / "a").tobytes() == b""


def test_a_loader_reads_epoch_after_epoch_into_the_same_blocks(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    paths = [tmp_path / f"{index}.jpg" for index in range(12)]
    for index, path in enumerate(paths):
        path.write_bytes(jpeg(index, 30 + index % 5, 40 + index % 3).tobytes())
    kept = loader(12, 3, config=CONFIG)
    ours = loader(batch_size=3, samples=EncodedFiles(paths), config=CONFIG)
    ours._open.blocks = blocks = ByteBlocks(2**12)
    made = []
    for epoch in range(6):
        for each in (kept, ours):
            each.order.set_epoch(epoch)
        for expected, batch in zip(kept, ours, strict=True):
            assert torch.equal(batch["index"], expected["index"])
            assert torch.equal(batch["images"], expected["images"]), "nothing was written over"
        made.append(blocks.made)
    assert 0 < made[-1] <= 24, "what is read, held and in use: 5 batches of up to 3 blocks, and some to spare"
    batches = 6 * 4
    assert made[-1] < batches, "not a block for each batch"
    ours.close()
    gc.collect()
    assert ours._open.blocks is not blocks, "close gave them up"
    kept.close()
