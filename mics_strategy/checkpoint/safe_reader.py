"""How are a checkpoint's pieces read, without running what somebody may have put into it?

torch's reader unpickles the description of a checkpoint, and its planner every object in it, whatever they are. Here
the description may hold nothing but torch's own descriptions, and objects nothing but plain data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.manifest import NAME as MANIFEST
from mics_strategy.checkpoint.manifest import is_inside
from mics_strategy.errors import CheckpointError

DESCRIPTION = ".metadata"  # torch's name for it
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch._C": {"_get_layout_from_string"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PurePath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "PurePath"},
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles torch's descriptions of checkpoints, and refuses anything else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class SafeReader(FileSystemReader):
    """Reads a folder in the format of torch's distributed checkpoints."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the folder holds.

        Raises:
            CheckpointError: It cannot be read, holds more than descriptions, or names files that are not the
                checkpoint's: outside of the folder, or not in the manifest where there is one.
        """
        folder = Path(self.path)
        file = folder / DESCRIPTION
        files = atomic.read_manifest(folder).files if atomic.is_checkpoint(folder) else None
        try:
            with file.open("rb") as opened:
                found = _MetadataUnpickler(opened).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"`{file}` does not describe a checkpoint ({error}). It is damaged, or somebody has put into it what "
                "would be run; use another checkpoint."
            ) from error
        if not isinstance(found, Metadata):
            raise CheckpointError(
                f"`{file}` holds a {type(found).__name__} and no description. Use another checkpoint."
            )
        names = {str(piece.relative_path) for piece in (found.storage_data or {}).values()}
        for name in sorted(names | ({DESCRIPTION} if files is not None else set())):
            check_listed(folder, name, files)
        return found


def check_listed(folder: Path, name: str, files: Collection[str] | None) -> None:
    """Refuse to read a file of which nothing says that it is the checkpoint's.

    Args:
        folder: The checkpoint.
        name: Name of the file inside the folder.
        files: Those of the manifest; None where others have written the folder, without one.

    Raises:
        CheckpointError: It is outside of the folder, no regular file, or not in the manifest.
    """
    if not is_inside(name):
        raise CheckpointError(
            f"`{folder / DESCRIPTION}` names `{name}`, which is not in the folder. Somebody has changed the "
            "checkpoint; use another one."
        )
    if files is not None and name not in files:
        raise CheckpointError(
            f"`{folder / name}` belongs to no checkpoint that was saved there: `{MANIFEST}` does not list it, so "
            "nothing says what it should hold. Use another checkpoint."
        )
    if (folder / name).exists() and not (folder / name).is_file():
        raise CheckpointError(f"`{folder / name}` is no regular file. Use another checkpoint.")


class SafeLoadPlanner(DefaultLoadPlanner):
    """Puts what is read in its place; objects are plain data.

    Args:
        weights_only: As `torch.load` has it.
    """

    def __init__(self, *, weights_only: bool = True) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object in its place.

        Raises:
            CheckpointError: Reading it might run code.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{name}` in the checkpoint is no plain data, and reading it may run code ({error}). If you trust the "
                "checkpoint, load it with `weights_only=False`."
            ) from error
        set_element(self.original_state_dict, self.mappings[name], loaded)


def read(path: Path, metadata: Metadata, values: dict[str, Any], *, weights_only: bool) -> None:
    """Fill nested dicts from a checkpoint; tensors in place, each in this rank's share.

    Args:
        path: The checkpoint.
        metadata: Its description.
        values: Whose names are in it.
        weights_only: As `torch.load` has it.

    Cost:
        Reads every saved piece of which this rank needs a part.
    """
    reader, planner = SafeReader(path), SafeLoadPlanner(weights_only=weights_only)
    planner.set_up_planner(values, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
