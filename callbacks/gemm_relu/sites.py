"""Where a model has chains of linear layers and ReLUs: in every plain nn.Sequential that holds one."""

from collections import Counter
from typing import ClassVar

from torch import nn

from fasttrain.callbacks.gemm_relu.modules import Chain, fused_mlp, parts, why_called_itself
from fasttrain.patches import ModulePatches, PatchSite


class MLPPatches(ModulePatches):
    """Every nn.Sequential in which a ReLU follows a linear layer becomes a FusedMLP."""

    room: ClassVar[str] = "gemm_relu"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the Sequentials that hold a chain."""
        return [
            PatchSite(path, module, lambda module=module: fused_mlp(module))  # type: ignore[misc]
            for path, module in model.named_modules()
            if path and type(module) is nn.Sequential and _has_chain(module)
        ]

    def why_no_site(self, model: nn.Module) -> str:
        """Return what the model's linear layers are instead."""
        name = type(model).__name__
        reasons = Counter(_why_not(module) for module in model.modules() if isinstance(module, nn.Linear))
        if not reasons:
            return f"{name} has no nn.Linear, and so no chain of linear layers and ReLUs"
        texts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return f"{name} has no nn.Sequential in which an nn.ReLU follows an nn.Linear; its linear layers are: {texts}"


def _has_chain(module: nn.Sequential) -> bool:
    return "forward" not in vars(module) and any(isinstance(part, Chain) for part in parts(list(module)))


def _why_not(linear: nn.Linear) -> str:
    if type(linear) is not nn.Linear:
        return f"of class {type(linear).__name__}"
    if linear.bias is None:
        return "without bias"
    return why_called_itself(linear) or "with no ReLU behind it in a plain nn.Sequential"
