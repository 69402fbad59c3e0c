"""What can be done from a shell?

``mics inspect PATH`` says what a checkpoint holds and whether it is whole; ``mics export PATH FOLDER`` makes
safetensors files of it; ``mics config`` writes what ``accelerate launch`` reads; ``mics estimate MODEL`` says how much
memory each rank of a job would need. None needs ranks or a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.export import Export, export_safetensors
from mics_strategy.checkpoint.safe_reader import SafeReader
from mics_strategy.errors import MiCSError
from mics_strategy.launch_file import default_answers, launch_line, prompt, write_launch_file
from mics_strategy.memory_report import report

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BAR = 30  # characters


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(prog="mics", description="Looks at checkpoints of mics_strategy, and starts jobs.")
    commands = made.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds, and whether it is whole")
    inspect.add_argument("path", type=Path, help="a checkpoint, or a folder that holds some")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    export = commands.add_parser("export", help="make safetensors files of the model, as Hugging Face lays them out")
    export.add_argument("path", type=Path, help="a checkpoint")
    export.add_argument("folder", type=Path, help="of the new files")
    export.add_argument(
        "--prefix", default="", help="of the names to take, cut off ('model.' for LightningModule.model)"
    )
    export.add_argument(
        "--dtype", choices=sorted(_DTYPES), default=None, help="of floating tensors; default: their own"
    )
    export.add_argument(
        "--config", type=Path, default=None, help="a config.json to copy, or a folder with it and the tokenizer"
    )
    export.add_argument("--file-gb", type=float, default=5.0, help="the most that one file holds (1 GB = 1e9 bytes)")
    config = commands.add_parser("config", help="write the file that accelerate launch reads, after a few questions")
    config.add_argument("--output", type=Path, default=Path("mics.yaml"), help="of the file; default: mics.yaml")
    config.add_argument("--defaults", action="store_true", help="ask nothing")
    config.add_argument("--force", action="store_true", help="write over a file that is there")
    estimate = commands.add_parser("estimate", help="say how much memory each rank of a job would need")
    estimate.add_argument("model", help="a folder with config.json, or a name, as transformers takes it")
    estimate.add_argument("--nodes", type=int, default=1, help="machines; default: 1")
    estimate.add_argument("--ranks-per-node", type=int, required=True, help="GPUs of each")
    estimate.add_argument("--preset", default="mics", help="mics, zero3, paro-iig, ...; default: mics")
    estimate.add_argument("--partition-size", type=_size, default=None, help="ranks of a partition; default: a node")
    estimate.add_argument("--param-dtype", choices=sorted(_DTYPES), default=None, help="in which is computed")
    estimate.add_argument("--units", default=None, help="classes of layers, with commas; default: they are found")
    estimate.add_argument(
        "--state-bytes", type=int, default=8, help="that the optimizer keeps for each number; default: Adam's 8"
    )
    return made


def _size(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it has done what was asked."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "inspect":
            return _inspect(options.path, is_long=options.tensors)
        if options.command == "config":
            return _configure(options.output, asks=not options.defaults, overwrites=options.force)
        if options.command == "estimate":
            print("\n".join(report(options)))
            return 0
        dtype = None if options.dtype is None else _DTYPES[options.dtype]
        file_bytes = int(options.file_gb * 1e9)
        names = {"folder": options.folder, "prefix": options.prefix, "config": options.config}
        for file in export_safetensors(options.path, Export(**names, dtype=dtype, file_bytes=file_bytes), _show):
            print(file)
    except MiCSError as error:
        print(f"mics {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _inspect(path: Path, *, is_long: bool) -> int:
    if not atomic.is_checkpoint(path) and (found := atomic.newest_first(path)):
        for each in found:
            print(f"{each.name}: {_summary(each)}")
        return 0
    print(_summary(path))
    metadata = SafeReader(path).read_metadata()
    tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    for part in sorted({name.partition(".")[0] for name in tensors}):
        own = [saved for name, saved in tensors.items() if name.startswith(f"{part}.")]
        numel = sum(saved.size.numel() for saved in own)
        num_bytes = sum(saved.size.numel() * saved.properties.dtype.itemsize for saved in own)
        print(f"{part}: {len(own)} tensors, {numel:,} elements, {num_bytes:,} B")
    for name, saved in sorted(tensors.items()) if is_long else ():
        print(f"  {name} {list(saved.size)} {str(saved.properties.dtype).removeprefix('torch.')}")
    manifest = atomic.read_manifest(path)
    for number, name in enumerate(sorted(manifest.files), 1):
        atomic.check_files(path, manifest, [name])
        _show(number, len(manifest.files))
    print(f"{len(manifest.files)} files are as they were written")
    return 0


def _configure(path: Path, *, asks: bool, overwrites: bool) -> int:
    answers = prompt(input, print) if asks else default_answers()
    write_launch_file(path, answers, overwrites=overwrites)
    print(f"{path} is written. Start the training, on every machine, by\n  {launch_line(path, answers)}")
    print(f"train.py needs no change. To try two processes: `accelerate test --config_file {path}`.")
    return 0


def _summary(path: Path) -> str:
    manifest = atomic.read_manifest(path)
    scopes = ", ".join(f"{name} over {ranks}" for name, ranks in manifest.scopes.items())
    pending = f" and {manifest.pending_micro_steps} unfinished micro-steps" if manifest.pending_micro_steps else ""
    return (
        f"step {manifest.step}{pending}, written by {manifest.world_size} ranks ({scopes}) with mics_strategy "
        f"{manifest.package_version}, torch {manifest.torch_version}"
    )


def _show(done: int, total: int) -> None:
    """A bar, where somebody is looking."""
    if sys.stderr.isatty():
        filled = _BAR * done // max(1, total)
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {100 * done // max(1, total)} %", end=end, file=sys.stderr)
