"""Text as BERT wants it: documents, each a list of sentences in their order."""

import ast
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fasttrain.errors import ConfigError, DataError

Document = list[str]
"""Sentences."""
TextFormat = Literal["prose", "paragraphs", "lines"]
SUFFIXES = (".txt", ".md", ".rst")
NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
"""Folders of the standard library that hold other people's packages, or no text to speak of."""
_CLOSING, _OPENING = "\"')\\]\u201d\u2019", "\"'(\\[\u201c\u2018"
_SENTENCE_END = re.compile(rf"(?:(?<=[.!?])|(?<=[.!?][{_CLOSING}]))\s+(?=[{_OPENING}]?[A-Z0-9])")


def text_files(path: str) -> list[Path]:
    """Return the files of a path: itself, or the .txt, .md and .rst files under a folder, by name.

    Raises:
        ConfigError: there is nothing there.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    found = sorted(file for file in place.rglob("*") if file.suffix in SUFFIXES) if place.is_dir() else []
    if not found:
        what = f"has no file with the ending {', '.join(SUFFIXES)}" if place.is_dir() else "does not exist"
        raise ConfigError(f"data: {place} {what}; name a text file, or a folder with some.")
    return found


def documents_of(file: Path, form: TextFormat = "prose") -> Iterator[Document]:
    """Yield a file's documents.

    Args:
        form: `prose` is one document, of paragraphs between empty lines; with `paragraphs` each of them is a document;
            `lines`, the format of BERT's reference, has a sentence on each line, and an empty line between documents.

    Raises:
        DataError: the file is no UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); convert it.") from None
    if form == "prose":
        yield sentences(text)
        return
    for part in re.split(r"\n\s*\n", text):
        lines = sentences(part) if form == "paragraphs" else [line.strip() for line in part.splitlines()]
        if any(lines):
            yield list(filter(None, lines))


def sentences(text: str) -> Document:
    """Return the sentences of prose: paragraphs stand between empty lines, and none goes beyond its paragraph."""
    found: Document = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += [sentence for sentence in _SENTENCE_END.split(" ".join(paragraph.split())) if sentence]
    return found


def pythons_documents() -> Iterator[Document]:
    """Yield what every Python has to read: its language reference's topics, and the standard library's docstrings.

    2 MB of English, a document for each of them.

    Raises:
        DataError: this Python comes without its sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    count = 0
    for file in sorted(library.rglob("*.py")):
        if NO_TEXT & set(file.relative_to(library).parts):
            continue
        for text in _texts_of(file):
            if found := sentences(text):
                count += 1
                yield found
    if not count:
        raise DataError(f"{library} has no Python sources, whose text trains when data.text is not set; set data.text.")


def pythons_name() -> str:
    """Return what `pythons_documents` depends on."""
    return f"Python {platform.python_version()}"


def _texts_of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    if file.match("pydoc_data/topics.py"):
        yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
                    if isinstance(node.value, str) and " " in node.value)  # fmt: skip
        return
    yield from _docstrings(tree)


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    yield ast.get_docstring(node) or ""
    for child in node.body:  # not ast.walk, which looks into every expression
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child)
