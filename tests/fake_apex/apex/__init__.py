"""Stands in for NVIDIA's Apex. What befalls its operators is said by the environment variable FAKE_APEX."""

import ctypes
import os
import time

print("the fake apex is imported", flush=True)


def befalls(what: str) -> bool:
    """Whether an accident of this kind is wanted."""
    return os.environ.get("FAKE_APEX", "") == what


def run_into_accident() -> None:
    """Do what compiled extensions sometimes do in the place of computing."""
    if befalls("segfault"):
        ctypes.string_at(0)
    if befalls("hang"):
        time.sleep(3600)
    if befalls("raise"):
        raise RuntimeError("CUDNN_BACKEND_API_FAILED:\n  no plan")
    if befalls("assert"):
        raise AssertionError("a bias must be there")
    if befalls("exit"):
        os._exit(0)
    if befalls("killed"):
        os.kill(os.getpid(), 9)
    if befalls("memory"):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory")
