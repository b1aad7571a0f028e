"""RetinaNet whole: the MLPerf model's facts, equality with torchvision's model, and what it refuses."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import resnet18, resnext50_32x4d
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection import retinanet_resnet50_fpn
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d, box_iou
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from fasttrain.errors import ConfigError
from fasttrain.recipes.image_sets.files import load_image
from fasttrain.recipes.retinanet.backbone import build_backbone
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig
from fasttrain.recipes.retinanet.resize import resize, scale_boxes

SIZE = (64, 96)
SMALL = RetinaNetConfig(
    num_classes=8,
    backbone="small",
    image_size=(96, 96),
    levels=(3, 4, 5),
    anchor_sizes=(16, 32, 64),
    fpn_channels=48,
    head_depth=2,
    head_norm="group",
)


def resnet18_config(**changes: Any) -> RetinaNetConfig:
    return RetinaNetConfig(**{"num_classes": 4, "backbone": "resnet18", "image_size": SIZE, **changes})


def torchvision_twin(model: RetinaNet, frozen: bool = False) -> TorchvisionRetinaNet:
    """Torchvision's RetinaNet on ResNet-18 with the same weights; it resizes to the same size by itself."""
    norm = FrozenBatchNorm2d if frozen else nn.BatchNorm2d
    backbone = _resnet_fpn_extractor(
        resnet18(weights=None, norm_layer=norm), 5, returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(512, 256)
    )
    twin = TorchvisionRetinaNet(backbone, model.config.num_classes, fixed_size=(SIZE[1], SIZE[0]))
    twin.load_state_dict(model.state_dict())
    return twin


def padded(boxes: list[Tensor], labels: list[Tensor], to: int) -> tuple[Tensor, Tensor]:
    all_boxes, all_labels = torch.zeros(len(boxes), to, 4), torch.full((len(boxes), to), -1)
    for i, real in enumerate(boxes):
        all_boxes[i, : len(real)] = real
        all_labels[i, : len(real)] = labels[i]
    return all_boxes, all_labels


def uncertain(model: RetinaNet) -> RetinaNet:
    """Spread the scores, which all start at 0.01, so that there are detections."""
    torch.manual_seed(5)
    nn.init.normal_(model.head.classification_head.cls_logits.weight, std=0.3)
    nn.init.constant_(model.head.classification_head.cls_logits.bias, -3.0)
    return model


@pytest.fixture(scope="module")
def mlperf() -> RetinaNet:
    return RetinaNet(RetinaNetConfig(norm="frozen", trainable_layers=3))


def test_the_mlperf_model_has_120087_anchors(mlperf: RetinaNet) -> None:
    assert mlperf.anchors.shape == (120087, 4)
    assert mlperf.anchors_per_level == [90000, 22500, 5625, 1521, 441]


def test_the_mlperf_model_logs_the_89_tensors_that_the_compliance_checker_wants(mlperf: RetinaNet) -> None:
    rules = files("mlperf_logging") / "compliance_checker" / "training_2.0.0" / "closed_ssd.yaml"
    wanted = re.findall(r'"(module\.[^"]+)"', rules.read_text())
    assert len(wanted) == 89
    assert sorted(mlperf.logged_tensors()) == sorted(wanted)


def test_the_mlperf_model_trains_its_last_three_stages_pyramid_and_heads(mlperf: RetinaNet) -> None:
    frozen = {name.split(".")[2] for name, parameter in mlperf.named_parameters() if not parameter.requires_grad}
    assert frozen == {"conv1", "layer1"}
    trained = sum(p.numel() for p in mlperf.parameters() if p.requires_grad)
    assert (trained, sum(p.numel() for p in mlperf.parameters())) == (40_977_772, 41_189_420)


def test_state_dicts_load_strictly_into_torchvision_and_back_mlperf(mlperf: RetinaNet) -> None:
    backbone = _resnet_fpn_extractor(
        resnext50_32x4d(weights=None, norm_layer=FrozenBatchNorm2d),
        3,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(2048, 256),
    )
    twin = TorchvisionRetinaNet(backbone, 264)
    twin.load_state_dict(mlperf.state_dict())
    mlperf.load_state_dict(twin.state_dict())


def test_state_dicts_load_strictly_into_torchvision_and_back_resnet50() -> None:
    twin = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    model = RetinaNet(RetinaNetConfig(num_classes=91, backbone="resnet50", extra_levels_from="p5"))
    model.load_state_dict(twin.state_dict())
    twin.load_state_dict(model.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]


def test_losses_are_torchvisions_on_images_of_odd_sizes(txl_pbc: Path) -> None:
    torch.manual_seed(0)
    model = RetinaNet(resnet18_config()).train()
    twin = torchvision_twin(model).train()
    pixels, boxes, labels = real_images(txl_pbc)
    boxes[1], labels[1] = boxes[1][:0], labels[1][:0]
    images = torch.stack([resize(image, SIZE) for image in pixels])
    resized = [scale_boxes(b, (image.shape[1], image.shape[2]), SIZE) for b, image in zip(boxes, pixels, strict=True)]
    with torch.no_grad():
        expected = twin(pixels, [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)])
        losses = model.loss(model(images), *padded(resized, labels, 60))
    torch.testing.assert_close(losses["cls_loss"], expected["classification"], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["box_loss"], expected["bbox_regression"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("norm", ["batch", "frozen"])
def test_gradients_are_torchvisions(txl_pbc: Path, norm: str) -> None:
    torch.manual_seed(0)
    model = RetinaNet(resnet18_config(norm=norm, trainable_layers=5)).train()
    twin = torchvision_twin(model, frozen=norm == "frozen").train()
    pixels, boxes, labels = (part[:2] for part in real_images(txl_pbc))
    # Of the right size already: otherwise the order of resize and normalisation rounds differently, and a ReLU or two
    # of a million opens in one model and not in the other.
    images = torch.stack([resize(image, SIZE) for image in pixels])
    boxes = [scale_boxes(b, (image.shape[1], image.shape[2]), SIZE) for b, image in zip(boxes, pixels, strict=True)]
    torch.stack(list(model.loss(model(images), *padded(boxes, labels, 60)).values())).sum().backward()
    targets = [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)]
    torch.stack(list(twin(list(images), targets).values())).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        error = float((ours.grad - theirs.grad).norm() / theirs.grad.norm())
        assert error < 1e-4, f"{name}: {error}"


def test_detections_are_torchvisions_on_images_of_odd_sizes(txl_pbc: Path) -> None:
    model = uncertain(RetinaNet(resnet18_config())).eval()
    twin = torchvision_twin(model).eval()
    pixels, _, _ = real_images(txl_pbc)
    with torch.no_grad():
        expected = twin(pixels)
        found = model.detect(model(torch.stack([resize(image, SIZE) for image in pixels])))
    for i, (want, image) in enumerate(zip(expected, pixels, strict=True)):
        count = int(found.count[i])
        assert count == len(want["scores"]) > 20
        torch.testing.assert_close(found.scores[i, :count], want["scores"], rtol=1e-4, atol=1e-5)
        # Resizing before or after the normalisation rounds differently, so that nearly equal scores may swap places.
        boxes = scale_boxes(found.boxes[i, :count], SIZE, (image.shape[1], image.shape[2]))
        same = (box_iou(want["boxes"], boxes) > 0.999) & (want["labels"][:, None] == found.labels[i, :count])
        assert same.any(dim=1).all()


def real_images(folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """One test image of each of four sizes, in [0, 1], with its xyxy boxes and labels from 0."""
    content = json.loads((folder / "instances_test.json").read_text())
    by_size = {(record["width"], record["height"]): record for record in content["images"]}
    records = [by_size[size] for size in ((366, 369), (640, 480), (360, 363), (575, 575))]
    pixels = [load_image(folder / record["file_name"]).float() / 255 for record in records]
    boxes, labels = [], []
    for record in records:
        mine = [a for a in content["annotations"] if a["image_id"] == record["id"]]
        xywh = torch.tensor([a["bbox"] for a in mine])
        boxes.append(torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1))
        labels.append(torch.tensor([a["category_id"] - 1 for a in mine]))
    return pixels, boxes, labels


def test_uint8_images_give_what_their_float_copies_give() -> None:
    model = RetinaNet(SMALL).eval()
    images = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(model(images).cls_logits, model(images.float() / 255).cls_logits)


def test_normalise_gives_zero_for_the_mean_colour() -> None:
    model = RetinaNet(SMALL)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    torch.testing.assert_close(model.normalise(mean + 2 * std), torch.full((1, 3, 1, 1), 2.0))


def test_forward_is_forward_levels_in_a_row() -> None:
    model = RetinaNet(SMALL).eval()
    images = torch.rand(2, 3, 96, 96)
    with torch.no_grad():
        whole, levels = model(images), model.forward_levels(images)
    assert whole.cls_logits.shape == (2, 1701, 8)
    assert whole.box_deltas.shape == (2, 1701, 4)
    assert [level.box_deltas.shape[1] for level in levels] == model.anchors_per_level == [1296, 324, 81]
    assert torch.equal(whole.cls_logits, torch.cat([level.cls_logits for level in levels], dim=1))


def test_the_small_model_has_a_million_parameters_and_trainable_norm() -> None:
    model = RetinaNet(SMALL)
    assert sum(p.numel() for p in model.parameters()) == 1098156
    assert all(p.requires_grad for p in model.parameters())
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_the_small_model_learns_a_batch() -> None:
    torch.manual_seed(0)
    model = RetinaNet(SMALL).to(memory_format=torch.channels_last)
    images = torch.randint(0, 256, (4, 3, 96, 96), dtype=torch.uint8)
    corner = torch.rand(4, 3, 2) * 50
    boxes = torch.cat([corner, corner + 12 + torch.rand(4, 3, 2) * 30], dim=2)
    labels = torch.randint(0, 8, (4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    history = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = torch.stack(list(model.loss(model(images), boxes, labels).values())).sum()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.5 * history[0]


def test_the_box_loss_carries_its_weight() -> None:
    images, boxes, labels = torch.rand(1, 3, 96, 96), torch.tensor([[[10.0, 10.0, 40.0, 40.0]]]), torch.tensor([[3]])
    model = RetinaNet(SMALL).eval()
    predictions = model(images)
    plain = model.loss(predictions, boxes, labels)
    model.config = replace(SMALL, box_loss_weight=4.0)
    weighted = model.loss(predictions, boxes, labels)
    assert weighted["box_loss"] == 4 * plain["box_loss"] > 0
    assert weighted["cls_loss"] == plain["cls_loss"]


def test_a_training_step_runs_without_values() -> None:
    # A fake tensor has a shape and no values: code that looks at one, or waits for the device, raises.
    with FakeTensorMode():
        model = RetinaNet(SMALL)
        predictions = model(torch.empty(2, 3, 96, 96, dtype=torch.uint8))
        losses = model.loss(predictions, torch.empty(2, 9, 4), torch.empty(2, 9, dtype=torch.int64))
        torch.stack(list(losses.values())).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_the_loss_compiles_to_one_graph() -> None:
    model = RetinaNet(SMALL).eval()
    predictions = model(torch.rand(1, 3, 96, 96))
    boxes = torch.tensor([[[10.0, 10.0, 40.0, 40.0], [0.0, 0.0, 0.0, 0.0]]])
    labels = torch.tensor([[3, -1]])
    compiled = torch.compile(model.loss, fullgraph=True, backend="eager")(predictions, boxes, labels)
    assert compiled == model.loss(predictions, boxes, labels)


def test_the_configuration_goes_through_omegaconf() -> None:
    merged = OmegaConf.merge(OmegaConf.structured(RetinaNetConfig), {"levels": [3, 4], "anchor_sizes": [16, 32]})
    assert OmegaConf.to_object(merged) == RetinaNetConfig(levels=(3, 4), anchor_sizes=(16, 32))


@pytest.mark.parametrize(("layers", "first_trained"), [(0, "fpn"), (1, "layer4"), (4, "layer1"), (5, "conv1")])
def test_trainable_layers_counts_from_the_last(layers: int, first_trained: str) -> None:
    model = RetinaNet(resnet18_config(trainable_layers=layers, norm="batch"))
    trained = [name for name, parameter in model.backbone.named_parameters() if parameter.requires_grad]
    assert first_trained in trained[0].split(".")
    assert any(name.startswith("body.bn1") for name in trained) == (layers == 5)


def test_levels_without_the_last_stage_leave_it_out() -> None:
    model = RetinaNet(resnet18_config(levels=(2, 3, 4), anchor_sizes=(16, 32, 64)))
    assert not any("layer4" in name for name in model.state_dict())
    assert model(torch.rand(1, 3, *SIZE)).box_deltas.shape == (1, len(model.anchors), 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"backbone": "resnet5O"},
            "There is no backbone 'resnet5O'; did you mean 'resnet50'?",
        ),
        (
            {"image_size": (300, 500)},
            "image_size=(300, 500) doesn't fit the pyramid: height and width are multiples of 32, "
            "the nearest is (288, 512).",
        ),
        (
            {"levels": (3, 4, 5)},
            "anchor_sizes=(32, 64, 128, 256, 512) has 5 sizes for the 3 levels (3, 4, 5): one per level is needed, "
            "such as (32, 64, 128).",
        ),
        (
            {"levels": (3, 5), "anchor_sizes": (32, 64)},
            "levels=(3, 5) can't be built: levels are consecutive, the first from 2 to 5, the last up to 5, "
            "or 7 (6 and 7 come together), such as (3, 4, 5, 6, 7) or (3, 4, 5).",
        ),
        (
            {"levels": (3, 4, 5, 6), "anchor_sizes": (32, 64, 128, 256)},
            "levels=(3, 4, 5, 6) can't be built: levels are consecutive, the first from 2 to 5, the last up to 5, "
            "or 7 (6 and 7 come together), such as (3, 4, 5, 6, 7) or (3, 4, 5).",
        ),
        (
            {"levels": (), "anchor_sizes": ()},
            "levels=() can't be built: levels are consecutive, the first from 2 to 5, the last up to 5, "
            "or 7 (6 and 7 come together), such as (3, 4, 5, 6, 7) or (3, 4, 5).",
        ),
        (
            {"trainable_layers": 6},
            "trainable_layers=6 is out of range: 0 trains no layer of the backbone, 5 all of them.",
        ),
        (
            {"background_iou": 0.6},
            "background_iou=0.6 and foreground_iou=0.5 don't fit together: "
            "0 <= background_iou <= foreground_iou <= 1 is needed.",
        ),
        ({"num_classes": 0}, "num_classes=0 is too small: it must be at least 1."),
        (
            {"aspect_ratios": (0.5, 0.0)},
            "aspect_ratios=(0.5, 0.0) can't make anchors: numbers greater than 0 are needed.",
        ),
        ({"aspect_ratios": ()}, "aspect_ratios=() can't make anchors: numbers greater than 0 are needed."),
    ],
)
def test_configurations_that_can_not_be_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        RetinaNet(RetinaNetConfig(**changes))
    assert str(error.value) == sentence


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        RetinaNet(SMALL)(torch.rand(1, 3, 64, 96))
    assert str(error.value) == (
        "The model is built for images of 96 x 96 and got 64 x 96: "
        "resize the data to the model's image_size, or set image_size to that of the data."
    )


def test_the_pyramids_maps_are_torchvisions_and_stay_in_their_convolutions_dtype() -> None:
    torch.manual_seed(0)
    ours = build_backbone("small", (3, 4, 5), 8, frozen_norm=False, trainable_layers=5).fpn
    theirs = FeaturePyramidNetwork([64, 128, 192], 8)
    theirs.load_state_dict(ours.state_dict())
    # 13 is enlarged to 25: the nearest of an odd size is not always half the index.
    shapes = {"3": (64, 49), "4": (128, 25), "5": (192, 13)}
    maps = {name: torch.randn(2, width, side, side + 1) for name, (width, side) in shapes.items()}
    for name, wanted in theirs(dict(maps)).items():
        torch.testing.assert_close(ours(dict(maps))[name], wanted)
    added: list[torch.dtype] = []
    for block in ours.layer_blocks:
        block.register_forward_pre_hook(lambda _, inputs: added.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        levels = ours(dict(maps))
    assert added == [torch.bfloat16] * 3
    for name, wanted in theirs(dict(maps)).items():
        assert float(((levels[name].float() - wanted).norm() / wanted.norm()).detach()) < 0.02
