"""Pretrained weights of RetinaNet from local files: what fits is loaded, and what doesn't is said in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, resnet34
from torchvision.ops import FrozenBatchNorm2d

from fasttrain.errors import ConfigError
from fasttrain.recipes.retinanet.model import RetinaNet, RetinaNetConfig
from fasttrain.recipes.retinanet.pretrained import first_version_name


def resnet18_config(**changes: Any) -> RetinaNetConfig:
    return RetinaNetConfig(**{"num_classes": 4, "backbone": "resnet18", "image_size": (64, 96), **changes})


@pytest.fixture(scope="module")
def classifier() -> nn.Module:
    torch.manual_seed(1)
    net = resnet18(weights=None)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
    return net


def save(content: object, folder: Path) -> str:
    torch.save(content, folder / "weights.pth")
    return str(folder / "weights.pth")


def test_weights_of_a_classifier_become_a_frozen_backbone(classifier: nn.Module, tmp_path: Path) -> None:
    model = RetinaNet(resnet18_config(weights=save(classifier.state_dict(), tmp_path)))
    assert torch.equal(model.backbone.body.bn1.running_mean, classifier.bn1.running_mean)
    assert torch.equal(model.backbone.body.layer4[1].conv2.weight, classifier.layer4[1].conv2.weight)
    assert isinstance(model.backbone.body.bn1, FrozenBatchNorm2d)
    assert not model.backbone.body.layer1[0].conv1.weight.requires_grad
    assert model.backbone.body.layer2[0].conv1.weight.requires_grad


def test_weights_can_train_their_norm(classifier: nn.Module, tmp_path: Path) -> None:
    model = RetinaNet(resnet18_config(weights=save(classifier.state_dict(), tmp_path), norm="batch"))
    assert isinstance(model.backbone.body.bn1, nn.BatchNorm2d)
    assert torch.equal(model.backbone.body.bn1.running_mean, classifier.bn1.running_mean)


def test_weights_of_a_stage_that_is_not_needed_are_left_out(classifier: nn.Module, tmp_path: Path) -> None:
    file = save(classifier.state_dict(), tmp_path)
    model = RetinaNet(resnet18_config(weights=file, levels=(3, 4), anchor_sizes=(32, 64)))
    assert torch.equal(model.backbone.body.layer3[0].conv1.weight, classifier.layer3[0].conv1.weight)


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_weights_of_a_whole_detector_load_whatever_its_norm(tmp_path: Path, norm: str) -> None:
    source = RetinaNet(resnet18_config(norm=norm))
    file = save(source.state_dict(), tmp_path)
    for wanted in ("frozen", "batch"):
        model = RetinaNet(resnet18_config(weights=file, norm=wanted))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, source.state_dict()[name]), name


def test_weights_of_torchvisions_first_version_load(tmp_path: Path) -> None:
    source = RetinaNet(resnet18_config())
    old = {first_version_name(name): value for name, value in source.state_dict().items()}
    assert "head.regression_head.conv.6.weight" in old
    model = RetinaNet(resnet18_config(weights=save(old, tmp_path)))
    assert torch.equal(model.head.regression_head.conv[3][0].weight, source.head.regression_head.conv[3][0].weight)
    assert torch.equal(model.backbone.fpn.inner_blocks[1][0].weight, source.backbone.fpn.inner_blocks[1][0].weight)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    file = save(resnet34(weights=None).state_dict(), tmp_path)
    with pytest.raises(ConfigError) as error:
        RetinaNet(resnet18_config(weights=file))
    assert str(error.value) == (
        f"The weights in {file} don't fit the backbone: not in the model: layer1.2.conv1.weight, "
        "layer1.2.bn1.weight, layer1.2.bn1.bias and 77 more. They must come from the same torchvision architecture."
    )


def test_weights_for_other_classes_are_refused(tmp_path: Path) -> None:
    file = save(RetinaNet(resnet18_config(num_classes=3)).state_dict(), tmp_path)
    with pytest.raises(ConfigError) as error:
        RetinaNet(resnet18_config(weights=file))
    assert str(error.value) == (
        f"The weights in {file} don't fit the model: the shape differs for: "
        "head.classification_head.cls_logits.weight is (27, 256, 3, 3) and should be (36, 256, 3, 3), "
        "head.classification_head.cls_logits.bias is (27,) and should be (36,). "
        "They must come from the same torchvision architecture."
    )


def test_weights_with_holes_are_refused(classifier: nn.Module, tmp_path: Path) -> None:
    content = {name: value for name, value in classifier.state_dict().items() if name != "layer2.0.conv1.weight"}
    file = save(content, tmp_path)
    with pytest.raises(ConfigError, match=r"don't fit the backbone: missing: layer2\.0\.conv1\.weight\."):
        RetinaNet(resnet18_config(weights=file))


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        RetinaNet(resnet18_config(weights=str(tmp_path / "none.pth")))
    assert str(error.value) == (
        f"There is no weights file {tmp_path}/none.pth; give the path of a torchvision state dict, or none."
    )


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off"], ids=["empty", "text", "zip"])
def test_weights_that_can_not_be_read_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.pth"
    file.write_bytes(content)
    sentence = rf"The weights file {file} can't be read \(.+\); it must be a state dict written by torch\.save\."
    with pytest.raises(ConfigError, match=sentence):
        RetinaNet(resnet18_config(weights=str(file)))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1, 2], "a list"),
        ({}, "nothing"),
        ({"epoch": 3, "state_dict": {}}, "a mapping with the keys epoch, state_dict"),
    ],
)
def test_weights_that_are_something_else_are_refused(tmp_path: Path, content: object, what: str) -> None:
    file = save(content, tmp_path)
    with pytest.raises(ConfigError) as error:
        RetinaNet(resnet18_config(weights=file))
    assert str(error.value) == (
        f"The weights file {file} holds {what}; a state dict, parameter names with tensors, is needed."
    )
