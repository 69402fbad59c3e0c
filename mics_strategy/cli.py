"""The command ``mics``, and those of its subcommands that are small.

``mics --help`` lists them. They need neither ranks nor a GPU but for ``pretrain``, ``fidelity`` and ``calibrate``. What
a subcommand needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mics_strategy.errors import MiCSError, command_error
from mics_strategy.recipe_names import recipes_package
from mics_strategy.version import install_advice, package_version

_BAR = 30  # characters

_PROGRAMS = {  # of the recipes, which parse their options themselves
    "pretrain": "pretrain",
    "fidelity": "fidelity",
    "launch": "launch",
    "report": "report_page",
    "export-hf": "hf_export",
}
_PLANNER_PROGRAMS = {  # which parse their options themselves
    "plan": "plan_command",
    "simulate": "simulate_command",
}
_COMMANDS = {
    "plan": "choose the fastest sharding of a model on a cluster: [options]",
    "estimate": "show the memory that each rank of a job would need",
    "simulate": "play one step of a configuration on a cluster: [options]",
    "calibrate": "measure a cluster for the planner, on all ranks",
    "pretrain": "train a recipe: RECIPE [options], or --list [--json]",
    "data": "prepare RECIPE [--workers N] [options]: tokenize the text of a recipe",
    "launch": "print the file that starts a recipe on a cluster: KIND RECIPE",
    "report": "write the page of a recipe's run, or of two side by side: RUN_FOLDER [OTHER]",
    "export-hf": "write a run's model for transformers: RUN_FOLDER FOLDER [CHECKPOINT]",
    "fidelity": "compare training under each strategy with DDP: [options]",
    "config": "write the file for accelerate launch, after a few questions",
    "inspect": "show the contents of a checkpoint, and verify it",
    "export": "convert the model to safetensors files in Hugging Face's layout",
}


def parser(options_of: Iterable[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """Make the parser of the command's options.

    Args:
        options_of: Commands whose options are wanted; those of some import torch.
    """
    commands_parser = argparse.ArgumentParser(
        prog="mics",
        description="Plans, trains and exports sharded models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # or a long version is cut into two lines
    )
    versions = f"mics_strategy {package_version()}, torch {package_version('torch')}, Python {sys.version.split()[0]}"
    commands_parser.add_argument("--version", action="version", version=versions)
    commands = commands_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, add_help=name not in _PROGRAMS | _PLANNER_PROGRAMS)
        if name in options_of:
            _add_options(command, name)
    return commands_parser


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    if name in ("estimate", "calibrate"):
        _module_of(name).add_options(command)
    elif name == "config":
        command.add_argument("--output", type=Path, default=Path("mics.yaml"), help="the file; default: mics.yaml")
        command.add_argument("--defaults", action="store_true", help="use the defaults instead of asking")
        command.add_argument("--force", action="store_true", help="overwrite an existing file")
    elif name == "inspect":
        command.add_argument("path", type=Path, help="a checkpoint, or a folder with checkpoints")
        command.add_argument("--tensors", action="store_true", help="list every tensor")
    elif name == "export":
        dtypes = ("bfloat16", "float16", "float32")
        command.add_argument("path", type=Path, help="a checkpoint")
        command.add_argument("folder", type=Path, help="folder of the new files")
        prefix_help = "prefix of the names to export, which is removed ('model.' for LightningModule.model)"
        command.add_argument("--prefix", default="", help=prefix_help)
        command.add_argument("--dtype", choices=dtypes, help="dtype of floating-point tensors; default: unchanged")
        config_help = "a config.json to copy, or a folder with it and the tokenizer"
        command.add_argument("--config", type=Path, help=config_help)
        command.add_argument("--file-gb", type=float, default=5.0, help="largest size of a file (1 GB = 1e9 bytes)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 on success, that of SIGPIPE if its reader has gone (`mics plan | head`).

    Source:
        "Note on SIGPIPE" in Python's documentation of `signal`.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not output.poll(0):  # another pipe is broken: that of a process
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run_given(given)
    except (MiCSError, OSError) as error:
        print(command_error(given[0], error), file=sys.stderr)
        return 1


def _run_given(given: list[str]) -> int:
    if given and given[0] in _PROGRAMS:
        return _run_recipes(_PROGRAMS[given[0]], given[1:], given[0])
    if given and given[0] in _PLANNER_PROGRAMS:
        return _run_planner(_PLANNER_PROGRAMS[given[0]], given[1:])
    if given[:1] == ["data"]:
        return _prepare_data(given[1:])
    options = parser(given[:1]).parse_args(given)
    here = {"inspect": _inspect, "export": _export, "config": _configure}
    code: int = (here.get(options.command) or _module_of(options.command).run)(options)
    return code


def _module_of(command: str) -> Any:
    return importlib.import_module(f"mics_strategy.{command}_cli")


def _export(options: argparse.Namespace) -> int:
    import torch

    from mics_strategy.checkpoint.export import Export, export_safetensors

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    file_bytes = int(options.file_gb * 1e9)
    names = {"folder": options.folder, "prefix": options.prefix, "config": options.config}
    for file in export_safetensors(options.path, Export(**names, dtype=dtype, file_bytes=file_bytes), _show):
        print(file)
    return 0


def _prepare_data(arguments: Sequence[str]) -> int:
    """Run the recipes' preparation of data, which parses its options itself."""
    if arguments[:1] != ["prepare"]:
        print("usage: mics data prepare RECIPE [--workers N] [options of the recipe]", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    return _run_recipes("data.command", arguments[1:], "data prepare")


def _run_recipes(module: str, arguments: Sequence[str], command: str) -> int:
    """Run a program of the recipes with its own options; return its exit code."""
    try:
        program: Any = importlib.import_module(f"{recipes_package()}.{module}")
    except ModuleNotFoundError as error:
        print(
            f"mics {command}: the recipes need `{error.name}`, which is not installed. {install_advice('recipes')}",
            file=sys.stderr,
        )
        return 1
    return program.main(arguments) or 0


def _run_planner(module: str, arguments: Sequence[str]) -> int:
    """Run a program of the planner; return its exit code.

    Models of the user are found in the present folder, as by `python -m`.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    program: Any = importlib.import_module(f"mics_strategy.planner.{module}")
    code: int = program.main(arguments)
    return code


def _inspect(options: argparse.Namespace) -> int:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from mics_strategy.checkpoint import atomic
    from mics_strategy.checkpoint.safe_reader import SafeReader

    path = options.path
    if not atomic.is_checkpoint(path) and (checkpoints := atomic.newest_first(path)):
        for checkpoint in checkpoints:
            print(f"{checkpoint.name}: {_summary(checkpoint)}")
        return 0
    print(_summary(path))
    metadata = SafeReader(path).read_metadata()
    tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    for part in sorted({name.partition(".")[0] for name in tensors}):
        entries = [saved for name, saved in tensors.items() if name.startswith(f"{part}.")]
        numel = sum(saved.size.numel() for saved in entries)
        num_bytes = sum(saved.size.numel() * saved.properties.dtype.itemsize for saved in entries)
        print(f"{part}: {len(entries)} tensors, {numel:,} elements, {num_bytes:,} B")
    for name, saved in sorted(tensors.items()) if options.tensors else ():
        print(f"  {name} {list(saved.size)} {str(saved.properties.dtype).removeprefix('torch.')}")
    manifest = atomic.read_manifest(path)
    for number, name in enumerate(sorted(manifest.files), 1):
        atomic.check_files(path, manifest, [name])
        _show(number, len(manifest.files))
    print(f"{len(manifest.files)} files are intact")
    return 0


def _configure(options: argparse.Namespace) -> int:
    from mics_strategy.launch_file import default_answers, launch_line, prompt, write_launch_file

    path, answers = options.output, default_answers() if options.defaults else prompt(input, print)
    write_launch_file(path, answers, overwrites=options.force)
    print(f"{path} is written. Start the training on every machine with\n  {launch_line(path, answers)}")
    print(f"train.py needs no change. To try two processes, run `accelerate test --config_file {path}`.")
    return 0


def _summary(path: Path) -> str:
    from mics_strategy.checkpoint import atomic

    manifest = atomic.read_manifest(path)
    scopes = ", ".join(f"{name} over {ranks}" for name, ranks in manifest.scopes.items())
    pending = f" and {manifest.pending_micro_steps} unfinished micro-steps" if manifest.pending_micro_steps else ""
    return (
        f"step {manifest.step}{pending}, written by {manifest.world_size} ranks ({scopes}) with mics_strategy "
        f"{manifest.package_version}, torch {manifest.torch_version}"
    )


def _show(done: int, total: int) -> None:
    """Draw a progress bar if stderr is a terminal."""
    if sys.stderr.isatty():
        filled = _BAR * done // max(1, total)
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {100 * done // max(1, total)} %", end=end, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
