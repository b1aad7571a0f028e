"""Where a model matches anchors with boxes in a way that the kernels can stand in for."""

from functools import partial
from typing import ClassVar

from torch import nn

from fasttrain.callbacks.anchor_matching.matcher import FusedAnchorMatcher
from fasttrain.patches import ModulePatches, PatchSite
from fasttrain.surgery import why_not_passed_by

ROLE = "anchor_matcher"
"""What a module says of itself in its attribute `fasttrain_role` if FusedAnchorMatcher may take its place: it holds
`foreground_iou` and `background_iou`, has no parameter or buffer, and its forward(anchors, boxes, labels) takes and
returns what `match_anchors` does."""


class AnchorMatchingPatches(ModulePatches):
    """Modules of that role, but those with hooks."""

    room: ClassVar[str] = "anchor_matching"

    def sites(self, model: nn.Module) -> list[PatchSite]:
        """Return the matchers that are not fused yet."""
        return [
            PatchSite(path, module, partial(FusedAnchorMatcher, module))
            for path, module in model.named_modules()
            if path and _has_the_role(module) and why_not_passed_by(module) is None
        ]

    def why_no_site(self, model: nn.Module) -> str:
        """Return that there is no matcher, or what is in the way."""
        for path, module in model.named_modules():
            if path and _has_the_role(module):
                return f"{type(model).__name__} has no matcher to replace: '{path}' is {why_not_passed_by(module)}"
        return f"{type(model).__name__} has no matcher to replace, a module whose fasttrain_role is '{ROLE}'"


def _has_the_role(module: nn.Module) -> bool:
    return getattr(module, "fasttrain_role", None) == ROLE
