"""Keeps the libraries' greetings and tips off a user's terminal; their warnings about real trouble stay."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
IGNORED = (
    ".*does not have many workers.*",  # the loaders are as parallel as the recipe asks for
    ".*smaller than the logging interval.*",
    ".*LeafSpec.*",  # Lightning 2.6 on torch 2.14
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*callbacks used to create the checkpoint need to be provided.*",  # scoring needs none of them
)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Raise Lightning's loggers to warnings and ignore what the list above names, for the duration."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    with warnings.catch_warnings():
        for message in IGNORED:
            warnings.filterwarnings("ignore", message=message)
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
