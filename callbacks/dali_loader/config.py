"""How a DALI loader is configured, and DALI itself where it is installed."""

import importlib
from dataclasses import dataclass
from typing import Any

from fasttrain.environment import usable_cores
from fasttrain.errors import ConfigError, MissingDependencyError

INSTALL = "pip install 'fasttrain[dali]'"
LEAST = {"num_threads": 1, "read_threads": 1, "prefetch": 1, "device_memory_mb": 0, "host_memory_mb": 0}


@dataclass(frozen=True)
class DALIConfig:
    """The parameters of `DALILoader` that change its speed and memory, but no sample."""

    num_threads: int | None = None
    """DALI's own threads, which decode what the GPU doesn't; null is the usable cores, at most 8."""
    read_threads: int | None = None
    """Threads that read files, each a batch, so also the batches read ahead; null is the usable cores, at most 4."""
    prefetch: int = 2
    """Batches that DALI works on ahead of the one in use."""
    hw_decoder_load: float = 0.9
    """Share of the JPEGs for the GPU's decoder unit; the others are decoded by its cores, which the step wants."""
    fancy_upsampling: bool = False
    """Interpolate colour on the GPU as decoders on a CPU do, instead of repeating it."""
    device_memory_mb: int = 0
    """Device memory that DALI's pool is given before the first batch, so that no early batch waits for it."""
    host_memory_mb: int = 0
    """Pinned host memory likewise."""
    device_memory_padding: int = 16_777_216
    """Bytes of device memory for each thread's decoder, enough for the largest image; DALI's own default."""
    host_memory_padding: int = 8_388_608
    """Bytes of pinned memory likewise; DALI's own default."""
    image_size_hint: tuple[int, int] = (0, 0)
    """Height and width of the largest image, for the decoder unit's memory; 0 gives no hint."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"a DALI loader's {name} is {value}; it must be at least {least}.")
        if not 0 <= self.hw_decoder_load <= 1:
            raise ConfigError(f"a DALI loader's hw_decoder_load is {self.hw_decoder_load}; it is a share from 0 to 1.")

    @property
    def threads(self) -> int:
        """DALI's threads here."""
        return self.num_threads or min(8, usable_cores())

    @property
    def readers(self) -> int:
        """Reading threads here."""
        return self.read_threads or min(4, usable_cores())

    def decoder_options(self) -> dict[str, Any]:
        """Return the arguments of `fn.decoders.image` that act where it decodes on the GPU."""
        height, width = self.image_size_hint
        return {
            "hw_decoder_load": self.hw_decoder_load,
            "jpeg_fancy_upsampling": self.fancy_upsampling,
            "device_memory_padding": self.device_memory_padding,
            "host_memory_padding": self.host_memory_padding,
            "preallocate_height_hint": height,
            "preallocate_width_hint": width,
        }


def require_dali() -> None:
    """Raise MissingDependencyError, with the install line, where DALI can't be imported."""
    try:
        importlib.import_module("nvidia.dali")
    except ImportError as error:
        raise MissingDependencyError(
            f"a DALI loader was asked for, but NVIDIA DALI can't be imported here ({error}): {INSTALL}, or use the "
            "torch loader."
        ) from None
