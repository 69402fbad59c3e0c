"""Recipes as data: YAML, and its values as typed fields of frozen dataclasses.

A file holds mappings, lists, strings, numbers and booleans. It has no tags and no aliases, and nothing in it is looked
up: no class, no variable, no other file. `read_file` parses it, `typed` checks every value against the type of its
field, `build` makes the dataclass.
"""

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from .errors import RecipeError

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
T = TypeVar("T")
_LARGEST_BYTES = 100_000  # the project's recipes have 5,000; PyYAML takes seconds for this
_LONGEST_SHOWN = 60  # characters of a value in an error
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML 1.1 wants a point and a sign
_UNMATCHED = object()


class Word(str):
    """Text of the command line: a string or YAML, as the field that takes it asks for."""


class Parts(dict[str, Any]):
    """Fields of a mapping that are set one by one: the others keep their values."""


class _Loader(yaml.SafeLoader):
    """Loader of plain data, in which every key is a string that occurs once."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # aliases of aliases make a small file endless
            raise yaml.MarkedYAMLError(problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in values:
                raise yaml.MarkedYAMLError(problem_mark=key.start_mark)
            values[key.value] = self.construct_object(value, deep=True)
        return values


class _Dumper(yaml.SafeDumper):
    """Dumper of what `_Loader` reads."""


_Loader.yaml_constructors = {
    None: yaml.SafeLoader.construct_undefined,
    **{
        f"{_TAG}{kind}": getattr(yaml.SafeLoader, f"construct_yaml_{kind}") for kind in ("null", "bool", "int", "float")
    },
    **{f"{_TAG}{kind}": getattr(yaml.SafeLoader, f"construct_yaml_{kind}") for kind in ("str", "seq", "map")},
    f"{_TAG}timestamp": yaml.SafeLoader.construct_yaml_str,
}
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(f"{_TAG}float", _EXPONENT, [*"-+.0123456789"])


def parse(text: str, where: str) -> Plain:
    """Parse YAML.

    Args:
        text: Text of a file or of an option.
        where: Name of it, for the error, which does not show the text.

    Raises:
        RecipeError: The text is no YAML, or more than plain data.
    """
    try:
        value: Plain = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        tab = " A tab stands there, and YAML is indented by spaces." if "'\\t'" in str(error) else ""
        raise RecipeError(
            f"{where}{place} is not plain YAML: mappings, lists and scalars, without tags, aliases and repeated keys."
            f"{tab} Correct it."
        ) from None  # the cause would show the text
    return value


def read_file(path: Path, kind: type) -> dict[str, Plain]:
    """Read a file with fields of a dataclass.

    Raises:
        RecipeError: There is no such file, or it holds something else. The error does not show its contents.
    """
    if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
        raise RecipeError(f"`{path}` is not a recipe: it is no file, or larger than 100 kB. Name a YAML file.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"`{path}` cannot be read as text ({type(error).__name__}). Name a YAML file.") from None
    return mapping_of(parse(text, f"`{path}`"), kind, f"`{path}`")


def types_of(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name; annotations that are text would have to be evaluated."""
    return {field.name: field.type for field in dataclasses.fields(kind)}


def mapping_of(value: Plain, kind: type, where: str) -> dict[str, Plain]:
    """Return a value that is a mapping with fields of a dataclass.

    Raises:
        RecipeError: It is none. The error does not show the value.
    """
    names = types_of(kind)
    if not isinstance(value, dict) or not any(name in value for name in names):
        raise RecipeError(f"{where} is not a recipe: it has none of the fields {', '.join(names)}. Name a recipe.")
    return value


def dump(values: Mapping[str, Any]) -> str:
    """Return YAML that `parse` reads back; tuples become lists, which is what YAML has."""
    return yaml.dump(_without_tuples(values), Dumper=_Dumper, sort_keys=False)


def _without_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_tuples(item) for key, item in value.items()}
    return [_without_tuples(item) for item in value] if isinstance(value, tuple | list) else value


def merge(values: Mapping[str, Any], changes: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return fields of a dataclass with changes: nested dataclasses and `Parts` are merged, other values replaced."""
    hints, merged = types_of(kind), dict(values)
    for name, change in changes.items():
        if dataclasses.is_dataclass(hints[name]):
            change = merge(merged.get(name, {}), change, hints[name])
        elif isinstance(change, Parts):
            change = {**merged.get(name, {}), **change}
        merged[name] = change
    return merged


def typed(values: Mapping[str, Any], kind: type, prefix: str = "") -> dict[str, Any]:
    """Return fields of a dataclass, nested as given, with every value in the type of its field.

    Args:
        values: Values by name, as `parse` returns them, or `Word`s.
        kind: Dataclass.
        prefix: Dotted name of the dataclass's own field and a dot, for errors.

    Raises:
        RecipeError: A name is unknown, or a value is of another type.
    """
    hints = types_of(kind)
    for name in values:
        if name not in hints:
            blocks = [field.name for field in dataclasses.fields(kind) if name in _names_inside(field)]
            matches = [f"{block}.{name}" for block in blocks] or difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
            hint = f" Did you mean `{prefix}{matches[0]}`?" if matches else ""
            raise RecipeError(f"{shown(prefix + name)} is no field of a recipe.{hint} Use one of {', '.join(hints)}.")
    return {name: _typed(value, hints[name], f"{prefix}{name}") for name, value in values.items()}


def _names_inside(field: dataclasses.Field[Any]) -> Collection[str]:
    """Return the names inside of a block: those of its dataclass, or of the one that its mapping is for."""
    kind = field.metadata.get("fields_of", field.type)
    return types_of(kind) if dataclasses.is_dataclass(kind) else ()


def _typed(value: Any, hint: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise RecipeError(f"`{name}` is {shown(value)} instead of a mapping with the fields of `{name}`.")
        return typed(value, hint, f"{name}.")
    if isinstance(value, Parts):
        value = Parts({key: parse(text, f"`--{name}.{key}`") for key, text in value.items()})
    elif isinstance(value, Word):
        is_text = str in _choices(hint) and not (value.startswith("[") and len(_choices(hint)) > 1)
        value = str(value) if is_text else parse(value, f"`--{name}`")
    for choice in _choices(hint):
        match = _match(value, choice)
        if match is not _UNMATCHED:
            return match
    raise RecipeError(
        f"`{name}` is {shown(value)}, which cannot be used: it must be {describe(hint)}. Change it in the YAML or "
        f"with --{name}."
    )


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, those of a `Literal` one by one."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    is_plain = hint in (str, int, float, bool) or get_origin(hint) in (tuple, dict)
    return (hint,) if is_plain or isinstance(hint, str) else sum(map(_choices, get_args(hint)), ())


def _match(value: Any, choice: Any) -> Any:
    """Return the value as one of the choices; `_UNMATCHED` where it is of another type, or no text that is printed."""
    if isinstance(choice, str):
        return value if isinstance(value, str) and value == choice else _UNMATCHED
    if choice is float and type(value) in (int, float):
        return float(value) if abs(value) <= 1e308 or value in (float("inf"), -float("inf")) else _UNMATCHED
    if choice is str and type(value) is str:
        return value if value.replace("\n", "").replace("\t", "").isprintable() else _UNMATCHED
    if get_origin(choice) is dict:
        return value if isinstance(value, dict) else _UNMATCHED
    if get_origin(choice) is tuple:
        return _match_list(value, get_args(choice))
    return value if type(value) is choice else _UNMATCHED


def _match_list(value: Any, hints: tuple[Any, ...]) -> Any:
    if not isinstance(value, list):
        return _UNMATCHED
    kinds = [hints[0]] * len(value) if hints[-1] is Ellipsis else hints
    if len(kinds) != len(value):
        return _UNMATCHED
    items = []
    for item, kind in zip(value, kinds, strict=True):
        matches = [match for match in (_match(item, choice) for choice in _choices(kind)) if match is not _UNMATCHED]
        if not matches:
            return _UNMATCHED
        items.append(matches[0])
    return tuple(items)


def describe(hint: Any) -> str:
    """Return the values that a field takes, in words."""
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    texts = []
    for choice in _choices(hint):
        if get_origin(choice) is tuple:
            item, *others = get_args(choice)
            count = "" if others == [Ellipsis] else f"{1 + len(others)} times "
            texts.append(f"a list of {count}{describe(item)}")
        else:
            texts.append(f"`{choice}`" if isinstance(choice, str) else words.get(choice, "a mapping"))
    return " or ".join(texts)


def shown(value: object) -> str:
    """Return a value for an error: one line, cut where it is long."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return f"`{text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'}`"


def build(values: Mapping[str, Any], kind: type[T]) -> T:
    """Make a dataclass of typed fields, with its defaults for what is missing.

    Raises:
        RecipeError: A field without a default is missing, or values cannot be used together.
    """
    arguments = dict(values)
    for name, hint in types_of(kind).items():
        if dataclasses.is_dataclass(hint):
            arguments[name] = build(arguments.get(name, {}), hint)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in arguments and not has_default:
            raise RecipeError(f"`{field.name}` is missing. Add it to the recipe, or use --{field.name}.")
    return kind(**arguments)
