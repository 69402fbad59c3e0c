"""In which files do weights from elsewhere come, and how is one tensor of them read without the others?

Files of whole tensors are mapped into memory: a tensor is a view of its file, and only what is copied out of it is read
from the disk. What was read stays mapped until the file is closed, so files are opened anew every few tensors. Folders
of torch's distributed checkpoints have a reader of their own. Nothing here runs what somebody may have put into a file,
unless it is asked to.
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
from mics_strategy.checkpoint.safe_reader import SafeReader, read
from mics_strategy.checkpoint.state import MODEL
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

MAPPED_BYTES = 1 << 25  # of tensors that were read from a file before it is closed and opened anew
SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
_INSIDE = ("state_dict", "model", "model_state_dict", "module")  # where a torch file with other things has the weights
_UNIVERSAL, _LATEST_UNIVERSAL = "zero", "latest_universal"  # DeepSpeed's
_SHOWN = 5  # entries of a folder, in an error
Opener = Callable[[], dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What is known of a tensor before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class Source(Protocol):
    """Weights in files.

    Attributes:
        saved: By the names in the files; None for what is no tensor.
        may_be_flat: Whether tensors have lost their shapes.
    """

    saved: dict[str, SavedTensor | None]
    may_be_flat: bool

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into parameters and buffers, of which this rank may hold a part; in their dtypes."""

    def value(self, name: str) -> Any:
        """One entry as it was saved, in memory of its own."""


class MappedFiles:
    """Files of whole tensors.

    Args:
        openers: By file; each gives the entries by names, tensors as views of the file.
        may_be_flat: Whether tensors have lost their shapes.

    Raises:
        CheckpointError: A file that cannot be read, naming it; or a tensor of a kind that cannot be cut.
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
            Memory: pages of `MAPPED_BYTES` of tensors, or of the largest one; the system may take them back.
        """
        names_of: dict[Path, list[str]] = {}
        for name in targets:
            names_of.setdefault(self._file_of[name], []).append(name)
        for file, names in names_of.items():
            opener, num_bytes = self._openers[file], 0
            opened = opener()
            for name in names:
                if num_bytes > MAPPED_BYTES:
                    opened, num_bytes = {}, 0  # unmapped before it is mapped again
                    opened = opener()
                num_bytes += opened[name].numel() * opened[name].element_size()
                _copy(opened[name], targets[name])

    def value(self, name: str) -> Any:
        """One entry as it was saved."""
        value = self._openers[self._file_of[name]]()[name]
        return value.clone() if isinstance(value, torch.Tensor) else value


class DistributedFolder:
    """A folder that torch's distributed checkpoints have written, ours among them. States of optimizers are left out.

    Args:
        path: The folder.
        weights_only: As `torch.load` has it.

    Raises:
        CheckpointError: It cannot be read, or a file of it is missing or too short.
    """

    may_be_flat = False

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        self._path = path
        self._weights_only = weights_only
        self._metadata = SafeReader(path).read_metadata()
        ours = atomic.is_checkpoint(path)
        self.saved: dict[str, SavedTensor | None] = {
            name: SavedTensor(each.size, each.properties.dtype) if isinstance(each, TensorStorageMetadata) else None
            for name, each in self._metadata.state_dict_metadata.items()
            if (name.startswith(f"{MODEL}.") if ours else not name.startswith("optim"))
        }
        self._check_files()

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for piece in (self._metadata.storage_data or {}).values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        for name, end in ends.items():
            file = self._path / name
            if not file.is_file():
                raise CheckpointError(f"`{file}` is missing. {_REMEDY}")
            if file.stat().st_size < end:
                raise CheckpointError(f"`{file}` has {file.stat().st_size} bytes and should have {end}. {_REMEDY}")

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into parameters and buffers.

        Cost:
            Memory: about four copies of the largest saved piece, as torch reads it.
        """
        values = {name: target.detach() for name, target in targets.items()}
        read(self._path, self._metadata, values, weights_only=self._weights_only)

    def value(self, name: str) -> Any:
        """One entry as it was saved."""
        saved = self.saved[name]
        values: dict[str, Any] = {name: None if saved is None else torch.empty(saved.shape, dtype=saved.dtype)}
        read(self._path, self._metadata, values, weights_only=self._weights_only)
        return values[name]


def open_source(path: Path, *, weights_only: bool) -> Source:
    """Find out what a path holds, and look at it.

    Args:
        path: A file or a folder.
        weights_only: As `torch.load` has it.

    Raises:
        CheckpointError: It holds no weights that are known here, or they cannot be read.
    """
    if path.is_file():
        return MappedFiles(
            _indexed(path, weights_only) if path.suffix == ".json" else {path: _opener(path, weights_only)}
        )
    if not path.is_dir():
        raise CheckpointError(
            f"`{path}` does not exist. Name a file or a folder on this machine; download a model of a hub first."
        )
    if atomic.is_checkpoint(path) or (path / ".metadata").is_file():
        return DistributedFolder(path, weights_only=weights_only)
    for name in (SAFETENSORS, TORCH):
        if (path / f"{name}.index.json").is_file():
            return MappedFiles(_indexed(path / f"{name}.index.json", weights_only))
        if (path / name).is_file():
            return MappedFiles({path / name: _opener(path / name, weights_only)})
    if (path / _LATEST_UNIVERSAL).is_file():
        path = path / (path / _LATEST_UNIVERSAL).read_text().strip()
    if (path / _UNIVERSAL).is_dir():
        return MappedFiles(_universal(path / _UNIVERSAL, weights_only), may_be_flat=True)
    raise _unknown(path)


def _unknown(path: Path) -> CheckpointError:
    names = sorted(entry.name for entry in path.iterdir())
    if any(path.glob("*_optim_states.pt")) or any(path.glob("*/*_optim_states.pt")):
        return CheckpointError(
            f"`{path}` holds the parts of a DeepSpeed checkpoint, each for a rank of DeepSpeed's. Put them together "
            "with the `zero_to_fp32.py` that DeepSpeed has written there (`--safe_serialization` is the quickest to "
            "load), or with `ds_to_universal.py`, and name what it has made."
        )
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return CheckpointError(
        f"`{path}` holds no weights that are known here: it has {', '.join(names[:_SHOWN]) or 'nothing'}{more}. Name a "
        f"`.safetensors` or a torch file, or a folder with `{SAFETENSORS}` or `{TORCH}` (or their index), `.metadata` "
        f"or `{_UNIVERSAL}/`."
    )


def _opener(file: Path, weights_only: bool) -> Opener:
    if file.suffix == ".safetensors":
        return lambda: as_checkpoint_error(file, lambda: _open_safetensors(file))
    return lambda: as_checkpoint_error(file, lambda: _open_torch(file, weights_only))


def _indexed(index: Path, weights_only: bool) -> dict[Path, Opener]:
    """The files that an index of Hugging Face names."""

    def names_by_file() -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name, file in json.loads(index.read_text())["weight_map"].items():
            by_file.setdefault(file, []).append(name)
        return by_file

    return {
        index.parent / file: _part(index, index.parent / file, names, weights_only)
        for file, names in as_checkpoint_error(index, names_by_file).items()
        if _is_beside(index, file)
    }


def _is_beside(index: Path, file: str) -> bool:
    if Path(file).name != file:
        raise CheckpointError(f"`{index}` names `{file}`, which is not in its folder. {_REMEDY}")
    if not (index.parent / file).is_file():
        raise CheckpointError(f"`{index.parent / file}` is missing, and `{index.name}` names it. {_REMEDY}")
    return True


def _part(index: Path, file: Path, names: list[str], weights_only: bool) -> Opener:
    def entries() -> dict[str, Any]:
        found = _opener(file, weights_only)()
        lacking = [name for name in names if name not in found]
        if lacking:
            raise CheckpointError(f"`{file}` does not hold `{lacking[0]}`, as `{index.name}` says. {_REMEDY}")
        return {name: found[name] for name in names}

    return entries


def _universal(folder: Path, weights_only: bool) -> dict[Path, Opener]:
    """DeepSpeed's: a folder for each trained parameter, flat after ZeRO-3; others stand in a file beside them."""
    files = sorted(folder.rglob("fp32.pt"))
    names = {file.parent.relative_to(folder).as_posix() for file in files}

    def opener(file: Path) -> Opener:
        def entries() -> dict[str, Any]:
            found = _load(file, weights_only)
            return {file.parent.relative_to(folder).as_posix(): found["param"] if isinstance(found, dict) else found}

        return lambda: as_checkpoint_error(file, entries)

    def others(file: Path) -> dict[str, Any]:
        found = as_checkpoint_error(file, lambda: _open_torch(file, weights_only))
        is_here = {name: isinstance(v, torch.Tensor) and v.numel() and name not in names for name, v in found.items()}
        return {name: value for name, value in found.items() if is_here[name]}

    beside = sorted(folder.parent.glob("*mp_rank_00_model_states.pt"))[:1]
    return {file: opener(file) for file in files} | {file: partial(others, file) for file in beside}


def _open_safetensors(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def _open_torch(file: Path, weights_only: bool) -> dict[str, Any]:
    found = _load(file, weights_only)
    for key in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping):
        raise CheckpointError(f"`{file}` holds a {type(found).__name__} and no state dict. Save `model.state_dict()`.")
    return {str(name): value for name, value in found.items()}


def _load(file: Path, weights_only: bool) -> Any:
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"`{file}` is no whole torch file: it is truncated, of a format before torch 1.6, or of another kind. Copy "
            "it again, or load it with `torch.load` where you have the memory and save it anew."
        )
    return torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)


def as_checkpoint_error(file: Path, action: Callable[[], T]) -> T:
    """With errors of reading as a `CheckpointError` that names the file."""
    try:
        return action()
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"`{file}` holds objects that are not plain data, and reading them may run code ({error}). If you trust "
            "the file, load it with `weights_only=False`."
        ) from error
    except Exception as error:  # of safetensors, which have no common base
        raise CheckpointError(f"`{file}` cannot be read ({type(error).__name__}: {error}). {_REMEDY}") from error


_REMEDY = "The files are damaged or not all there; copy them again."


def _describe(name: str, value: Any, file: Path) -> SavedTensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        kind = type(value).__name__ if value.layout == torch.strided else str(value.layout)
        raise CheckpointError(
            f"`{name}` in `{file}` is no plain tensor but a {kind} of {value.dtype}. Save whole, plain tensors; of a "
            "sharded model, `full_state_dict()` or a distributed checkpoint."
        )
    return SavedTensor(value.shape, value.dtype)


def _copy(whole: torch.Tensor, target: torch.Tensor) -> None:
    """This rank's part, or all of it."""
    whole = whole.detach().view(target.shape)
    if isinstance(target, ShardedParameter):
        target.local.copy_(target.mics_slice.narrow(whole, target.mics_index))
    else:
        target.copy_(whole)
