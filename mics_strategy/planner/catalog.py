"""Published models by name, and the reading of the package's tables and of files with clusters.

The numbers are in `models.toml`, with their sources.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from mics_strategy.errors import ConfigError, nearest
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.resnet_formulas import IMAGE_SIZE, ResnetShape, describe_resnet

Shape = TransformerShape | ResnetShape
FILE_SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def model_names() -> tuple[str, ...]:
    """Names of all models."""
    return tuple(read_table("models.toml"))


def model_shape(name: str) -> Shape:
    """Numbers of a published model.

    Args:
        name: Name, in any case.

    Raises:
        ConfigError: No model has this name.
    """
    fields = look_up(read_table("models.toml"), name, "model")
    if fields["family"] == "wide_resnet":
        blocks = tuple(fields.pop("stage_blocks"))
        return ResnetShape(name=name.lower(), stage_blocks=blocks, **{k: v for k, v in fields.items() if k != "family"})
    return TransformerShape(name=name.lower(), **fields)


def is_image_model(name: str) -> bool:
    """Whether the samples of a published model are images, which have no tokens."""
    return isinstance(model_shape(name), ResnetShape)


def describe_model(name: str, tokens: int, dtype_bytes: int = 2) -> ModelDescription:
    """Describe a published model.

    Args:
        name: Name, in any case.
        tokens: Tokens of a sample; not used for images, which have `IMAGE_SIZE` pixels along an edge.
        dtype_bytes: Bytes of one element of activations, 2 or 4.

    Raises:
        ConfigError: No model has this name, or its table of positions is shorter.
    """
    shape = model_shape(name)
    if isinstance(shape, ResnetShape):
        return describe_resnet(shape, IMAGE_SIZE, dtype_bytes)
    return describe(shape, tokens, dtype_bytes)


def read_table(file_name: str) -> dict[str, Any]:
    """A table of the package, from its TOML file."""
    return tomllib.loads(resources.files(__package__).joinpath(file_name).read_text())


def read_file(path: Path) -> Any:
    """What a TOML, JSON or YAML file holds.

    Raises:
        ConfigError: The file does not exist, or is not of these formats.
    """
    if not path.is_file():
        raise ConfigError(f"`{path}` is no file with a cluster. Give the path of a TOML, JSON or YAML file.")
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix not in FILE_SUFFIXES:
            raise ConfigError(f"`{path}` is not .toml, .json, .yaml or .yml. Rename it after its format.")
        if importlib.util.find_spec("yaml") is None:
            raise ConfigError(f"`{path}` needs PyYAML, which is not installed. Install it, or write JSON or TOML.")
        yaml: Any = importlib.import_module("yaml")
        try:
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
                raise ConfigError(f"`{path}` has an alias (`*name`). Write the fields in its place, or use `like`.")
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"`{path}` is not valid YAML: {error}. Correct the file.") from error
    except (OSError, ValueError, RecursionError) as error:  # of the decoders, and this module's own
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"`{path}` is not valid {path.suffix[1:].upper()}: {error}. Correct the file.") from error


def look_up(table: Mapping[str, Mapping[str, Any]], name: str, noun: str) -> dict[str, Any]:
    """Fields of one entry of a table, and those that it takes over by `like`.

    Args:
        table: Fields by name.
        name: Name, in any case; `_` and `-` are equal.
        noun: Noun of the entries in errors.

    Raises:
        ConfigError: No entry has this name.
    """
    names = {_key(entry): entry for entry in table}
    if _key(name) not in names:
        raise ConfigError(f"`{name}` is no {noun} of the catalog.{nearest(name, table)}")
    fields = dict(table[names[_key(name)]])
    inherited = look_up(table, fields.pop("like"), noun) if "like" in fields else {}
    return {**inherited, **fields}


def _key(name: str) -> str:
    return name.lower().replace("_", "-")
