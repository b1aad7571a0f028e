"""frozen_stem on a GPU: the kernels against their reference, in a captured graph, and in a detector's backbone."""

import pytest
import torch

from fasttrain.callbacks.folded_norm import ScaleBias, fold
from fasttrain.callbacks.frozen_stem import FrozenStem, FrozenStemSurgery, frozen_stem
from fasttrain.callbacks.frozen_stem.bench import make_stem
from fasttrain.callbacks.frozen_stem.reference import TOLERANCE, reference
from fasttrain.capture import captured
from fasttrain.recipes.retinanet.backbone import build_backbone

pytestmark = pytest.mark.gpu


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 800, 800), (3, 128, 96), (1, 30, 46)])
def test_it_is_the_reference(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    batch, height, width = shape
    x = torch.randn(batch, 3, height, width, device="cuda").to(memory_format=torch.channels_last)
    weight = (torch.randn(64, 3, 7, 7, device="cuda") / 12).to(dtype)
    folded = ScaleBias(*torch.randn(2, 64, device="cuda"))
    wanted = reference(x.to(dtype).double(), weight.double(), ScaleBias(*(part.double() for part in folded)))
    found = frozen_stem(x, weight, folded)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert off(found, wanted) <= TOLERANCE[dtype]


def test_in_a_graph_it_follows_its_input() -> None:
    torch.manual_seed(0)
    stem = make_stem().cuda().to(memory_format=torch.channels_last)
    static = torch.randn(2, 3, 64, 64, device="cuda")
    FrozenStemSurgery(stem).apply()
    out: list[torch.Tensor] = []

    def call() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out[:] = [stem(static)]

    replay = captured(call)
    for _ in range(2):
        static.normal_()
        replay()
        wanted = reference(static.bfloat16().double(), stem[0].weight.bfloat16().double(),
                           ScaleBias(*(part.double() for part in fold(make_stem().cuda()[1]))))  # fmt: skip
        assert off(out[0], wanted) <= TOLERANCE[torch.bfloat16]


def test_a_backbone_trains_as_before() -> None:
    torch.manual_seed(0)
    backbone = build_backbone("resnet50", (3, 4, 5), 64, frozen_norm=True, trainable_layers=3).cuda()
    backbone = backbone.to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 128, 128, device="cuda").to(memory_format=torch.channels_last)

    def gradient() -> torch.Tensor:
        backbone.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            torch.stack([level.float().square().mean() for level in backbone(images)]).sum().backward()
        found = backbone.fpn.layer_blocks[0][0].weight.grad  # type: ignore[index, union-attr]
        assert found is not None
        return found.double()  # type: ignore[operator]

    before = gradient()
    FrozenStemSurgery(backbone).apply()
    assert type(backbone.body.conv1) is FrozenStem
    assert float((gradient() - before).norm() / before.norm()) < 0.05
