"""Where a GPU's time goes: a trace is read, divided among kinds of kernels without a rest, and replays are found."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from fasttrain.kernel_times import (
    GAP,
    OTHER,
    Kernel,
    StepProfile,
    kernels_in,
    kind_of,
    longest,
    replays_in,
    time_by_kind,
    window_of,
)

KINDS = {"data": ("decode",), "loss": ("focal",), "convolutions": ("fprop", "wgrad")}


def replay(launch: int, begin: float, count: int = 60) -> list[Kernel]:
    return [Kernel("sm90_xmma_fprop", begin + i, begin + i + 0.5, launch) for i in range(count)]


def test_a_trace_is_read_by_begin(tmp_path: Path) -> None:
    def event(name: str, category: str, begin: float, **args: int) -> dict[str, object]:
        return {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": 2.5, "args": args}

    events = [
        event("wgrad", "kernel", 7.0, correlation=3, stream=7), event("cudaGraphLaunch", "cuda_runtime", 1.0),
        event("Memcpy DtoD", "gpu_memcpy", 2.0, correlation=2), event("aten::add", "cpu_op", 0.0),
        event("Memset", "gpu_memset", 11.0), {"name": "process_name", "ph": "M"},
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert kernels_in(tmp_path / "trace.json") == [
        Kernel("Memcpy DtoD", 2.0, 4.5, 2), Kernel("wgrad", 7.0, 9.5, 3), Kernel("Memset", 11.0, 13.5, 0),
    ]  # fmt: skip


def test_the_first_kind_with_a_part_of_the_name_gets_the_kernel() -> None:
    names = ["void focal_FPROP()", "Fprop", "decode_focal", "add"]
    assert [kind_of(name, KINDS) for name in names] == ["loss", "convolutions", "data", OTHER]


def test_time_that_kernels_share_is_divided_and_what_runs_beside_others_counts_where_it_is_alone() -> None:
    kernels = [
        Kernel("fprop", -5.0, 4.0), Kernel("wgrad", 2.0, 6.0), Kernel("focal", 3.0, 4.0),
        Kernel("decode", 0.0, 9.0), Kernel("add", 11.0, 20.0),
    ]  # fmt: skip
    times = time_by_kind(kernels, KINDS, 0.0, 12.0, beside=["data"])
    assert times == pytest.approx({"data": 3.0, "loss": 1 / 3, "convolutions": 6 - 1 / 3, OTHER: 1.0, GAP: 2.0})
    together = time_by_kind(kernels, KINDS, 0.0, 12.0)
    assert together["data"] == pytest.approx(2 * 0.5 + 1 / 3 + 1 / 4 + 2 * 0.5 + 3.0)
    (first, *_) = longest(kernels, KINDS, 0.0, 12.0)
    assert first == ("data", "decode", 9.0, 1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["fprop", "focal", "decode", "add"]), st.floats(-5, 15), st.floats(0.01, 8)),
        max_size=12,
    )
)
def test_the_parts_add_up_to_the_whole(found: list[tuple[str, float, float]]) -> None:
    kernels = [Kernel(name, begin, begin + length) for name, begin, length in found]
    for beside in ([], ["data"]):
        times = time_by_kind(kernels, KINDS, 0.0, 10.0, beside)
        assert sum(times.values()) == pytest.approx(10.0)
        assert min(times.values()) >= 0.0
    covered = torch.zeros(10_000, dtype=torch.bool)
    middles = (torch.arange(10_000) + 0.5) / 1000
    for kernel in kernels:
        covered |= (middles >= kernel.begin) & (middles < kernel.end)
    assert times[GAP] == pytest.approx(10.0 - float(covered.sum()) / 1000, abs=0.03)


def test_steps_are_from_one_replay_to_the_next() -> None:
    alone = [Kernel("copy", 90.0, 91.0, launch) for launch in range(100, 160)]
    kernels = sorted([*replay(1, 100.0), *replay(2, 200.0), *replay(3, 310.0), *alone], key=lambda k: k.begin)
    assert replays_in(kernels) == [100.0, 200.0, 310.0]
    assert window_of(kernels) == (100.0, 310.0, 2)
    assert window_of(alone) == (90.0, 91.0, 0)
    assert window_of([]) == (0.0, 0.0, 0)


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_without_a_gpu_is_traced_and_has_no_kernels() -> None:
    profile = StepProfile(first=1, steps=2)
    loader = DataLoader(torch.ones(12, 4), batch_size=2)  # type: ignore[arg-type]
    pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[profile], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Small(), loader)  # fmt: skip
    assert profile.kernels == []
    assert profile._profile is None, "it ended"
