"""What this machine and its software are: for choosing defaults, and for the record beside every result."""

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from fasttrain.errors import ConfigError

RECORDED_PACKAGES = (
    "fasttrain", "torch", "torchvision", "lightning", "torchmetrics", "triton", "numpy", "pillow",
    "pycocotools", "hotcoco", "faster-coco-eval", "nvidia-dali-cuda130", "apex",
)  # fmt: skip


@cache
def triton_runs() -> bool:
    """Whether Triton's kernels can be compiled for NVIDIA GPUs here: it is installed, and torch is not ROCm's."""
    return torch.version.hip is None and find_spec("triton") is not None


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a CUDA device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cache_folder(given: str | None = None) -> Path:
    """Return where what was made or measured is kept for later runs: $FASTTRAIN_CACHE, or ~/.cache/fasttrain.

    Args:
        given: by a configuration, in the place of both.
    """
    given = given or os.environ.get("FASTTRAIN_CACHE")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "fasttrain"


@dataclass(frozen=True)
class Hardware:
    """The part of a machine that decides what applies to it."""

    kind: str
    """`gpu` or `cpu`: the name of the file in configs/hardware."""
    device: str
    """The device a run trains on: its torch name."""
    name: str
    """The product name."""
    cores: int
    """CPU cores this process may use."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    memory_bytes: int = 0
    """The device's memory; the machine's for a CPU."""

    @classmethod
    def here(cls) -> "Hardware":
        """Look at this machine. Makes no CUDA context when there is no GPU."""
        if not torch.cuda.is_available():
            return cls.cpu()
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        return cls("gpu", "cuda:0", properties.name, usable_cores(), capability, properties.total_memory)

    @classmethod
    def cpu(cls) -> "Hardware":
        """Look at this machine without its GPU."""
        return cls("cpu", "cpu", cpu_name(), usable_cores(), None, memory_bytes())

    @classmethod
    def of_accelerator(cls, accelerator: str) -> "Hardware":
        """Look at the part of this machine that a run with Lightning's `trainer.accelerator` uses.

        Raises:
            ConfigError: a GPU is asked for and there is none.
        """
        if accelerator in ("gpu", "cuda") and not torch.accelerator.is_available():
            raise ConfigError(
                f"trainer.accelerator={accelerator}, but torch sees no GPU here ({usable_cores()} CPU cores); "
                "hardware=cpu trains without one."
            )
        return cls.cpu() if accelerator == "cpu" else cls.here()

    @property
    def sentence(self) -> str:
        """One line for the user."""
        if self.kind == "cpu":
            return f"no GPU here ({self.cores} CPU cores)"
        return f"{self.name}, {self.memory_bytes / 2**30:.0f} GiB"


def usable_cores() -> int:
    """Return the number of CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def global_rank() -> int:
    """Return this process's rank among those of the run, as the launcher's environment says; 0 for a single one."""
    return int(getattr(rank_zero_only, "rank", 0))


@cache
def cpu_name() -> str:
    """Return the processor's product name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the machine's memory, 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def installed_version(package: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def source_commit() -> str:
    """Return the commit of the checkout that fasttrain runs from, with `+` if it has changes; empty outside one.

    For a copy without git, $FASTTRAIN_COMMIT says which commit it is a copy of.
    """
    if given := os.environ.get("FASTTRAIN_COMMIT"):
        return given
    folder = Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        tracked = _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return ""
    return (commit + ("+" if changed else "")) if tracked else ""


def gpu_state() -> dict[str, Any]:
    """Return driver version, power limit and clocks of GPU 0 as NVML tells them; empty without NVML or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML raises its own errors where there is no driver
        return {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "ecc": bool(pynvml.nvmlDeviceGetEccMode(handle)[0]),
        }
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def describe() -> dict[str, Any]:
    """Return the whole record that `environment.json` holds."""
    hardware = Hardware.here()
    on_gpu = hardware.kind == "gpu"
    return {
        "gpu": hardware.name if on_gpu else None,
        "gpu_count": torch.cuda.device_count() if on_gpu else 0,
        "gpu_memory_gib": round(hardware.memory_bytes / 2**30, 1) if on_gpu else None,
        "gpu_state": gpu_state() if on_gpu else {},
        "cpu": cpu_name(),
        "cores": hardware.cores,
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in RECORDED_PACKAGES if (found := installed_version(name))},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "torch_threads": torch.get_num_threads(),
        "commit": source_commit(),
    }


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
