"""The four ways a run can fail for a reason that its user can act on.

The command line prints these as one sentence without a traceback; anything else is a bug of ours and keeps its own.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FasttrainError(Exception):
    """Base of all errors whose message is meant for the user: what was asked, what was found, what would work."""


class ConfigError(FasttrainError):
    """A configuration key, value or path is wrong."""


class MissingDependencyError(FasttrainError):
    """An optional package is absent; the message holds its install line."""


class DataError(FasttrainError):
    """A file or record of the data is bad; the message names the file, the record and what was expected."""


class OptimizationError(FasttrainError):
    """An optimization can't do what was asked of it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence fragment that names the closest of `known` to a mistyped `name`, or lists them all."""
    choices = sorted(known)
    close = get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return "known: " + ", ".join(choices) if choices else "none are known here"
