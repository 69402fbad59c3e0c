"""How does a sharded checkpoint become ordinary files?

Tensor by tensor, in one process without ranks or a GPU: memory holds the largest tensor and one saved piece of it. The
files are safetensors as Hugging Face lays them out, so `from_pretrained` reads them.
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

Progress = Callable[[int, int], None]  # bytes done, bytes in all
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
_SETTINGS = (".json", ".txt", ".model", ".jinja")  # of a model and its tokenizer
_DTYPES = {  # names of the format
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
        name: In the checkpoint.
        exported_name: In the files.
        shape: Of the whole.
        dtype: In the files.
    """

    name: str
    exported_name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What to make of a checkpoint.

    Attributes:
        folder: Of the new files; made, and must hold nothing.
        prefix: Of the names to export, which is cut off: ``"model."`` where a LightningModule holds the model so.
        dtype: Of floating tensors; None keeps each one's own.
        file_bytes: The most that one file holds, unless a tensor alone is larger.
        config: A file that becomes ``config.json`` beside the weights, or a folder with one, whose tokenizer and other
            settings are copied, too; None copies nothing.
    """

    folder: Path
    prefix: str = ""
    dtype: torch.dtype | None = None
    file_bytes: int = 5 * 10**9
    config: Path | None = None

    def config_files(self) -> dict[str, Path]:
        """What is copied into the folder, by new names.

        Raises:
            CheckpointError: There is no such configuration.
        """
        if self.config is None:
            return {}
        if self.config.is_file():
            return {CONFIG: self.config}
        if not (self.config / CONFIG).is_file():
            raise CheckpointError(
                f"`{self.config}` is neither a file nor a folder with `{CONFIG}`. Name the folder of the model that "
                "was trained, or write one with `model.config.save_pretrained(folder)`."
            )
        found = (file for file in self.config.iterdir() if file.is_file() and file.suffix in _SETTINGS)
        return {file.name: file for file in sorted(found) if not file.name.endswith(".index.json")}


def exported_tensors(metadata: Metadata, export: Export) -> list[ExportedTensor]:
    """The tensors of the model that an export takes, in the order of their names.

    Raises:
        CheckpointError: None, or one of a dtype that the format does not know.
    """
    start = f"{MODEL}.{export.prefix}"
    found = []
    for name, saved in sorted(metadata.state_dict_metadata.items()):
        if not name.startswith(start) or not isinstance(saved, TensorStorageMetadata):
            continue
        own = saved.properties.dtype
        dtype = export.dtype if export.dtype is not None and own.is_floating_point else own
        if dtype not in _DTYPES:
            raise CheckpointError(f"`{name}` is {dtype}, which safetensors files cannot hold. Give another dtype.")
        found.append(ExportedTensor(name=name, exported_name=name.removeprefix(start), shape=saved.size, dtype=dtype))
    if not found:
        names = ", ".join(sorted(name.removeprefix(f"{MODEL}.") for name in metadata.state_dict_metadata)[:3])
        raise CheckpointError(f"No tensor of the model begins with `{export.prefix}`. There are {names}, ...")
    return found


def files_of(tensors: Sequence[ExportedTensor], file_bytes: int) -> list[list[ExportedTensor]]:
    """Which tensors go into which file: in order, as many as fit."""
    files: list[list[ExportedTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(each.num_bytes for each in files[-1]) + tensor.num_bytes > file_bytes:
            files.append([])
        files[-1].append(tensor)
    return files


def export_safetensors(path: Path, export: Export, progress: Progress = lambda done, total: None) -> list[Path]:
    """Write the model of a checkpoint as safetensors, with an index where they are several.

    Args:
        path: The checkpoint.
        export: What to make of it.
        progress: Is told how far it is.

    Returns:
        The files that hold tensors.

    Raises:
        CheckpointError: The checkpoint is damaged, the folder is not empty, or there is no such configuration.

    Cost:
        Memory: the largest tensor, and one saved piece.
    """
    if atomic.is_checkpoint(path):
        manifest = atomic.read_manifest(path)
        atomic.check_files(path, manifest, sorted(manifest.files), digests=False)
    metadata = SafeReader(path).read_metadata()
    files = files_of(exported_tensors(metadata, export), export.file_bytes)
    total, done = sum(tensor.num_bytes for of_file in files for tensor in of_file), 0
    companions = export.config_files()
    if export.folder.exists() and any(export.folder.iterdir()):
        raise CheckpointError(f"`{export.folder}` is not empty. Give a new folder.")
    export.folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, of_file in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        draft, file = export.folder / f".{name}.draft", export.folder / name
        with draft.open("wb") as out:
            out.write(_header(of_file))
            for tensor in of_file:
                whole = _whole(path, metadata, tensor)
                for chunk in _chunks(whole):
                    done += out.write(chunk)
                progress(done, total)
        atomic.sync(draft)
        draft.rename(file)
        written.append(file)
    if len(files) > 1:
        names = {tensor.exported_name: file.name for file, of in zip(written, files, strict=True) for tensor in of}
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (export.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    for name, file in companions.items():
        shutil.copyfile(file, export.folder / name)
    return written


def _whole(path: Path, metadata: Metadata, tensor: ExportedTensor) -> torch.Tensor:
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    read(path, metadata, {MODEL: {tensor.name.removeprefix(f"{MODEL}."): room}}, weights_only=True)
    return room


def _chunks(tensor: torch.Tensor, chunk_bytes: int = 1 << 26) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """The bytes of a contiguous tensor, where they are."""
    num_bytes = tensor.numel() * tensor.itemsize
    for start in range(0, num_bytes, chunk_bytes):
        yield (ctypes.c_char * min(chunk_bytes, num_bytes - start)).from_address(tensor.data_ptr() + start)


def _header(tensors: Sequence[ExportedTensor]) -> bytes:
    """What stands before the tensors in a safetensors file: its length, then where each tensor is, as JSON."""
    places: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset + tensor.num_bytes]
        places[tensor.exported_name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": ends}
        offset += tensor.num_bytes
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
