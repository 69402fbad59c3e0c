"""What is in a checkpoint?

The manifest stands beside the data as ``manifest.json``. It names every other file with its size and digest, so that
what was truncated, flipped, lost or mixed is found before anything is read from it, and it says how the run looked that
wrote it. It is the last file to be written: a folder without one was never finished.

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
FORMAT = 2  # grows when older versions of the package could not read what is written


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint: its size, and its SHA-256 in hexadecimal digits."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: Optimizer steps that the run had done.
        world_size: Ranks that wrote it.
        scopes: Ranks over which each model state was sharded, by its name. It loads over any other.
        package_version: Of mics_strategy.
        torch_version: Of torch.
        files: Every file but the manifest, by its path inside the folder.
        optimizer_classes: Of the optimizers, with their modules.
        pending_micro_steps: Micro-steps since the last optimizer step, whose gradients are not in the checkpoint.
        format: Of the folder.
    """

    step: int
    world_size: int
    scopes: Mapping[str, int]
    package_version: str
    torch_version: str
    files: Mapping[str, FileEntry]
    optimizer_classes: Sequence[str] = ()
    pending_micro_steps: int = 0
    format: int = FORMAT

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read a manifest.

        Args:
            text: Of the file.
            where: Names the file in errors.

        Raises:
            CheckpointError: It is no manifest, or one of a later format.
        """
        try:
            found = json.loads(text)
            if _count("format", found["format"], 1) > FORMAT:
                raise CheckpointError(
                    f"`{where}` has format {found['format']}, written by mics_strategy {found['package_version']}; "
                    f"this version reads formats up to {FORMAT}. Upgrade mics_strategy."
                )
            own = {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}
            for name, least in _COUNTS.items():
                _count(name, own.get(name, least), least)
            for name in ("package_version", "torch_version"):
                _text(name, own[name])
            own["scopes"] = {name: _count(f"scopes: {name}", ranks, 1) for name, ranks in own["scopes"].items()}
            own["files"] = {inside(name): file_entry(name, entry) for name, entry in own["files"].items()}
            classes = own.get("optimizer_classes", ())
            own["optimizer_classes"] = tuple(_text("optimizer_classes", name) for name in classes)
            return cls(**own)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"`{where}` is not a whole manifest ({type(error).__name__}: {error}). Use an older checkpoint; "
                "`newest_checkpoint(folder)` finds the newest whole one."
            ) from error


_COUNTS = {"step": 0, "world_size": 1, "pending_micro_steps": 0}  # and their smallest values


def is_inside(name: str) -> bool:
    """Whether a relative path stays in the folder to which it is relative."""
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def inside(name: str) -> str:
    """The path itself.

    Raises:
        ValueError: It leaves the folder.
    """
    if not is_inside(name):
        raise ValueError(f"`files` names {name!r}, which is not in the folder")
    return name


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` is {value!r} and no whole number from {least} on")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is {value!r} and no text")
    return value


def file_entry(name: str, entry: Mapping[str, Any]) -> FileEntry:
    """An entry from JSON.

    Args:
        name: Name of the file, for errors.
        entry: As `FileEntry`.

    Raises:
        ValueError: Or TypeError, or KeyError: it is none.
    """
    where = f"files: {name}"
    return FileEntry(num_bytes=_count(where, entry["num_bytes"], 0), sha256=_text(where, entry["sha256"]))
