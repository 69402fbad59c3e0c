"""How does every rank get its share of a checkpoint, whatever ranks have written it?"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from mics_strategy.checkpoint import random_state, storage
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.reading import Reader, read
from mics_strategy.checkpoint.save import EXTRA, finish_saves
from mics_strategy.checkpoint.state import Template
from mics_strategy.errors import CheckpointError
from mics_strategy.mesh import gather_objects, on_every_rank
from mics_strategy.sharding.sharded import Sharded


def load_checkpoint(
    path: str | Path,
    sharded: Sharded,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Read a sharded checkpoint into a model, its optimizers and the random generators. Collective.

    It may have been written by any number of ranks, with any scopes, layout of the optimizer and dtypes. Every file is
    held against its digest first; ranks share that work.

    Args:
        path: The folder; rank 0's counts.
        sharded: The model.
        optimizers: In the order in which they were saved; none loads the model only.
        strict: Whether names that only the model, or only the checkpoint, has are an error.
        weights_only: Whether objects may be nothing but plain data, as `torch.load` has it.

    Returns:
        What `save_checkpoint` was given as `extra`.

    Raises:
        CheckpointError: On every rank, for a checkpoint that is damaged, mixed or another model's, before anything is
            changed.

    Cost:
        Memory: this rank's share, and one saved piece at a time.
    """
    finish_saves(sharded)
    folder = gather_objects(Path(path))[0]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manifest = on_every_rank(lambda: _checked(folder, rank, world_size))
    metadata = on_every_rank(Reader(folder).read_metadata)
    template = on_every_rank(lambda: Template(sharded, optimizers, metadata, strict=strict))
    template.values[random_state.KEY] = random_state.wanted(rank, world_size, manifest.world_size)

    def fill() -> dict[str, Any]:
        try:
            extra = _extra(folder, weights_only)
            with torch.no_grad():
                read(folder, metadata, template.values, weights_only=weights_only)
            template.apply()
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise error if isinstance(error, CheckpointError) else CheckpointError(
                f"`{folder}` could not be loaded: {type(error).__name__}: {error}"
            ) from error
        return extra

    extra = on_every_rank(fill)
    random_state.restore(template.values[random_state.KEY], rank)
    sharded.steps_done = manifest.step
    return extra


def _checked(folder: Path, rank: int, world_size: int) -> Manifest:
    """The manifest, after a look at the size of every file and at the bytes of this rank's share of them."""
    manifest = storage.read_manifest(folder)
    names = sorted(manifest.files)
    storage.check_files(folder, manifest, names, digests=False)
    storage.check_files(folder, manifest, names[rank::world_size])
    return manifest


def _extra(folder: Path, weights_only: bool) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(folder / EXTRA, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"`{folder / EXTRA}` holds objects that are not plain data, and reading them may run code. If you trust the "
            f"checkpoint, load it with `weights_only=False`. ({error})"
        ) from error
    return found
