"""Linux's cache of files, which MLPerf has emptied before each run so that data come from the disk."""

import os
from pathlib import Path

from fasttrain.errors import ConfigError

SWITCH = Path("/proc/sys/vm/drop_caches")


def clear_page_cache(switch: Path = SWITCH) -> None:
    """Have Linux forget what it keeps of files.

    Raises:
        ConfigError: this process may not, or the system has no such switch.
    """
    try:
        os.sync()
        switch.write_text("3\n")
    except OSError as error:
        raise ConfigError(
            f"mlperf.clear_cache: {switch} can't be written ({error.strerror}), which empties Linux's cache of files; "
            "run as root on the machine itself, or set mlperf.clear_cache=false: the result file says which it was."
        ) from None
