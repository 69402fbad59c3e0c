"""The command that prepares the token store of a recipe: `mics data prepare`, `python -m recipes.data.prepare`."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from mics_strategy.errors import MiCSError, command_error

from ..config import Recipe, load_recipe
from ..errors import RecipeError
from ..files import find_recipe
from .prepare import objective_of, prepare_store, store_folder
from .progress import BarProgress, PlainProgress, is_terminal
from .store import TokenStore


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; what a user can repair ends it with one line instead of a traceback.

    Args:
        arguments: The recipe, as `--config FILE` or the first argument, and options; `None` takes the process's.
    """
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except (MiCSError, OSError) as error:
        sys.exit(command_error("data prepare", error))


def _run(arguments: list[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--config={find_recipe(arguments[0])}"
    options, overrides = _parser().parse_known_args(arguments)
    if options.workers < 1:
        raise RecipeError(f"`--workers={options.workers}` starts no process. Use 1 or more.")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise RecipeError(
            f"The preparation was started on {world_size} ranks, which would all do the same work. Start it once, "
            "without torchrun or srun; `--workers` gives it more processes."
        )
    shared = [*(f"--config={file}" for file in options.config), *overrides]
    if options.download:
        shared.append("--data.download=true")
    has_cuda = _has_gpu() if options.device == "auto" else options.device == "cuda"
    recipe = load_recipe(shared, has_cuda=has_cuda)
    if recipe.data.source == "synthetic_images":
        print("synthetic images are drawn while training; there is nothing to prepare")
        return
    _report(recipe, _prepare(recipe, options.workers))
    other = load_recipe(shared, has_cuda=not has_cuda)
    if _folder(other) != _folder(recipe):
        device = "cpu" if has_cuda else "cuda"
        print(f"On {device} this recipe reads another store ({_folder(other)}): prepare it with `--for={device}`.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mics data prepare",
        description="Prepare the token store of a recipe, or verify and repair it. Needs no ranks and no GPU.",
        epilog="Further options are those of the recipe, for example --data.path=FOLDER.",
        allow_abbrev=False,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--config", action="append", default=[], help="YAML file of a recipe, may be repeated")
    parser.add_argument("--workers", type=int, default=cores, help="number of processes; default: all cores")
    parser.add_argument("--download", action="store_true", help="fetch missing files from the hub first")
    parser.add_argument(
        "--for",
        dest="device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of the training, which decides whether the recipe's block `cuda` applies; default: this machine's",
    )
    return parser


def _prepare(recipe: Recipe, workers: int) -> TokenStore:
    with ExitStack() as stack:
        has_bar = is_terminal() and importlib.util.find_spec("rich") is not None
        progress = stack.enter_context(BarProgress()) if has_bar else PlainProgress()
        objective = objective_of(recipe.model.family)
        return prepare_store(recipe.data, recipe.model.vocab_rows, objective, workers=workers, progress=progress)


def _folder(recipe: Recipe) -> object:
    return store_folder(recipe.data, recipe.model.vocab_rows, objective_of(recipe.model.family))


def _report(recipe: Recipe, store: TokenStore) -> None:
    manifest = store.manifest
    train, validation = (manifest.total("num_tokens", (split,)) for split in ("train", "validation"))
    size = (train + validation) * int(manifest.dtype[-1])
    lines = [
        f"text: {manifest.origin}",
        f"{manifest.total('num_documents'):,} documents, {manifest.total('num_bytes') / 1e9:,.3f} GB of text, "
        f"{sum(part.num_empty for part in manifest.parts):,} empty ones left out",
        f"{train:,} tokens to train, {validation:,} held out, {size / 1e9:,.3f} GB in {len(manifest.parts)} parts",
        f"{train // recipe.data.sequence_length:,} sequences of {recipe.data.sequence_length} tokens",
        f"complete and verified: {store.folder}",
    ]
    print("\n".join(lines), flush=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
