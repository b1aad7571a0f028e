"""What identifies an installed package, told from its files without importing it."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

NAMESAKES = {"apex": ("optimizers", "contrib")}
"""Parts by which a package is told from another project of its name: `apex` on PyPI is a toolkit for web logins."""

HOW_TO_INSTALL = {"apex": "NVIDIA's Apex is built from https://github.com/NVIDIA/apex"}


def why_not_importable(package: str) -> str | None:
    """Return why a package can't be used, as far as its files tell: it is not installed, or is somebody else's."""
    spec = _spec(package)
    how = f"; {HOW_TO_INSTALL[package]}" if package in HOW_TO_INSTALL else ""
    if spec is None:
        return f"'{package}' is not installed{how}"
    folders = list(spec.submodule_search_locations or ())
    lacking = [
        part for part in NAMESAKES.get(package, ()) if PathFinder.find_spec(f"{package}.{part}", folders) is None
    ]
    if lacking:
        where = spec.origin or (folders[0] if folders else "?")
        return (
            f"the installed '{package}' ({where}) is another project of that name, without {package}.{lacking[0]}{how}"
        )
    return None


def package_fingerprint(package: str) -> str:
    """Return a package's version, if it has one, and a digest of its files' names, sizes and times.

    The version alone would not do: a package that is built on the machine keeps it, and what was built differs.
    """
    names = _distributions().get(package, [])
    version = "".join(f"{name} {distribution(name).version} " for name in sorted(set(names)))
    digest = hashlib.sha256()
    for path in sorted(set(_files(package, names))):
        stat = path.stat()
        digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return f"{version}{digest.hexdigest()[:16]}"


def file_digest(module: str) -> str:
    """Return a digest of a module's source; empty where it has no file.

    The packages around the module are imported, the module is not.
    """
    try:
        spec = find_spec(module)
    except ImportError:
        return ""
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def _files(package: str, distributions: list[str]) -> Iterator[Path]:
    """Yield a package's files, and extension modules that its distribution has put beside it."""
    spec = _spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from (path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    for name in distributions:
        listed = (Path(str(file.locate())) for file in distribution(name).files or ())
        yield from (path for path in listed if path.suffix in (".so", ".pyd", ".py") and path.is_file())
    if spec is not None and spec.origin is not None and not spec.submodule_search_locations:
        yield Path(spec.origin)


def _spec(package: str) -> ModuleSpec | None:
    try:
        return find_spec(package)
    except ValueError:  # something in sys.modules that was not imported from a file
        return None


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())
