"""Export of sharded checkpoints to safetensors files.

It runs in one process without ranks or a GPU, one tensor at a time: memory holds the largest tensor and one saved item
of it. The files have Hugging Face's layout, so `from_pretrained` reads them.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.safe_reader import SafeReader, read
from mics_strategy.checkpoint.state import MODEL
from mics_strategy.errors import CheckpointError

Progress = Callable[[int, int], None]  # bytes done, bytes in total
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
_SETTINGS = (".json", ".txt", ".model", ".jinja")  # settings of a model and its tokenizer
_DTYPES = {  # names in the format
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """One tensor of a checkpoint's model.

    Attributes:
        name: Name in the checkpoint.
        exported_name: Name in the exported files.
        shape: Shape of the full tensor.
        dtype: Dtype in the exported files.
    """

    name: str
    exported_name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the exported files, in bytes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Options of an export.

    Attributes:
        folder: Folder of the new files. It is created, and must be empty.
        prefix: Prefix of the names to export, which is removed: ``"model."`` for a model inside a LightningModule.
        dtype: Dtype of floating-point tensors; None keeps each tensor's dtype.
        file_bytes: Largest size of a file in bytes, unless a single tensor is larger.
        config: File that becomes ``config.json``, or a folder that holds one; the tokenizer and other settings of a
            folder are also copied. None copies nothing.
    """

    folder: Path
    prefix: str = ""
    dtype: torch.dtype | None = None
    file_bytes: int = 5 * 10**9
    config: Path | None = None

    def config_files(self) -> dict[str, Path]:
        """Map the names of the files to copy to their sources.

        Raises:
            CheckpointError: The configuration does not exist.
        """
        if self.config is None:
            return {}
        if self.config.is_file():
            return {CONFIG: self.config}
        if not (self.config / CONFIG).is_file():
            raise CheckpointError(
                f"`{self.config}` is neither a file nor a folder with `{CONFIG}`. Pass the folder of the model that "
                "was trained, or write one with `model.config.save_pretrained(folder)`."
            )
        files = (file for file in self.config.iterdir() if file.is_file() and file.suffix in _SETTINGS)
        return {file.name: file for file in sorted(files) if not file.name.endswith(".index.json")}


def exported_tensors(metadata: Metadata, export: Export) -> list[ExportedTensor]:
    """List the tensors of the model to export, in the order of their names.

    Raises:
        CheckpointError: There are none, or the format does not support a dtype.
    """
    start = f"{MODEL}.{export.prefix}"
    tensors = []
    for name, saved in sorted(metadata.state_dict_metadata.items()):
        if not name.startswith(start) or not isinstance(saved, TensorStorageMetadata):
            continue
        saved_dtype = saved.properties.dtype
        dtype = export.dtype if export.dtype is not None and saved_dtype.is_floating_point else saved_dtype
        if dtype not in _DTYPES:
            raise CheckpointError(f"`{name}` is {dtype}, which safetensors files do not support. Choose another dtype.")
        tensors.append(ExportedTensor(name=name, exported_name=name.removeprefix(start), shape=saved.size, dtype=dtype))
    if not tensors:
        names = ", ".join(sorted(name.removeprefix(f"{MODEL}.") for name in metadata.state_dict_metadata)[:3])
        raise CheckpointError(
            f"No tensor of the model begins with `{export.prefix}`. The checkpoint has {names}, ... Choose "
            "another prefix."
        )
    return tensors


def files_of(tensors: Sequence[ExportedTensor], file_bytes: int) -> list[list[ExportedTensor]]:
    """Distribute tensors over files: in order, as many as fit."""
    files: list[list[ExportedTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(member.num_bytes for member in files[-1]) + tensor.num_bytes > file_bytes:
            files.append([])
        files[-1].append(tensor)
    return files


def export_safetensors(path: Path, export: Export, progress: Progress = lambda done, total: None) -> list[Path]:
    """Write the model of a checkpoint as safetensors files.

    An index is written if there are several files.

    Args:
        path: Folder of the checkpoint.
        export: Options.
        progress: Function that is called with the bytes done and in total.

    Returns:
        The files that hold tensors.

    Raises:
        CheckpointError: The checkpoint is damaged, the folder is not empty, or the configuration does not exist.

    Cost:
        Memory: the largest tensor and one saved item.
    """
    if atomic.is_checkpoint(path):
        manifest = atomic.read_manifest(path)
        atomic.check_files(path, manifest, sorted(manifest.files), digests=False)
    metadata = SafeReader(path).read_metadata()
    files = files_of(exported_tensors(metadata, export), export.file_bytes)
    total, done = sum(tensor.num_bytes for members in files for tensor in members), 0
    config_files = export.config_files()
    if export.folder.exists() and any(export.folder.iterdir()):
        raise CheckpointError(f"`{export.folder}` is not empty. Choose a new folder.")
    export.folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, members in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        draft, file = export.folder / f".{name}.draft", export.folder / name
        with draft.open("wb") as out:
            out.write(_header(members))
            for tensor in members:
                full = _read_full(path, metadata, tensor)
                for chunk in _chunks(full):
                    done += out.write(chunk)
                progress(done, total)
        atomic.sync(draft)
        draft.rename(file)
        written.append(file)
    if len(files) > 1:
        names = {
            tensor.exported_name: file.name for file, members in zip(written, files, strict=True) for tensor in members
        }
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (export.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for name, file in config_files.items():
        shutil.copyfile(file, export.folder / name)
    return written


def _read_full(path: Path, metadata: Metadata, tensor: ExportedTensor) -> torch.Tensor:
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    read(SafeReader(path), metadata, {MODEL: {tensor.name.removeprefix(f"{MODEL}."): full}}, weights_only=True)
    return full


def _chunks(tensor: torch.Tensor, chunk_bytes: int = 1 << 26) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """Yield the bytes of a contiguous tensor in chunks, without a copy."""
    num_bytes = tensor.numel() * tensor.itemsize
    for start in range(0, num_bytes, chunk_bytes):
        yield (ctypes.c_char * min(chunk_bytes, num_bytes - start)).from_address(tensor.data_ptr() + start)


def _header(tensors: Sequence[ExportedTensor]) -> bytes:
    """Return the header of a safetensors file: its length, then offsets as JSON."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.num_bytes]
        entries[tensor.exported_name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": offsets,
        }
        offset += tensor.num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
