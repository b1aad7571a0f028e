"""Where a model suppresses overlapping candidates in a way that the kernel can stand in for."""

from functools import partial
from typing import ClassVar

from torch import nn

from fasttrain.callbacks.batched_nms.suppression import BatchedSuppression
from fasttrain.patches import ModulePatches, PatchSite
from fasttrain.surgery import why_not_passed_by

ROLE = "batched_nms"
"""What a module says of itself in its attribute `fasttrain_role` if BatchedSuppression may take its place: it holds
`iou_threshold` and `most`, has no parameter or buffer, and its forward(boxes, scores, labels, is_candidate) takes and
returns what `batched_nms` does."""


class BatchedNMSPatches(ModulePatches):
    """Modules of that role, but those with hooks."""

    room: ClassVar[str] = "batched_nms"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the plain suppressions."""
        return [
            PatchSite(path, module, partial(BatchedSuppression, module))
            for path, module in model.named_modules()
            if path and _has_the_role(module) and why_not_passed_by(module) is None
        ]

    def why_no_site(self, model: nn.Module) -> str:
        """Return that there is no suppression, or what is in the way."""
        for path, module in model.named_modules():
            if path and _has_the_role(module):
                return f"{type(model).__name__} has no suppression to replace: '{path}' is {why_not_passed_by(module)}"
        return f"{type(model).__name__} has no suppression to replace, a module whose fasttrain_role is '{ROLE}'"


def _has_the_role(module: nn.Module) -> bool:
    return getattr(module, "fasttrain_role", None) == ROLE
