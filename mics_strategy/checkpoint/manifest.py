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
            if found["format"] > FORMAT:
                raise CheckpointError(
                    f"`{where}` has format {found['format']}, written by mics_strategy {found['package_version']}; "
                    f"this version reads formats up to {FORMAT}. Upgrade mics_strategy."
                )
            own = {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}
            own["files"] = {name: _file_entry(entry) for name, entry in found["files"].items()}
            own["optimizer_classes"] = tuple(own.get("optimizer_classes", ()))
            return cls(**own)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"`{where}` is not a whole manifest ({error!r}). Use an older checkpoint; `resume='auto'` finds it."
            ) from error


def _file_entry(entry: Mapping[str, Any]) -> FileEntry:
    if not (isinstance(entry["num_bytes"], int) and isinstance(entry["sha256"], str)):
        raise TypeError(f"no file entry: {entry!r}")
    return FileEntry(**entry)
