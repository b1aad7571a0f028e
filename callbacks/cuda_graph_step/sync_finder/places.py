"""From a stack to the line of source that is responsible: the innermost one outside of torch and Lightning."""

import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lightning
import torch

from fasttrain.callbacks.cuda_graph_step.inspection.user_code import is_installed

# Generated code, which has no source to show: frozen modules, dataclasses, torch.fx, beartype.
GENERATED = ("<frozen", "<string>", "<eval_with_key", "<@beartype")
LIGHTNING_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
STACK_LINE = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')


class Place(NamedTuple):
    """A line of a source file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line}"


@dataclass(frozen=True)
class Site:
    """The line that is responsible, its source, and, where it is a library's, the user's line that led there."""

    where: Place
    code: str
    user_where: Place | None


def current_site(boundary: CodeType) -> Site | None:
    """Return the site of the running Python code, or of the autograd node that is running without any.

    For a node this is where its forward was called, which anomaly mode has noted.

    Args:
        boundary: code of the function above which nothing is looked at.
    """
    node = torch._C._current_autograd_node()
    site = site_of(_frames(boundary, in_backward=node is not None))
    return site or (None if node is None else site_of(_places_of_node(node, boundary.co_name)))


def site_of(places: Iterable[Place]) -> Site | None:
    """Return the site of a stack, given from its innermost place outwards; None if all of it is torch's or ours."""
    where = None
    for place in places:
        if is_machinery(place.file):
            continue
        where = where or place
        if not is_installed(place.file):
            return Site(where, source_line(where), None if place is where else place)
    return Site(where, source_line(where), None) if where else None


def site_of_frame(frame: FrameType, line: int) -> Site | None:
    """Return the site of a frame at one of its lines, with its callers."""

    def places() -> Iterator[Place]:
        yield Place(frame.f_code.co_filename, line)
        outer = frame.f_back
        while outer is not None:
            yield Place(outer.f_code.co_filename, outer.f_lineno)
            outer = outer.f_back

    return site_of(places())


def source_line(place: Place) -> str:
    """Return a line of source without its indentation, empty where there is none."""
    return linecache.getline(place.file, place.line).strip()


@cache
def is_machinery(file: str) -> bool:
    """Whether a file is torch's, Lightning's, Python's own or this room's: code that runs for every step.

    Other libraries, torchvision and torchmetrics for instance, are worth naming.
    """
    if file.startswith(GENERATED):
        return True
    folder = _package_folder(file)
    return file.startswith(_machinery_folders()) or (is_installed(file) and folder is None)


def short_path(file: str) -> str:
    """Return a library's file from its package's name on, another one relative to the working folder if it is in it."""
    if is_installed(file) and (inside := _package_folder(file)) is not None:
        return inside
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative


def _package_folder(file: str) -> str | None:
    """Return an installed package's file relative to where packages are installed; None for Python's own files."""
    parts = Path(file).parts
    installed = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return str(Path(*parts[installed[-1] + 1 :])) if installed else None


@cache
def _machinery_folders() -> tuple[str, ...]:
    torch_folder, lightning_folder = (Path(str(module.__file__)).parent for module in (torch, lightning))
    siblings = [lightning_folder.parent / name for name in LIGHTNING_PACKAGES]
    folders = [torch_folder, torch_folder.parent / "functorch", *siblings, Path(__file__).parent]
    return tuple(f"{folder}{os.sep}" for folder in folders)


def _frames(boundary: CodeType, in_backward: bool) -> Iterator[Place]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not boundary:
        # The frames above the engine's are those of whoever called backward, not of what is being differentiated.
        if in_backward and frame.f_code.co_name == "_engine_run_backward":
            return
        yield Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


def _places_of_node(node: Any, boundary: str) -> Iterator[Place]:
    stack = node.metadata.get("traceback_", [])
    for entry in reversed(stack):
        for text in reversed(entry.splitlines()):
            if match := STACK_LINE.match(text):
                if match["function"] == boundary:
                    return
                yield Place(match["file"], int(match["line"]))
