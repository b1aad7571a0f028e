"""Whether torch.compile has what it needs on this machine, found out without compiling."""

import os
import shutil
import sys
from importlib.util import find_spec

import torch

from fasttrain.environment import Hardware
from fasttrain.errors import nearest

OLDEST_GPU = (7, 0)
"""Compute capability that Triton's kernels need (Volta)."""


def why_not(hardware: Hardware, backend: str, mode: str) -> str | None:
    """Return why nothing can be compiled for a device, or None. Reasons say what would work."""
    if backend != "inductor":
        return _why_not_backend(backend, mode)
    if torch.device(hardware.device).type == "cuda":
        return _why_not_gpu(hardware)
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0]) is None:
        return (
            f"torch.compile writes C++ for a CPU, and there is no compiler '{compiler}' here; install one, or name it "
            "in the environment variable CXX"
        )
    return None


def _why_not_gpu(hardware: Hardware) -> str | None:
    if find_spec("triton") is None:
        return "torch.compile writes Triton kernels for a GPU, and Triton is not installed; pip install triton"
    if hardware.capability is not None and hardware.capability < OLDEST_GPU:
        found = ".".join(map(str, hardware.capability))
        return f"{hardware.name} has compute capability {found}, and Triton's kernels need 7.0 or later"
    compilers = [os.environ["CC"].split()[0]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return (
            f"Triton compiles its launchers in C, and there is no compiler here ({' or '.join(compilers)}); install "
            "one, or name it in the environment variable CC"
        )
    return None


def _why_not_backend(backend: str, mode: str) -> str | None:
    from torch._dynamo.backends.registry import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        return f"torch.compile has no backend '{backend}'; {nearest(backend, [*known, 'inductor'])}"
    if mode != "default":
        return f"mode='{mode}' is inductor's, and backend='{backend}' has none; leave one of them out"
    return None
