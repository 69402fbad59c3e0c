"""File formats of weights, and how one tensor is read without the others.

Files of full tensors are mapped into memory. A tensor is a view of its file, and only what is copied from it is read
from disk. Pages that were read stay mapped until the file is closed, so files are reopened every few tensors. Folders
of torch's distributed checkpoint have their own reader. Nothing here runs code from a file unless `weights_only` is
False.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.manifest import is_inside
from mics_strategy.checkpoint.safe_reader import SafeReader, read
from mics_strategy.checkpoint.state import MODEL
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

MAPPED_BYTES = 1 << 25  # of tensors read from a file before it is reopened
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
_STATE_DICT_KEYS = ("state_dict", "model", "model_state_dict", "module")  # keys of the weights in a torch file
_UNIVERSAL, _LATEST_UNIVERSAL = "zero", "latest_universal"  # names of DeepSpeed
_SHOWN = 5  # entries of a folder in an error
Opener = Callable[[], dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Shape and dtype of a tensor, known before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class Source(Protocol):
    """Weights in files.

    Attributes:
        saved: Shape and dtype by name in the files; None for a value that is not a tensor.
        may_be_flat: Whether tensors may be flattened.
    """

    saved: dict[str, SavedTensor | None]
    may_be_flat: bool

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of tensors into parameters and buffers, in their dtypes."""

    def value(self, name: str) -> Any:
        """Read one entry as it was saved, into new memory."""


class MappedFiles:
    """Files of full tensors, mapped into memory.

    Args:
        openers: Function per file that returns the file's entries by name, with tensors as views of the file.
        may_be_flat: Whether tensors may be flattened.

    Raises:
        CheckpointError: A file cannot be read, or a tensor has an unsupported type; the error names it.
    """

    def __init__(self, openers: Mapping[Path, Opener], *, may_be_flat: bool = False) -> None:
        self.may_be_flat = may_be_flat
        self.saved: dict[str, SavedTensor | None] = {}
        self._openers = openers
        self._file_of: dict[str, Path] = {}
        for file, opener in openers.items():
            for name, value in opener().items():
                self.saved[name] = _describe(name, value, file)
                self._file_of[name] = file

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into parameters and buffers.

        Cost:
            Memory: mapped pages of `MAPPED_BYTES` of tensors, or of the largest one; the system can reclaim them.
        """
        names_of: dict[Path, list[str]] = {}
        for name in targets:
            names_of.setdefault(self._file_of[name], []).append(name)
        for file, names in names_of.items():
            opener, num_bytes = self._openers[file], 0
            opened = opener()
            for name in names:
                if num_bytes > MAPPED_BYTES:
                    opened, num_bytes = {}, 0  # unmap before the file is mapped again
                    opened = opener()
                num_bytes += opened[name].numel() * opened[name].element_size()
                _copy(opened[name], targets[name])

    def value(self, name: str) -> Any:
        """Read one entry as it was saved."""
        value = self._openers[self._file_of[name]]()[name]
        return value.clone() if isinstance(value, torch.Tensor) else value


class DistributedFolder:
    """A folder of torch's distributed checkpoint or of this package.

    Optimizers are not read.

    Args:
        path: The folder.
        weights_only: Same as in `torch.load`.

    Raises:
        CheckpointError: The folder cannot be read, or one of its files is missing or too short.
    """

    may_be_flat = False

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        self._path = path
        self._weights_only = weights_only
        self._metadata = SafeReader(path).read_metadata()
        is_sharded_checkpoint = atomic.is_checkpoint(path)
        self.saved: dict[str, SavedTensor | None] = {
            name: SavedTensor(entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in self._metadata.state_dict_metadata.items()
            if (name.startswith(f"{MODEL}.") if is_sharded_checkpoint else not name.startswith("optim"))
        }
        self._check_files()

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for storage in (self._metadata.storage_data or {}).values():
            ends[storage.relative_path] = max(ends.get(storage.relative_path, 0), storage.offset + storage.length)
        for name, end in ends.items():
            file = self._path / name
            if not file.is_file():
                raise CheckpointError(f"`{file}` is missing. {_REMEDY}")
            if file.stat().st_size < end:
                raise CheckpointError(f"`{file}` has {file.stat().st_size} bytes, but should have {end}. {_REMEDY}")

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into parameters and buffers.

        Cost:
            Memory: about four copies of the largest saved item, because of how torch reads it.
        """
        values = {name: target.detach() for name, target in targets.items()}
        read(SafeReader(self._path), self._metadata, values, weights_only=self._weights_only)

    def value(self, name: str) -> Any:
        """Read one entry as it was saved."""
        saved = self.saved[name]
        values: dict[str, Any] = {name: None if saved is None else torch.empty(saved.shape, dtype=saved.dtype)}
        read(SafeReader(self._path), self._metadata, values, weights_only=self._weights_only)
        return values[name]


def open_source(path: Path, *, weights_only: bool) -> Source:
    """Detect the format of a path, and open it.

    Args:
        path: File or folder.
        weights_only: Same as in `torch.load`.

    Raises:
        CheckpointError: The path holds no weights of a supported format, or they cannot be read.
    """
    if path.is_file():
        return MappedFiles(
            _indexed(path, weights_only) if path.suffix == ".json" else {path: _opener(path, weights_only)}
        )
    if not path.is_dir():
        raise CheckpointError(f"`{path}` does not exist. Pass a local file or folder. Download models of a hub first.")
    if atomic.is_checkpoint(path) or (path / ".metadata").is_file():
        return DistributedFolder(path, weights_only=weights_only)
    for name in (SAFETENSORS, TORCH):
        if (path / f"{name}.index.json").is_file():
            return MappedFiles(_indexed(path / f"{name}.index.json", weights_only))
        if (path / name).is_file():
            return MappedFiles({path / name: _opener(path / name, weights_only)})
    if (path / _LATEST_UNIVERSAL).is_file():
        name = (path / _LATEST_UNIVERSAL).read_text().strip()
        if not is_inside(name):
            raise CheckpointError(
                f"`{path / _LATEST_UNIVERSAL}` names {name!r}, which is outside its folder. {_REMEDY}"
            )
        path = path / name
    if (path / _UNIVERSAL).is_dir():
        return MappedFiles(_universal(path / _UNIVERSAL, weights_only), may_be_flat=True)
    raise _unknown(path)


def _unknown(path: Path) -> CheckpointError:
    names = sorted(entry.name for entry in path.iterdir())
    if any(path.glob("*_optim_states.pt")) or any(path.glob("*/*_optim_states.pt")):
        return CheckpointError(
            f"`{path}` holds the per-rank files of a DeepSpeed checkpoint. Consolidate them with the `zero_to_fp32.py` "
            "that DeepSpeed has written there (with `--safe_serialization`, which loads fastest) or with "
            "`ds_to_universal.py`, and pass the result."
        )
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return CheckpointError(
        f"`{path}` holds no weights of a supported format: it has {', '.join(names[:_SHOWN]) or 'nothing'}{more}. Pass "
        f"a `.safetensors` or torch file, or a folder with `{SAFETENSORS}` or `{TORCH}` (or their index), `.metadata` "
        f"or `{_UNIVERSAL}/`."
    )


def _opener(file: Path, weights_only: bool) -> Opener:
    if file.suffix == ".safetensors":
        return lambda: as_checkpoint_error(file, lambda: _open_safetensors(file))
    return lambda: as_checkpoint_error(file, lambda: _open_torch(file, weights_only))


def _indexed(index: Path, weights_only: bool) -> dict[Path, Opener]:
    """Map the files of a Hugging Face index to their openers."""

    def names_by_file() -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name, file in json.loads(index.read_text())["weight_map"].items():
            by_file.setdefault(file, []).append(name)
        return by_file

    return {
        index.parent / file: _part(index, index.parent / file, names, weights_only)
        for file, names in as_checkpoint_error(index, names_by_file).items()
        if _check_sibling(index, file)
    }


def _check_sibling(index: Path, file: str) -> bool:
    if Path(file).name != file:
        raise CheckpointError(f"`{index}` names `{file}`, which is outside its folder. {_REMEDY}")
    if not (index.parent / file).is_file():
        raise CheckpointError(f"`{index.parent / file}` is missing, but `{index.name}` names it. {_REMEDY}")
    return True


def _part(index: Path, file: Path, names: list[str], weights_only: bool) -> Opener:
    def entries() -> dict[str, Any]:
        tensors = _opener(file, weights_only)()
        missing = [name for name in names if name not in tensors]
        if missing:
            raise CheckpointError(
                f"`{index.name}` lists `{missing[0]}` in `{file}`, but that file does not hold it. {_REMEDY}"
            )
        return {name: tensors[name] for name in names}

    return entries


def _universal(folder: Path, weights_only: bool) -> dict[Path, Opener]:
    """Map the files of DeepSpeed's universal checkpoint to their openers.

    Each trained parameter has a folder; it is flattened after ZeRO-3. Other tensors are in a file next to the folders.
    """
    files = sorted(folder.rglob("fp32.pt"))
    names = {file.parent.relative_to(folder).as_posix() for file in files}

    def opener(file: Path) -> Opener:
        def entries() -> dict[str, Any]:
            loaded = _load(file, weights_only)
            return {file.parent.relative_to(folder).as_posix(): loaded["param"] if isinstance(loaded, dict) else loaded}

        return lambda: as_checkpoint_error(file, entries)

    def others(file: Path) -> dict[str, Any]:
        loaded = as_checkpoint_error(file, lambda: _open_torch(file, weights_only))
        is_here = {name: isinstance(v, torch.Tensor) and v.numel() and name not in names for name, v in loaded.items()}
        return {name: value for name, value in loaded.items() if is_here[name]}

    other_files = sorted(folder.parent.glob("*mp_rank_00_model_states.pt"))[:1]
    return {file: opener(file) for file in files} | {file: partial(others, file) for file in other_files}


def _open_safetensors(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def _open_torch(file: Path, weights_only: bool) -> dict[str, Any]:
    loaded = _load(file, weights_only)
    for key in _STATE_DICT_KEYS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"`{file}` holds a {type(loaded).__name__} instead of a state dict. Save `model.state_dict()`."
        )
    return {str(name): value for name, value in loaded.items()}


def _load(file: Path, weights_only: bool) -> Any:
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"`{file}` is not a complete torch file: it is truncated, in a format older than torch 1.6, or another "
            "kind of file. Copy it again; or load it with `torch.load` on a machine with enough "
            "memory, and save it again."
        )
    return torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)


def as_checkpoint_error(file: Path, action: Callable[[], T]) -> T:
    """Run an action, with errors converted to a `CheckpointError` that names the file."""
    try:
        return action()
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"`{file}` holds objects that are not plain data, and loading them may run code ({error}). If you trust "
            "the file, load it with `weights_only=False`."
        ) from error
    except Exception as error:  # errors of safetensors have no common base class
        raise CheckpointError(f"`{file}` cannot be read ({type(error).__name__}: {error}). {_REMEDY}") from error


_REMEDY = "The files are damaged or incomplete. Copy them again."


def _describe(name: str, value: Any, file: Path) -> SavedTensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        kind = type(value).__name__ if value.layout == torch.strided else str(value.layout)
        raise CheckpointError(
            f"`{name}` in `{file}` is not a plain tensor but a {kind} of {value.dtype}. Save full, plain tensors; for "
            "a sharded model, save `full_state_dict()` or a distributed checkpoint."
        )
    return SavedTensor(value.shape, value.dtype)


def _copy(full: torch.Tensor, target: torch.Tensor) -> None:
    """Copy this rank's part of a full tensor."""
    full = full.detach().view(target.shape)
    if isinstance(target, ShardedParameter):
        target.local.copy_(target.mics_slice.narrow(full, target.mics_index))
    else:
        target.copy_(full)
