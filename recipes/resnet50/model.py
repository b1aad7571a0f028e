"""torchvision's ResNets, started as MLPerf's reference starts its ResNet-50 v1.5, and its tensors' names in a log.

torchvision's is version 1.5: the stride of 2 is in a bottleneck's 3 x 3 convolution. Classes, names and shapes stay
torchvision's, so that weights go both ways and rooms find the blocks they know.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fasttrain.errors import ConfigError

Arch = Literal["resnet50", "resnet101", "resnet152", "resnet18", "resnet34", "resnet10"]
BLOCKS: dict[str, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, [3, 4, 23, 3]),
    "resnet152": (Bottleneck, [3, 8, 36, 3]),
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet10": (BasicBlock, [1, 1, 1, 1]),
}
CLASSIFIER = ("fc.weight", "fc.bias")
FC_STD = 0.01  # MLPerf's reference, resnet_model.py
TRUNCATED_AT = 2.0  # standard deviations
TRUNCATED_STD = 0.87962566103423978  # that of a standard normal cut off there


@dataclass(frozen=True)
class ResNetConfig:
    """Which network, and how it starts."""

    arch: Arch = "resnet50"
    """torchvision's name; resnet10 has one basic block a stage, for a CPU."""
    num_classes: int = 1000
    """Classes; the data tells."""
    width: float = 1.0
    """Channels of every layer as a share of torchvision's; less than 1 for a CPU."""
    init: Literal["he_normal", "truncated_normal", "torchvision"] = "he_normal"
    """Convolutions: normal with variance 2 / fan-in, as in MLPerf's rules; cut off at two standard deviations; or
    torchvision's 2 / fan-out. With the first two the classifier is normal with deviation 0.01 and its bias 0."""
    zero_gamma: bool = False
    """Start the last normalization of each block at 0, so that blocks begin as identities (arXiv 1706.02677)."""
    sync_bn: int = 1
    """Processes of a group that share batch statistics; MLPerf submissions at scale use 2."""
    weights: str | None = None
    """A file with a torchvision state dict to start from; a classifier of another size is left out."""

    def __post_init__(self) -> None:
        if not 0 < self.width <= 2:
            raise ConfigError(f"module.model.width is {self.width}; a share from above 0 to 2 is needed.")
        for name in ("num_classes", "sync_bn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"module.model.{name} is {getattr(self, name)}; it must be at least 1.")


class NarrowResNet(ResNet):  # type: ignore[misc]
    """torchvision's ResNet with a share of its channels everywhere."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], layers: list[int], width: float, num_classes: int, **options: bool
    ) -> None:
        self.width = width
        super().__init__(block, layers, num_classes=num_classes, **options)
        stem = self._narrow(64)
        self.conv1 = nn.Conv2d(3, stem, 7, 2, 3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision
        self.bn1 = nn.BatchNorm2d(stem)
        self.fc = nn.Linear(self._narrow(512) * block.expansion, num_classes)

    def _narrow(self, channels: int) -> int:
        return max(8, round(channels * self.width / 8) * 8)

    def _make_layer(self, block: Any, planes: int, *rest: Any, **options: Any) -> nn.Sequential:
        if planes == 64:  # the first stage, which follows the stem
            self.inplanes = self._narrow(64)
        layer: nn.Sequential = super()._make_layer(block, self._narrow(planes), *rest, **options)
        return layer


def build_model(config: ResNetConfig) -> ResNet:
    """Return the network.

    Raises:
        ConfigError: the file of weights can't be read or doesn't fit.
    """
    block, layers = BLOCKS[config.arch]
    options: Any = {"num_classes": config.num_classes, "zero_init_residual": config.zero_gamma}
    if config.width == 1:
        model = ResNet(block, layers, **options)
    else:
        model = NarrowResNet(block, layers, config.width, **options)
    if config.init != "torchvision":
        _initialise(model, truncated=config.init == "truncated_normal")
    if config.weights is not None:
        _load(model, Path(config.weights).expanduser(), config)
    if config.sync_bn > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def logged_tensors(model: ResNet) -> list[str]:
    """Return the names under which an MLPerf log reports the initialised weights; 161 for ResNet-50.

    They are those of NVIDIA's MXNet submission, which the compliance checker compares literally.
    """
    return [_logged_name(name) for name, _ in model.named_parameters()]


def _logged_name(name: str) -> str:
    *block, layer, kind = name.split(".")
    if layer == "fc":
        return f"fc1_{kind}"
    if block[-1:] == ["downsample"]:
        block, layer = block[:-1], {"0": "conv1sc", "1": "bnsc"}[layer]
    if layer.startswith("bn"):
        kind = {"weight": "gamma", "bias": "beta"}[kind]
    if not block:  # the stem
        return f"{layer[:-1]}0_{kind}"
    return f"stage{block[0][-1]}_unit{int(block[1]) + 1}_{layer}_{kind}"


def _initialise(model: ResNet, truncated: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / (module.weight[0].numel()))
            if truncated:
                std /= TRUNCATED_STD
                nn.init.trunc_normal_(module.weight, 0, std, -TRUNCATED_AT * std, TRUNCATED_AT * std)
            else:
                nn.init.normal_(module.weight, 0, std)
    nn.init.normal_(model.fc.weight, 0, FC_STD)
    nn.init.zeros_(model.fc.bias)


def _load(model: ResNet, file: Path, config: ResNetConfig) -> None:
    fails = partial("module.model.weights={}: {}".format, file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything on a file that is none of its own
        reason = " ".join(str(error).split()[:40])
        raise ConfigError(fails(f"can't be read ({type(error).__name__}: {reason}).")) from None
    if not isinstance(state, dict):
        raise ConfigError(fails(f"holds a {type(state).__name__}; a state dict is expected."))
    own = model.state_dict()
    # A classifier of other classes is no use; without it the rest must be whole.
    if any(_differs(state.get(name), own[name]) for name in CLASSIFIER):
        state = {name: value for name, value in state.items() if name not in CLASSIFIER}
    wanted = set(own) - (set(CLASSIFIER) - set(state))
    if set(state) != wanted or any(_differs(state[name], own[name]) for name in wanted):
        raise ConfigError(fails(f"is no state dict of torchvision's {config.arch}; its names or shapes differ."))
    model.load_state_dict(state, strict=False)


def _differs(one: object, other: torch.Tensor) -> bool:
    return not isinstance(one, torch.Tensor) or one.shape != other.shape
