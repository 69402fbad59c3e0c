"""Are the words in names of modules and classes those of the glossary, of torch or of Python?"""

import ast
import builtins
import functools
import keyword
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
TORCH = Path(torch.__file__).parent
FOLDERS_OF_TORCH = ("distributed", "nn", "optim", "autograd", "utils/data")


def words(name: str) -> set[str]:
    """The words of a name: GradBucket is grad and bucket, MiCSPlugin is mics and plugin."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.replace("MiCS", "Mics"))
    return {part.lower() for part in parts}


@functools.cache
def known() -> set[str]:
    """The words of the glossary's terms, of torch's modules, classes and functions, and of Python's names."""
    terms = [*re.findall(r"\*\*([^*]+)\*\*", GLOSSARY), GLOSSARY.split("## Other words in names")[1]]
    names = [*terms, *dir(builtins), *sys.stdlib_module_names, *keyword.kwlist]
    for path in (path for folder in FOLDERS_OF_TORCH for path in (TORCH / folder).rglob("*.py")):
        names += [path.stem, *re.findall(r"^\s*(?:class|(?:async )?def) (\w+)", path.read_text(), flags=re.MULTILINE)]
    return set().union(*map(words, names))


def is_known(word: str) -> bool:
    """Whether a word is known, or the plural, singular or verb of it: queued is of queue, planned of plan."""
    stems = {word, f"{word}s", *(word.removesuffix(end) for end in ("s", "d", "ed", "ing"))}
    return bool((stems | {re.sub(r"(.)\1(ed|ing)$", r"\1", word)}) & known())


def unknown_words(path: Path, source: str) -> list[str]:
    """The unknown words in the name of a module, and in those of its classes."""
    modules = [part for part in path.with_suffix("").parts if part != "__init__"]
    classes = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [f"{name}: {word}" for name in (*modules, *classes) for word in sorted(words(name)) if not is_known(word)]


def test_every_word_is_the_fields_or_in_the_glossary() -> None:
    package = ROOT / "mics_strategy"
    unknown = [
        word for path in package.rglob("*.py") for word in unknown_words(path.relative_to(ROOT), path.read_text())
    ]
    assert sorted({*unknown}) == [], "use the field's word, or explain the word in docs/glossary.md"


@pytest.mark.parametrize("name", ["TrailKeeper", "LooseGradient", "Dealing", "Neighbour", "GreetingAnswer", "Lane"])
def test_a_coined_word_is_found(name: str) -> None:
    assert unknown_words(Path("engine/step.py"), f"class {name}: ...") != []


@pytest.mark.parametrize("name", ["GradBucket", "ReduceScatterWork", "HTTPServer", "DesyncWatchdog"])
def test_a_word_of_the_field_is_not(name: str) -> None:
    assert unknown_words(Path("engine/step.py"), f"class {name}: ...") == []
