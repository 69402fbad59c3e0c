"""Reading of checkpoints without running code that they may contain.

torch's reader unpickles a checkpoint's metadata, and its planner unpickles every object, of whatever class. Here the
metadata may hold only torch's metadata classes, and objects only plain data.
"""

from __future__ import annotations

import enum
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
from mics_strategy.checkpoint.chunks import check_metadata
from mics_strategy.checkpoint.manifest import NAME as MANIFEST
from mics_strategy.checkpoint.manifest import is_inside
from mics_strategy.errors import CheckpointError

METADATA = ".metadata"  # torch's name of the file
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_METADATA_CLASSES = {
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

_UNLISTED = ("__bases__", "__name__", "__qualname__", "__defaults__", "__kwdefaults__")  # attributes outside `vars`


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of torch's metadata that refuses other classes, and changes to these."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)
        self._attributes: dict[Any, dict[str, Any]] = {}  # of every class and function, when it was found

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of  # Python 3.11.2 pickles a member of an Enum by its name
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it needs the class {module}.{name}")
        found = super().find_class(module, name)
        if hasattr(found, "__dict__"):
            self._attributes.setdefault(found, _attributes_of(found))
        return found

    def load_unchanged(self) -> Any:
        """Load the file, and undo what it assigns to classes, as a pickle can.

        Raises:
            pickle.UnpicklingError: The file assigns to a class, or needs another one.
        """
        try:
            return self.load()
        finally:
            changes = [change for found, before in self._attributes.items() for change in _undo(found, before)]
            if changes:
                raise pickle.UnpicklingError(f"it assigns to {', '.join(changes)}")


def _member_of(cls: Any, name: str) -> Any:
    if not isinstance(cls, enum.EnumMeta):
        raise pickle.UnpicklingError(f"it needs the attribute {name} of {cls}")
    return cls[name]


def _attributes_of(found: Any) -> dict[str, Any]:
    return {**vars(found), **{name: getattr(found, name) for name in _UNLISTED if hasattr(found, name)}}


def _undo(found: Any, before: dict[str, Any]) -> list[str]:
    """Restore the attributes of a class or function; return the changed names."""
    changed = [name for name, value in _attributes_of(found).items() if before.get(name, found) != value]
    for name in changed:
        if name in before:
            setattr(found, name, before[name])
        else:
            delattr(found, name)
    return [f"{found.__name__}.{name}" for name in changed]


class SafeReader(FileSystemReader):
    """Reader of a folder in the format of torch's distributed checkpoint."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the folder.

        Raises:
            CheckpointError: The metadata cannot be read, holds other classes, lacks or repeats a part of a tensor, or
                names files that do not belong to the checkpoint: outside of the folder, or not in the manifest if there
                is one.
        """
        folder = Path(self.path)
        file = folder / METADATA
        files = atomic.read_manifest(folder).files if atomic.is_checkpoint(folder) else None
        try:
            with file.open("rb") as opened:
                metadata = _MetadataUnpickler(opened).load_unchanged()
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                raise CheckpointError(f"`{folder}` {atomic.why_no_folder(folder)}.") from None
            inner = sorted(file.parent.name for file in folder.glob(f"*/{METADATA}"))
            inner.sort(key=lambda name: name.startswith("optimizer"))  # a model first
            remedy = f"Pass `{folder / inner[0]}`." if inner else "Pass the folder of a checkpoint."
            raise CheckpointError(f"`{folder}` is not a checkpoint: it has no `{METADATA}`. {remedy}") from None
        except Exception as error:  # unpickling raises what the constructors of the classes raise
            raise CheckpointError(
                f"`{file}` is not checkpoint metadata ({error}). It is damaged, or was changed to run code when it is "
                "loaded. Use another checkpoint."
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"`{file}` holds a {type(metadata).__name__} instead of checkpoint metadata. Use another checkpoint."
            )
        try:
            check_metadata(metadata)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"`{file}` does not describe a complete checkpoint: {error}. It is damaged. Use another checkpoint."
            ) from error
        names = {str(entry.relative_path) for entry in metadata.storage_data.values()}
        for name in sorted(names | ({METADATA} if files is not None else set())):
            check_listed(folder, name, files)
        return metadata


def check_listed(folder: Path, name: str, files: Collection[str] | None) -> None:
    """Check that a file belongs to the checkpoint.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the file inside the folder.
        files: File names of the manifest; None if another library wrote the folder, without a manifest.

    Raises:
        CheckpointError: The file is outside of the folder, not a regular file, or not in the manifest.
    """
    if not is_inside(name):
        raise CheckpointError(
            f"`{folder / METADATA}` names `{name}`, which is outside the folder. The checkpoint was modified after "
            "it was saved. Use another one."
        )
    if files is not None and name not in files:
        raise CheckpointError(
            f"`{folder / name}` does not belong to the checkpoint: `{MANIFEST}` does not list it, so its contents "
            "cannot be verified. Use another checkpoint."
        )
    if (folder / name).exists() and not (folder / name).is_file():
        raise CheckpointError(f"`{folder / name}` is not a regular file. Use another checkpoint.")


class SafeLoadPlanner(DefaultLoadPlanner):
    """Load planner that accepts only plain data as objects.

    Args:
        weights_only: Same as in `torch.load`.
    """

    def __init__(self, *, weights_only: bool = True) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object into the state dict.

        Raises:
            CheckpointError: Loading the object may run code.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{name}` in the checkpoint is not plain data, and loading it may run code ({error}). If you trust "
                "the checkpoint, load it with `weights_only=False`."
            ) from error
        set_element(self.original_state_dict, self.mappings[name], loaded)


def read(reader: SafeReader, metadata: Metadata, values: dict[str, Any], *, weights_only: bool) -> None:
    """Fill nested dicts from a checkpoint.

    Tensors are filled in place with this rank's shard.

    Args:
        reader: Reader of the checkpoint.
        metadata: Metadata of the checkpoint.
        values: Nested dicts with names of the checkpoint. Their tensors are overwritten.
        weights_only: Same as in `torch.load`.

    Cost:
        Reads every saved item of which this rank needs a part.
    """
    planner = SafeLoadPlanner(weights_only=weights_only)
    planner.set_up_planner(values, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
