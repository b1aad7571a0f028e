"""Where a model computes a focal loss that this one can stand in for, and how it gets there and away again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.retinanet import RetinaNetClassificationHead

from fasttrain.callbacks.focal_loss.loss import FocalLoss
from fasttrain.optimization import Change
from fasttrain.surgery import Surgery, find_sites

ROLE = "sigmoid_focal_loss"
"""What a module says of itself in its attribute `fasttrain_role` if FocalLoss may take its place: it holds `alpha` and
`gamma`, has no parameter, and its forward(levels, targets) takes and returns what `sigmoid_focal_loss` does."""

# torchvision's compute_loss leaves both to the defaults of its sigmoid_focal_loss.
TORCHVISION_ALPHA, TORCHVISION_GAMMA = 0.25, 2.0

MakeLoss = Callable[[float, float], FocalLoss]


class TorchvisionLoss:
    """Stands in for `RetinaNetClassificationHead.compute_loss` of one head."""

    def __init__(self, loss: FocalLoss) -> None:
        self.loss = loss

    def __call__(
        self,
        targets: Sequence[dict[str, Tensor]],
        head_outputs: dict[str, Tensor],
        matched_idxs: Sequence[Tensor],
    ) -> Tensor:
        """Return the loss: torchvision's value, in float32."""
        pairs = zip(targets, matched_idxs, strict=True)
        classes = [_class_of_anchor(target["labels"], matched) for target, matched in pairs]
        return self.loss([head_outputs["cls_logits"]], torch.stack(classes))  # type: ignore[no-any-return]


class FocalLossSurgery:
    """Puts FocalLoss to every site of a model, and the old losses back. Parameters and state dict are not touched."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._surgery = Surgery(model)
        self._heads: list[nn.Module] = []

    def apply(self, make: MakeLoss) -> list[Change]:
        """Replace the loss at each site by `make(alpha, gamma)`; return what changed."""
        changes = []
        for path, head in _torchvision_heads(self.model):
            vars(head)["compute_loss"] = TorchvisionLoss(make(TORCHVISION_ALPHA, TORCHVISION_GAMMA))
            self._heads.append(head)
            changes.append(Change(f"{path}.compute_loss", "FocalLoss"))

        def in_its_place(old: nn.Module) -> nn.Module:
            plain: Any = old
            return make(float(plain.alpha), float(plain.gamma))

        changes += [Change(path, "FocalLoss") for path in self._surgery.apply(_has_the_role, in_its_place)]
        return changes

    def undo(self) -> None:
        """Put the old losses back."""
        self._surgery.undo()
        for head in self._heads:
            del vars(head)["compute_loss"]
        self._heads.clear()


def loss_sites(model: nn.Module) -> list[str]:
    """Return the paths at which FocalLoss can take a loss's place."""
    heads = [f"{path}.compute_loss" for path, _ in _torchvision_heads(model)]
    return heads + [site.path for site in find_sites(model, _has_the_role)]


def _has_the_role(module: nn.Module) -> bool:
    return getattr(module, "fasttrain_role", None) == ROLE


def _torchvision_heads(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of the heads that compute their loss as torchvision does, by no method of their own."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, RetinaNetClassificationHead)
        and type(module).compute_loss is RetinaNetClassificationHead.compute_loss
        and "compute_loss" not in vars(module)
    ]


def _class_of_anchor(labels: Tensor, matched: Tensor) -> Tensor:
    if not len(labels):  # an image without boxes: nothing to look up, and nothing is matched
        return matched
    return torch.where(matched >= 0, labels[matched.clamp(min=0)], matched)
