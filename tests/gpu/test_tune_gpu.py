"""Timing of a site's alternatives on the GPU: in CUDA graphs, or none of them; and a recipe tuned from end to end."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from scaled_blocks import Blocks, FusedScaled, ScaledOptimization, ScaledPatches
from torch import Tensor, nn

from fasttrain.choices_file import choices_path, load_choices
from fasttrain.patches import PatchSite
from fasttrain.recipe import resolve
from fasttrain.site_timing import EAGER, IN_GRAPH, time_site
from fasttrain.step_calls import Arguments
from fasttrain.tune import tune

pytestmark = pytest.mark.gpu


def arguments(*shape: int, dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None) -> Arguments:
    return Arguments((torch.randn(shape).to(dtype).requires_grad_(),), {}, autocast, True)


def test_the_alternatives_are_replayed_as_graphs() -> None:
    model = Blocks().cuda()
    site = ScaledPatches().sites(model)[0]
    times = time_site(model, site, [arguments(512, 8), arguments(256, 8)], "cuda:0", 120, 1)
    assert (times.how, times.missing) == (IN_GRAPH, {})
    assert list(times.times) == ["plain", "compile", "ours"]
    assert all(0 < each.median_ms < 1 for each in times.times.values()), "launches are not part of it"
    assert times.compile_seconds is not None
    assert times.compile_seconds > 0


def test_a_convolution_in_channels_last_under_autocast() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(64, 64, 3, padding=1)}).cuda().to(memory_format=torch.channels_last)
    plain = nn.Sequential(model["conv"], nn.ReLU())
    images = arguments(8, 64, 50, 50, dtype=torch.float16, autocast=torch.float16)
    images.positional[0].data = images.positional[0].data.to(memory_format=torch.channels_last)
    times = time_site(model, PatchSite("conv", plain, lambda: model["conv"]), [images], "cuda:0", 120, 1)
    assert (times.how, times.missing) == (IN_GRAPH, {})


class Waits(nn.Module):
    """Can't be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().sum().item())


def test_one_that_cannot_be_captured_keeps_the_others_from_it() -> None:
    model = nn.ModuleDict({"site": nn.Identity()}).cuda()
    times = time_site(model, PatchSite("site", nn.Tanh(), Waits), [arguments(8, 8)], "cuda:0", 0, 1)
    assert times.how == EAGER
    assert set(times.times) == {"plain", "ours"}
    torch.cuda.synchronize()
    assert torch.ones(2, device="cuda").sum().item() == 2, "the device is as it was"


def test_a_recipe_is_tuned_for_this_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    file = tmp_path / "blocks.yaml"
    file.write_text(
        "{module: scaled_blocks.Blocks, data: scaled_blocks.BlocksData, trainer: {max_epochs: 1}, "
        "optimizations: {scaled: {}}}"
    )
    rooms: Any = {"scaled": ScaledOptimization}
    out = io.StringIO()
    assert tune(
        resolve(file, ["trainer.precision=bf16-mixed"]), rooms, Console(file=out, width=200), budget_seconds=100
    )
    path = choices_path(torch.cuda.get_device_name(0))
    entries = load_choices(path).values()
    assert {entry.seen for entry in entries} == {"blocks: first", "blocks: wide", "blocks: shared"}, out.getvalue()
    assert all(entry.how == IN_GRAPH and entry.precision == "bf16-mixed" for entry in entries)
    assert FusedScaled.__name__ not in path.read_text(), "what is fused has no part in a site's name"
    assert "saves of the step" in out.getvalue()
