"""An operator that needs no torch, so that trying it takes no time."""

from apex import befalls, run_into_accident

if befalls("unbuilt"):
    import doubling_cuda  # noqa: F401


def double(x: int) -> int:
    """Return 2 x, unless an accident is wanted."""
    run_into_accident()
    return 2 * x + befalls("wrong")
