"""English that is on this machine already: the prose of its own Python documentation.

A demonstration must start without an account, a token or a download. Every Python installation carries more
than a megabyte of English: the docstrings of the standard library and the language reference that `help()`
shows. This file reads them where they are installed. Sources are parsed, never imported, so reading has no
side effects. Nothing is copied into the project or passed on; the text differs between Python versions, so no
loss value may be pinned on it.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..errors import RecipeError
from .source import Document, TextPart

_SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"})
_MIN_WORDS = 8
_MIN_LETTERS = 0.75  # share of letters among all characters of a paragraph that counts as prose, spaces not counted
_NOT_PROSE = re.compile(r">>>|\.\. |::|^\s*[:@*|#$+-]|[{}<>=\\_|]{2,}|[=|~^]|\(\)|https?:|^\s*\d+[.)]")
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*)(?: ?<[^`>]*>)?`")  # :class:`~a.B` or :ref:`text <target>` becomes its text
_MARKS = re.compile(r"``?|\*\*?(?=\S)|(?<=\S)\*\*?")
_HEADINGS = frozenset({"args", "arguments", "parameters", "returns", "raises", "example", "examples", "note", "yields"})


def versions_key(packages: Sequence[str]) -> str:
    """Name the exact text that `read_local_docs` would find: interpreter, packages and their versions.

    Raises:
        RecipeError: a package is not installed.
    """
    parts = [f"python-{platform.python_version()}"]
    parts += [f"{package}-{_package_version(package)}" for package in packages]
    return "+".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDocsSource:
    """Prose paragraphs of the Python documentation on this machine.

    Args:
        packages: Installed packages whose docstrings are read after those of the standard library.
    """

    packages: tuple[str, ...] = ()
    is_small: bool = True

    @property
    def origin(self) -> str:
        """Where the text comes from."""
        named = ", ".join([f"Python {platform.python_version()}", *self.packages])
        return f"English prose in the documentation of {named} as installed on this machine, nothing was downloaded"

    @property
    def identity(self) -> str:
        """Interpreter and packages with their versions."""
        return f"local_docs {versions_key(self.packages)}"

    def parts(self) -> tuple[TextPart]:
        """Return one part: paragraphs that were seen before are left out."""
        return (TextPart(name="local_docs"),)

    def read(self, part: TextPart) -> Iterator[Document]:
        """Read one document per docstring or help topic that contains prose."""
        return (Document(text) for text in read_local_docs(self.packages))


def read_local_docs(packages: Sequence[str] = ()) -> list[str]:
    """Collect the prose paragraphs of the Python documentation on this machine.

    Args:
        packages: installed packages whose docstrings are read after those of the standard library.

    Returns:
        One document per docstring or help topic that contains prose, each text once, in the order of file
        names.

    Cost:
        About 4 s of one core for the standard library, 15 s with torch (measured on Python 3.11, 2026-11).

    Raises:
        RecipeError: a package is not installed, or the machine has no Python sources to read.
    """
    versions_key(packages)  # raises for a missing package before the slow part
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for package in packages:
        roots += _package_roots(package)
    documents = read_docs_below(roots, _help_topics())
    if not documents:
        raise RecipeError(
            f"The corpus `local_docs` needs the sources of Python's standard library; {roots[0]} holds no "
            "docstrings. Use `--data.source=grammar`, which needs no files."
        )
    return documents


def read_docs_below(roots: Sequence[Path], more_texts: Sequence[str] = ()) -> list[str]:
    """Return the prose of all docstrings in some folders, then of more texts; each paragraph once.

    Folders of tests are left out, and files that are not Python after all.
    """
    seen: set[bytes] = set()
    docstrings = (docstring for root in roots for docstring in _docstrings_below(root))
    return [prose for text in chain(docstrings, more_texts) if (prose := _prose_of(text, seen)) is not None]


def prose_paragraphs(text: str) -> list[str]:
    """Keep the paragraphs of a docstring that read as English, each on one line.

    Doctests, tables, parameter lists, headings and code are dropped; markup of single words is removed.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").splitlines()
        if not lines or lines[0].strip().rstrip(":").lower() in _HEADINGS:
            continue
        indents = {len(line) - len(line.lstrip()) for line in lines[1:]}
        if len(indents) > 1:  # hanging lines: a list or a table
            continue
        paragraph = _MARKS.sub("", _ROLE.sub(r"\1", " ".join(" ".join(lines).split())))
        if _is_prose(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def _is_prose(paragraph: str) -> bool:
    if not paragraph.isascii() or not paragraph[:1].isupper() or paragraph[-1:] not in ".:!?)":
        return False
    if _NOT_PROSE.search(paragraph):
        return False
    words = paragraph.split()
    visible = sum(len(word) for word in words)
    letters = sum(character.isalpha() for character in paragraph)
    return len(words) >= _MIN_WORDS and letters >= _MIN_LETTERS * visible


def _prose_of(text: str, seen: set[bytes]) -> str | None:
    """Return the prose of one text that no earlier text contained, or None; `seen` is updated."""
    fresh = []
    for paragraph in prose_paragraphs(text):
        digest = hashlib.blake2b(paragraph.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            fresh.append(paragraph)
    return "\n".join(fresh) if fresh else None


def _docstrings_below(root: Path) -> Iterator[str]:
    files = sorted([root] if root.is_file() else root.rglob("*.py"))
    for file in files:
        if not _SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other people's invalid escapes
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError):  # templates and broken examples are not ours to repair
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield docstring


def _help_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions split it off
        return []
    return [topics[name] for name in sorted(topics)]


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise RecipeError(
            f"`data.packages` asks for the documentation of `{package}`, which is not installed. "
            f"Install it, or remove it from `data.packages`."
        ) from None


def _package_roots(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RecipeError(
            f"`data.packages` asks for the documentation of `{package}`, found no importable package of that "
            "name. Name packages as in an import statement, for example `torch`."
        )
    return [Path(location) for location in spec.submodule_search_locations]
