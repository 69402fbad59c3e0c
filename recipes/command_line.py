"""The options of a recipe on a command line, and their help."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import RecipeError
from .plain_data import Parts, Word, describe

_OPTION = re.compile(r"--([a-z][a-z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_FLAGS = ("ci", "print_config", "help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line says about a recipe.

    Attributes:
        configs: Files, or inline mappings that begin with a brace; later ones win.
        overrides: Fields by name, nested as in a file.
        flags: Names of the flags: `ci`, `print_config` and `help`.
    """

    configs: list[str] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=Parts)
    flags: set[str] = field(default_factory=set)


def split(arguments: Sequence[str]) -> Options:
    """Split a command line: `--config FILE`, flags, and dotted fields with their values.

    Raises:
        RecipeError: An argument is no option, or its value is missing.
    """
    options, words = Options(), iter(arguments)
    for word in words:
        option, is_assigned, value = ("--help", "", "") if word == "-h" else word.partition("=")
        match = _OPTION.fullmatch(option)
        if match is None:
            raise RecipeError(f"`{word}` is no option. Use `--help`, or `--block.field=value` for a field of a recipe.")
        name = match[1]
        if name in _FLAGS and not is_assigned:
            options.flags.add(name)
            continue
        value = value if is_assigned else next(words, "--")
        if not is_assigned and value.startswith("--"):
            raise RecipeError(f"`{word}` was given without a value. Write `{word}=VALUE`.")
        if name == "config":
            options.configs.append(value)
        else:
            _put(options.overrides, name.split("."), Word(value), word)
    return options


def _put(values: dict[str, Any], names: Sequence[str], value: Word, word: str) -> None:
    *blocks, last = names
    for block in blocks:
        values = values.setdefault(block, Parts())
        if not isinstance(values, dict):
            raise RecipeError(f"`{word}` sets a part of a field that is set as a whole. Remove one of the options.")
    values[last] = value


def help_text(kind: type, prog: str, description: str) -> str:
    """Return the help of a command: every field of a recipe, with its values and its default."""
    parser = argparse.ArgumentParser(prog=prog, description=description, usage="%(prog)s RECIPE [options]")
    parser.add_argument("--config", metavar="FILE", help="YAML file of a recipe; may be given several times")
    parser.add_argument("--ci", action="store_true", help="the recipe's small version")
    parser.add_argument("--print_config", action="store_true", help="print the resolved recipe")
    for name, values, default, text in _leaves(kind):
        ending = "" if default is dataclasses.MISSING else f"; default: {default}"
        if name not in ("ci", "cuda"):
            parser.add_argument(f"--{name}", metavar="VALUE", help=f"{text} ({values}{ending})".replace("%", "%%"))
    return parser.format_help()


def _leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, str, object, str]]:
    """Yield dotted name, values, default and description of every field."""
    texts = _descriptions(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(item.type):
            yield from _leaves(item.type, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{item.name}", describe(item.type), item.default, texts.get(item.name, "")


def _descriptions(kind: type) -> dict[str, str]:
    """Return the texts of the `Args` of a dataclass and those that it inherits, by name."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        block = (inspect.getdoc(base) or "").partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n    (?=\w+: )", "\n" + block)[1:]:
            name, _, text = entry.partition(": ")
            texts[name] = " ".join(text.split())
    return texts
