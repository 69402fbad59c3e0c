"""The manifest of a checkpoint: its files with their digests, and its run.

It is stored next to the data as ``manifest.json``. It names every other file with its size and digest, so that
truncated, corrupted, lost and mixed files are detected before they are read. It also describes the run that wrote the
checkpoint. It is the last file to be written: a folder without a manifest was never finished.

Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mics_strategy.errors import CheckpointError

NAME = "manifest.json"
ISLANDS_FORMAT, IN_FLIGHT_FORMAT = 3, 4  # of islands that differ; with outer steps in flight
FORMAT = IN_FLIGHT_FORMAT  # increased when older versions of the package cannot read the files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint: its size in bytes, and its SHA-256 in hexadecimal."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a checkpoint.

    Attributes:
        step: Number of optimizer steps of the run.
        world_size: Number of ranks that wrote the checkpoint.
        scopes: Number of ranks over which each model state was sharded, by name. It loads with any other scopes.
        package_version: Version of mics_strategy.
        torch_version: Version of torch.
        files: Every file except the manifest, by its path inside the folder.
        optimizer_classes: Class names of the optimizers, with their modules.
        islands: Islands of ranks that stepped alone; 1 without outer steps, or without optimizers.
        steps_in_round: Optimizer steps since the islands' last outer step.
        pending_micro_steps: Micro-steps since the last optimizer step. Their gradients are not in the checkpoint.
        format: Version of the folder's format.
    """

    step: int
    world_size: int
    scopes: Mapping[str, int]
    package_version: str
    torch_version: str
    files: Mapping[str, FileEntry]
    optimizer_classes: Sequence[str] = ()
    pending_micro_steps: int = 0
    islands: int = 1
    steps_in_round: int = 0
    format: int = 2

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, file: str) -> Manifest:
        """Parse a manifest.

        Args:
            text: Text of the file.
            file: Name of the file in errors.

        Raises:
            CheckpointError: The text is not a manifest, or is one of a later format.
        """
        try:
            values = json.loads(text)
            if _count("format", values["format"], 1) > FORMAT:
                raise CheckpointError(
                    f"`{file}` has format {values['format']}, written by mics_strategy {values['package_version']}. "
                    f"This version reads formats up to {FORMAT}. Upgrade mics_strategy."
                )
            fields = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
            for name, least in _COUNTS.items():
                _count(name, fields.get(name, least), least)
            for name in ("package_version", "torch_version"):
                _text(name, fields[name])
            fields["scopes"] = {name: _count(f"scopes: {name}", ranks, 1) for name, ranks in fields["scopes"].items()}
            fields["files"] = {inside(name): file_entry(name, entry) for name, entry in fields["files"].items()}
            classes = fields.get("optimizer_classes", ())
            fields["optimizer_classes"] = tuple(_text("optimizer_classes", name) for name in classes)
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"`{file}` is not a complete manifest ({type(error).__name__}: {error}). Load an older checkpoint: "
                "`newest_checkpoint(folder)` returns the newest intact one."
            ) from error


_COUNTS = {"step": 0, "world_size": 1, "pending_micro_steps": 0, "islands": 1, "steps_in_round": 0}  # smallest values


def is_inside(name: str) -> bool:
    """Whether a relative path stays in the folder to which it is relative."""
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def inside(name: str) -> str:
    """Return a relative path, checked to stay inside the folder.

    Raises:
        ValueError: The path leaves the folder.
    """
    if not is_inside(name):
        raise ValueError(f"`files` names {name!r}, which is outside the folder")
    return name


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` is {value!r} instead of an integer of at least {least}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is {value!r} instead of a string")
    return value


def file_entry(name: str, entry: Mapping[str, Any]) -> FileEntry:
    """Parse an entry of a file.

    Args:
        name: Name of the file, for errors.
        entry: Fields of `FileEntry`, from JSON.

    Raises:
        ValueError: The entry is invalid. Also raised as TypeError or KeyError.
    """
    where = f"files: {name}"
    return FileEntry(num_bytes=_count(where, entry["num_bytes"], 0), sha256=_text(where, entry["sha256"]))
