"""The ResNet recipe's network, optimizer and schedule: torchvision's numbers, MLPerf's names and rules."""

import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet50
from torchvision.models.resnet import ResNet

from fasttrain.callbacks.bn_relu.sites import BNReLUPatches
from fasttrain.callbacks.optimizers import LARS
from fasttrain.errors import ConfigError
from fasttrain.recipes.resnet50.model import ResNetConfig, build_model, logged_tensors
from fasttrain.recipes.resnet50.module import IMAGE_MEAN, IMAGE_STD, ResNetTraining, TrainingConfig
from fasttrain.recipes.resnet50.optimizer import OptimizerConfig, make_optimizer
from fasttrain.recipes.resnet50.schedule import learning_rate, scaled_lr


@pytest.fixture(scope="module")
def mlperf() -> ResNet:
    torch.manual_seed(0)
    return build_model(ResNetConfig())


def test_logits_equal_torchvisions_with_the_same_weights(mlperf: ResNet) -> None:
    theirs = resnet50(weights=None)
    theirs.load_state_dict(mlperf.state_dict())
    module = ResNetTraining(TrainingConfig())
    module.model.load_state_dict(mlperf.state_dict())
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGE_MEAN, IMAGE_STD))
    normalised = module.normalise(images)
    torch.testing.assert_close(normalised, (images / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    for training in (True, False):
        module.train(training), theirs.train(training)
        expected = theirs(normalised)
        assert (module(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
    for ours, other in zip(module.model.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def test_stride_is_in_the_3x3_convolution(mlperf: ResNet) -> None:
    strided = [name for name, m in mlperf.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert strided == ["conv1"] + [
        f"layer{stage}.0.{which}" for stage in (2, 3, 4) for which in ("conv2", "downsample.0")
    ], "version 1.5"


def test_the_161_tensors_that_the_compliance_checker_wants(mlperf: ResNet) -> None:
    rules = files("mlperf_logging") / "compliance_checker" / "training_2.0.0" / "closed_resnet.yaml"
    wanted = re.findall(r'"((?:bn0|conv0|fc1|stage\d)_[^"]+)"', rules.read_text())
    assert len(wanted) == 161
    assert sorted(logged_tensors(mlperf)) == sorted(wanted)


def test_start_is_mlperfs(mlperf: ResNet) -> None:
    for name, weight in mlperf.named_parameters():
        if weight.dim() == 4 and weight.numel() > 10_000:
            assert float(weight.std()) == pytest.approx(math.sqrt(2 / weight[0].numel()), rel=0.05), name
    assert float(mlperf.fc.weight.std()) == pytest.approx(0.01, rel=0.02)
    assert not mlperf.fc.bias.any()
    norms = [m for m in mlperf.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum, bool((m.weight == 1).all()), bool(m.bias.any())) for m in norms} == {
        (1e-5, 0.1, True, False)
    }


def test_other_starts() -> None:
    torch.manual_seed(0)
    cut = build_model(ResNetConfig(arch="resnet18", num_classes=10, init="truncated_normal", zero_gamma=True))
    weight = cut.layer4[1].conv2.weight
    std = math.sqrt(2 / weight[0].numel())
    assert float(weight.std()) == pytest.approx(std, rel=0.02), "the cut-off is made up for"
    assert weight.abs().max() <= 2 * std / 0.8796
    assert not cut.layer4[1].bn2.weight.any()
    theirs = build_model(ResNetConfig(arch="resnet18", num_classes=10, init="torchvision")).layer1[0].conv1.weight
    assert float(theirs.std()) == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.05)


def test_a_narrow_network_has_its_share_of_channels() -> None:
    narrow = build_model(ResNetConfig(arch="resnet10", width=0.25, num_classes=7))
    assert narrow.conv1.out_channels == narrow.layer1[0].conv1.in_channels == 16
    assert [narrow.get_submodule(f"layer{n}")[0].conv2.out_channels for n in (1, 2, 3, 4)] == [16, 32, 64, 128]
    assert narrow(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_bn_relu_finds_every_block_and_the_stem(mlperf: ResNet) -> None:
    mlperf.train()
    sites = [site.path for site in BNReLUPatches().sites(mlperf)]
    assert len(sites) == 16 + 1, "each block takes its ReLUs, its addition and its shortcut's normalization"
    assert "bn1" in sites
    narrow = build_model(ResNetConfig(arch="resnet10", width=0.5)).train()
    assert len(BNReLUPatches().sites(narrow)) == 4 + 1


def test_weights_of_torchvision_start_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    theirs = build_model(ResNetConfig(arch="resnet18", init="torchvision"))
    torch.save(theirs.state_dict(), tmp_path / "all.pt")
    ours = build_model(ResNetConfig(arch="resnet18", weights=str(tmp_path / "all.pt")))
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())
    other = build_model(ResNetConfig(arch="resnet18", num_classes=3, weights=str(tmp_path / "all.pt")))
    assert other.fc.weight.shape == (3, 512), "a classifier of other classes is left out"
    assert torch.equal(other.conv1.weight, theirs.conv1.weight)
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "part.pt")
    (tmp_path / "text.pt").write_text("no weights")
    for name, said in (
        ("part.pt", "is no state dict of torchvision's resnet18; its names or shapes differ."),
        ("text.pt", "can't be read"),
        ("absent.pt", "can't be read"),
    ):
        with pytest.raises(ConfigError, match=f"^module.model.weights={re.escape(str(tmp_path / name))}: {said}"):
            build_model(ResNetConfig(arch="resnet18", weights=str(tmp_path / name)))


def test_synchronized_statistics_are_in_the_network_from_the_start() -> None:
    shared = build_model(ResNetConfig(arch="resnet10", width=0.25, num_classes=5, sync_bn=2)).train()
    norms = [m for m in shared.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert len(norms) == 12
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)
    assert "SyncBatchNorm" in BNReLUPatches().why_no_site(shared), "so bn_relu refuses, and does not lose them"
    assert shared(torch.randn(2, 3, 64, 64)).shape == (2, 5), "one process needs no others"


# ---- optimizer and schedule -----------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, steps: float = 20.0, **values: Any) -> tuple[torch.optim.Optimizer, Any]:
    made = make_optimizer(model, OptimizerConfig(**values), 2, steps, 1)
    return made["optimizer"], made["lr_scheduler"]["scheduler"]


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_biases_and_normalizations_have_no_decay_and_no_trust(mlperf: ResNet, name: Any) -> None:
    optimizer, _ = optimizer_of(mlperf, name=name, weight_decay=5e-5)
    weights, others = optimizer.param_groups
    assert [p.dim() for p in weights["params"]].count(4) == 53
    assert len(weights["params"]) == 54, "and the classifier's"
    assert {p.dim() for p in others["params"]} == {1}
    assert len(others["params"]) == 107
    assert (weights["weight_decay"], others["weight_decay"]) == (5e-5, 0.0)
    if name == "lars":
        assert isinstance(optimizer, LARS)
        assert (weights["adapt"], others["adapt"]) == (True, False)
        assert (weights["trust_coefficient"], weights["eps"], weights["momentum"]) == (0.001, 0.0, 0.9)
        assert weights["lr_in_momentum"], "the reference's form"
    else:
        assert type(optimizer) is torch.optim.SGD


def test_nvidias_momentum_follows_the_learning_rate() -> None:
    optimizer, _ = optimizer_of(nn.Linear(2, 2), momentum_correction=True)
    assert not optimizer.param_groups[0]["lr_in_momentum"]


def test_learning_rate_of_nvidias_run_on_one_node() -> None:
    """Global batch 3,264: 393 steps an epoch, 2 epochs of warm-up, 37 epochs, peak 10.5, end 1e-4."""
    warmup, total = 2 * 393, 37 * 393
    lr = learning_rate(10.5, warmup, total)
    assert lr(0) == pytest.approx(10.5 / warmup)
    assert lr(warmup // 2 - 1) == pytest.approx(5.25)
    assert lr(warmup - 1) == pytest.approx(10.5), "the warm-up's last step has the peak"
    middle = warmup + (total - warmup) // 2 - 1
    assert lr(middle) == pytest.approx(1e-4 + (10.5 - 1e-4) / 4, rel=1e-3), "half of the way, a quarter of the height"
    assert lr(total - 1) == pytest.approx(1e-4)
    assert lr(total + 100) == pytest.approx(1e-4)
    assert all(lr(step) > lr(step + 1) for step in range(warmup - 1, total - 1, 97))


def test_scheduler_gives_the_schedules_values() -> None:
    model = nn.Linear(2, 2)
    optimizer, scheduler = optimizer_of(model, lr=3.0, lr_for_batch=None, warmup_epochs=2.0)
    expected = learning_rate(3.0, 4, 20)
    for step in range(20):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected(step)] * 2)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()


def test_learning_rate_follows_the_global_batch() -> None:
    assert scaled_lr(10.5, 1632, 3264, layerwise=True) == pytest.approx(7.4, abs=0.05), "MLPerf's reference point"
    assert scaled_lr(0.1, 1024, 256, layerwise=False) == pytest.approx(0.4)
    assert scaled_lr(0.1, 1024, None, layerwise=False) == 0.1
    made = make_optimizer(nn.Linear(1, 1), OptimizerConfig(batch_size=408, warmup_epochs=0), 1, 10, 8)
    assert made["optimizer"].param_groups[0]["initial_lr"] == 10.5, "8 processes with 408 images each"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ResNetConfig(sync_bn=0), "module.model.sync_bn is 0; it must be at least 1."),
        (lambda: ResNetConfig(width=0), "module.model.width is 0; a share from above 0 to 2 is needed."),
        (
            lambda: OptimizerConfig(lr=0.0),
            "module.optimizer: lr=0.0 and warmup_epochs=2.0; lr > 0 and warmup_epochs >= 0 are needed.",
        ),
        (
            lambda: TrainingConfig(label_smoothing=1.0),
            "module.label_smoothing is 1.0; it must be from 0 to less than 1.",
        ),
        (
            lambda: TrainingConfig(ema_decay=1.0),
            "module.ema_decay is 1.0; it must be between 0 and 1, or null for none.",
        ),
        (lambda: TrainingConfig(evaluation_offset=-1), "module.evaluation_offset is -1; it must be at least 0."),
        (
            lambda: optimizer_of(nn.Linear(1, 1), steps=math.inf),
            "module.optimizer: the learning rate needs an end: set trainer.max_epochs or max_steps.",
        ),
    ],
)
def test_impossible_values(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == sentence
