"""Where compiled code is kept between runs: torch's own caches, in a folder that outlives the machine's /tmp."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fasttrain.environment import cache_folder
from fasttrain.errors import OptimizationError

# Torch asks for the first each time it looks something up, and sets the second for what it compiles by Triton.
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def compiled_folder(given: str | None, precision: str) -> Path:
    """Return the folder for a precision (Lightning's name): in `given`, else in $FASTTRAIN_CACHE/compiled or
    ~/.cache/fasttrain/compiled.

    Each precision has its own. Before pytorch/pytorch#181564 a cached graph's key says that autocast is on and not in
    which dtype (torch 2.11 is without that change): a run in bf16 would be given a graph that computes in fp16.
    """
    folder = cache_folder() / "compiled" if given is None else Path(given).expanduser().absolute()
    return folder / precision


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Have torch keep what it compiles, and look for what it has compiled, in a folder; as before afterwards.

    Torch's keys hold its version, the code, the shapes and the device, so one folder serves all of these, and several
    processes at the same time.

    Raises:
        OptimizationError: it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".writable-{os.getpid()}").touch()
        (folder / f".writable-{os.getpid()}").unlink()
    except OSError as error:
        raise OptimizationError(
            f"compile: the cache folder {folder} can't be written ({error.strerror}); name another in "
            "optimizations.compile.cache_dir or the environment variable FASTTRAIN_CACHE."
        ) from error
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
