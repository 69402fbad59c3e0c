"""The command ``mics``.

``mics inspect PATH`` shows the contents of a checkpoint and verifies it. ``mics export PATH FOLDER`` converts its model
to safetensors files. ``mics config`` writes the configuration of ``accelerate launch``. ``mics estimate MODEL`` shows
the memory that each rank of a job would need. ``mics calibrate`` measures a cluster for the planner; a launcher starts
it on all ranks. ``mics data prepare RECIPE`` tokenizes the text of one of the project's
recipes. These need neither ranks nor a GPU. ``mics pretrain RECIPE`` trains a recipe. ``mics fidelity`` compares
training under each strategy with DDP. ``mics launch KIND RECIPE`` prints the file that starts a recipe on a cluster.
``mics report RUN_FOLDER`` writes the page of a run, ``mics export-hf RUN_FOLDER FOLDER`` its model for transformers.
``mics plan`` chooses the fastest sharding of a model on a cluster without a GPU, ``mics simulate`` plays a step of it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mics_strategy import calibrate_cli, estimate_cli
from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.export import Export, export_safetensors
from mics_strategy.checkpoint.safe_reader import SafeReader
from mics_strategy.errors import MiCSError
from mics_strategy.launch_file import default_answers, launch_line, prompt, write_launch_file

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    commands_parser = argparse.ArgumentParser(prog="mics", description="Inspects checkpoints and prepares jobs.")
    commands = commands_parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show the contents of a checkpoint, and verify it")
    inspect.add_argument("path", type=Path, help="a checkpoint, or a folder with checkpoints")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    export = commands.add_parser("export", help="convert the model to safetensors files in Hugging Face's layout")
    export.add_argument("path", type=Path, help="a checkpoint")
    export.add_argument("folder", type=Path, help="folder of the new files")
    export.add_argument(
        "--prefix",
        default="",
        help="prefix of the names to export, which is removed ('model.' for LightningModule.model)",
    )
    export.add_argument(
        "--dtype",
        choices=sorted(_DTYPES),
        default=None,
        help="dtype of floating-point tensors; default: unchanged",
    )
    export.add_argument(
        "--config", type=Path, default=None, help="a config.json to copy, or a folder with it and the tokenizer"
    )
    export.add_argument("--file-gb", type=float, default=5.0, help="largest size of a file (1 GB = 1e9 bytes)")
    config = commands.add_parser("config", help="write the file for accelerate launch, after a few questions")
    config.add_argument("--output", type=Path, default=Path("mics.yaml"), help="path of the file; default: mics.yaml")
    config.add_argument("--defaults", action="store_true", help="use the defaults instead of asking")
    config.add_argument("--force", action="store_true", help="overwrite an existing file")
    estimate = commands.add_parser("estimate", help="show the memory that each rank of a job would need")
    estimate_cli.add_options(estimate)
    calibrate_cli.add_options(commands.add_parser("calibrate", help="measure a cluster for the planner, on all ranks"))
    commands.add_parser("pretrain", help="train a recipe: RECIPE [options], or --list [--json]", add_help=False)
    commands.add_parser("fidelity", help="compare training under each strategy with DDP: [options]", add_help=False)
    commands.add_parser("launch", help="print the file that starts a recipe on a cluster: KIND RECIPE", add_help=False)
    commands.add_parser("plan", help="choose the fastest sharding of a model on a cluster: [options]", add_help=False)
    commands.add_parser("simulate", help="play one step of a configuration on a cluster: [options]", add_help=False)
    commands.add_parser("report", help="write the page of a recipe's run: RUN_FOLDER", add_help=False)
    commands.add_parser(
        "export-hf", help="write a run's model for transformers: RUN_FOLDER FOLDER [CHECKPOINT]", add_help=False
    )
    commands.add_parser("data", help="prepare RECIPE [--workers N] [options]: tokenize the text of a recipe")
    return commands_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, 0 on success."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in _PROGRAMS:
        return _run_recipes(_PROGRAMS[given[0]], given[1:], given[0])
    if given and given[0] in _PLANNER_PROGRAMS:
        return _run_planner(_PLANNER_PROGRAMS[given[0]], given[1:])
    if given[:1] == ["data"]:
        return _prepare_data(given[1:])
    options = parser().parse_args(given)
    try:
        if options.command == "inspect":
            return _inspect(options.path, is_long=options.tensors)
        if options.command == "config":
            return _configure(options.output, is_interactive=not options.defaults, overwrites=options.force)
        if options.command == "estimate":
            print("\n".join(estimate_cli.report(options)))
            return 0
        if options.command == "calibrate":
            return calibrate_cli.run(options)
        dtype = None if options.dtype is None else _DTYPES[options.dtype]
        file_bytes = int(options.file_gb * 1e9)
        names = {"folder": options.folder, "prefix": options.prefix, "config": options.config}
        for file in export_safetensors(options.path, Export(**names, dtype=dtype, file_bytes=file_bytes), _show):
            print(file)
    except MiCSError as error:
        print(f"mics {options.command}: {error}", file=sys.stderr)
        return 1
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
        program: Any = importlib.import_module(f"{_recipes_package()}.{module}")
    except ModuleNotFoundError as error:
        print(
            f"mics {command}: the recipes need `{error.name}`, which is not installed. Run `pip install "
            "'mics_strategy[recipes]'`.",
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


def _recipes_package() -> str:
    """Return the name of the recipes' package.

    In a checkout that is not installed, they are beside this package.
    """
    if importlib.util.find_spec("mics_strategy.recipes") is None:
        checkout = Path(__file__).resolve().parents[1]
        if (checkout / "recipes" / "pretrain.py").is_file():
            sys.path.append(str(checkout))
            return "recipes"
    return "mics_strategy.recipes"


def _inspect(path: Path, *, is_long: bool) -> int:
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
    for name, saved in sorted(tensors.items()) if is_long else ():
        print(f"  {name} {list(saved.size)} {str(saved.properties.dtype).removeprefix('torch.')}")
    manifest = atomic.read_manifest(path)
    for number, name in enumerate(sorted(manifest.files), 1):
        atomic.check_files(path, manifest, [name])
        _show(number, len(manifest.files))
    print(f"{len(manifest.files)} files are intact")
    return 0


def _configure(path: Path, *, is_interactive: bool, overwrites: bool) -> int:
    answers = prompt(input, print) if is_interactive else default_answers()
    write_launch_file(path, answers, overwrites=overwrites)
    print(f"{path} is written. Start the training on every machine with\n  {launch_line(path, answers)}")
    print(f"train.py needs no change. To try two processes, run `accelerate test --config_file {path}`.")
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
    """Draw a progress bar if stderr is a terminal."""
    if sys.stderr.isatty():
        filled = _BAR * done // max(1, total)
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {100 * done // max(1, total)} %", end=end, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
