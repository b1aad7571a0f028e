"""The optimizations behind NVIDIA's MLPerf Training results, for any PyTorch Lightning project."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fasttrain")
except PackageNotFoundError:  # run from a checkout that isn't installed
    __version__ = "0+unknown"
