"""channels_last and precision on a GPU, against their references, and through a whole fit."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torchvision.models import resnet18

from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.channels_last import batch_to_channels_last, to_channels_last
from fasttrain.callbacks.channels_last.reference import TOLERANCE, reference
from fasttrain.fit import fit
from fasttrain.recipe import resolve

pytestmark = pytest.mark.gpu

BY_NAME_ONLY = {
    "compile", "async_scoring", "dali_loader", "evaluation_cache", "evaluation_ranks", "graph_evaluation",
    "sequence_packing",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_channels_last_equals_its_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        model: nn.Module = resnet18(weights=None).cuda().eval().to(dtype)
        images = torch.randn(4, 3, 96, 96, device="cuda", dtype=dtype)
        with torch.no_grad():
            wanted = reference(model, images)
            assert to_channels_last(model)
            found = model(batch_to_channels_last(images))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert (found - wanted).abs().max() / wanted.abs().max() < TOLERANCE[dtype]


def test_a_foreign_project_with_every_optimization(foreign_project: Path, tmp_path: Path) -> None:
    overrides = ["optimizations=full", "data.size=64", "module.width=64", "data.batch_size=32", "target.stop=false",
                 "trainer.max_epochs=4"]  # fmt: skip
    outcome = fit(resolve(foreign_project / "shapes.yaml", overrides), CATALOGUE, run_dir=tmp_path / "run",
                  console=Console(quiet=True))  # fmt: skip
    assert outcome.result["reached"]
    verdicts = {row["name"]: row["verdict"] for row in json.loads(
        (outcome.folder / "plan.json").read_text())["optimizations"]}  # fmt: skip
    assert set(verdicts) == set(CATALOGUE) - BY_NAME_ONLY
