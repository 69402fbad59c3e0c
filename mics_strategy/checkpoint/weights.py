"""How do weights from elsewhere get into a sharded model, when no rank can hold the model?

Every rank looks at the files, finds which of their names are the model's, and refuses what does not fit before anything
is changed. Then it reads its own rows of one tensor after the other, straight into its shard.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.load import check_checkpoint
from mics_strategy.checkpoint.save import finish_saves
from mics_strategy.checkpoint.weight_formats import SavedTensor, Source, as_checkpoint_error, open_source
from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

Rename = Callable[[str], str | None]
_EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` gives
_SHOWN = 5  # names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompatibleKeys:
    """Names that were not on both sides, as `torch.nn.Module.load_state_dict` tells them.

    Attributes:
        missing_keys: Of the model, not in the files. One of tied names is enough.
        unexpected_keys: Of the files, not in the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    path: str | os.PathLike[str],
    sharded: Sharded,
    *,
    strict: bool = True,
    rename: Rename | Literal["auto"] = "auto",
    weights_only: bool = True,
) -> IncompatibleKeys:
    """Read parameters and buffers that others have saved into a sharded model. Collective.

    What is read: a ``.safetensors`` file; what `save_pretrained` and ``mics export`` write (a folder, in one file or
    several); a torch file that holds a state dict, alone or as ``state_dict``, ``model``, ``model_state_dict`` or
    ``module`` (so a checkpoint of Lightning); a folder of torch's distributed checkpoints (FSDP2, Lightning); what
    DeepSpeed's ``zero_to_fp32.py`` writes, and its universal checkpoints. Values are converted to the dtypes that the
    model has. Optimizers and random generators stay as they are; `load_checkpoint` resumes a training.

    Args:
        path: The file or folder, which every rank can read; rank 0's counts.
        sharded: The model.
        strict: Whether names that only the model, or only the files, have are an error.
        rename: From a name in the files to the model's, or to None for what is left out. ``"auto"`` cuts off (or adds)
            the one prefix with which most names are the model's: ``module.`` of DDP and DeepSpeed, ``model.``.
        weights_only: Whether torch files may hold nothing but plain data, as `torch.load` has it.

    Returns:
        The names that were not on both sides; none of them where `strict` is set.

    Raises:
        CheckpointError: On every rank: before anything is changed, where the files are missing, truncated, of an
            unknown kind or another model's, or may run code; while reading, where a file cannot be read after all.

    Cost:
        Memory of a rank: its own shard, which is there already, and mapped pages of 32 MiB of tensors or of the largest
        one; of a distributed checkpoint, about four copies of the largest saved piece, as torch reads it. Read from the
        disk: this rank's rows, and of a parameter that is not cut along its first dimension, all of it.
    """
    finish_saves(sharded)
    where = gather_objects(Path(path))[0]
    if gather_objects(atomic.is_checkpoint(where))[0]:
        check_checkpoint(where)
    source = run_on_all_ranks(lambda: as_checkpoint_error(where, lambda: open_source(where, weights_only=weights_only)))
    own = sharded.model.state_dict(keep_vars=True)
    names = run_on_all_ranks(lambda: _names(own, source, where, rename))
    expected = {name: value for name, value in source.saved.items() if rename == "auto" or rename(name) is not None}
    difference = run_on_all_ranks(lambda: _incompatible_keys(own, expected, names, strict))
    extras = {name for name in names.values() if _is_extra(name, own[name])}

    def read() -> dict[str, Any]:
        with torch.no_grad():
            source.fill({saved: own[name] for saved, name in names.items() if name not in extras})
            return {name: source.value(saved) for saved, name in names.items() if name in extras}

    try:
        values = run_on_all_ranks(lambda: as_checkpoint_error(where, read))
    finally:
        sharded.mark_modified()
    if values:
        sharded.model.load_state_dict(values, strict=False)
    return difference


def _names(own: Mapping[str, Any], source: Source, path: Path, rename: Rename | Literal["auto"]) -> dict[str, str]:
    """The model's names by those in the files, of what is on both sides.

    Raises:
        CheckpointError: Two entries for one name, or one that does not fit.
    """
    chosen = prefix_between(own, source.saved, path) if rename == "auto" else rename
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for saved_name, saved in source.saved.items():
        name = chosen(saved_name)
        if name is None or name not in own:
            continue
        if name in taken:
            raise CheckpointError(
                f"Both `{taken[name]}` and `{saved_name}` of `{path}` would be the model's `{name}`. Let `rename` give "
                "one of them, and None for the other."
            )
        names[saved_name], taken[name] = name, saved_name
        if not _is_extra(name, own[name]):
            _check_shapes(name, own[name], saved, may_be_flat=source.may_be_flat)
    return names


def _is_extra(name: str, value: Any) -> bool:
    """Whether a module takes a value by `set_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE or not isinstance(value, torch.Tensor)


def prefix_between(own: Collection[str], saved: Collection[str], path: Path) -> Rename:
    """The prefix to cut off the names in files, or to put before them, with which most are the model's.

    Args:
        own: Names of the model.
        saved: Names in the files.
        path: Of the files, for the error.

    Returns:
        What does it; None for names that do not begin so.

    Raises:
        CheckpointError: No name fits in any way, or two ways are as good.
    """
    fits: Counter[tuple[str, str]] = Counter()  # by what is cut off, and what is put before
    fits.update((cut, "") for name in saved for cut in _prefixes(name) if name.removeprefix(cut) in own)
    fits.update(("", put) for name in own for put in _prefixes(name) if put and name.removeprefix(put) in saved)
    most = max(fits.values(), default=0)
    best = sorted(way for way, count in fits.items() if count == most)
    if not best:
        raise CheckpointError(
            f"No name in `{path}` is one of the model's: {_listed(saved)} there, {_listed(own)} here. Build the model "
            "that was saved, or give `rename=`, a function from its names to the model's."
        )
    if len(best) > 1 and ("", "") not in best:
        (cut, put), (other_cut, other_put) = best[:2]
        raise CheckpointError(
            f"The names in `{path}` are the model's after `{cut or put}` as well as after `{other_cut or other_put}`. "
            f"Say which are meant: `rename=lambda name: name.removeprefix({cut or put!r}) if "
            f"name.startswith({cut or put!r}) else None`."
        )
    cut, put = ("", "") if ("", "") in best else best[0]
    return lambda name: put + name.removeprefix(cut) if name.startswith(cut) else None


def _prefixes(name: str) -> list[str]:
    """Of a dotted name: the empty one, and all that end with a dot."""
    return ["", *(name[: place + 1] for place, letter in enumerate(name) if letter == ".")]


def _check_shapes(name: str, own: Any, saved: SavedTensor | None, *, may_be_flat: bool) -> None:
    found = None if saved is None else saved.shape
    is_flat = may_be_flat and found is not None and len(found) == 1 and found.numel() == own.numel()
    if found != own.shape and not is_flat:
        raise CheckpointError(
            f"`{name}` has shape {list(own.shape)} in the model and {'none' if found is None else list(found)} in the "
            "files. Build the model with the configuration that it was saved with."
        )
    if saved is not None and isinstance(own, ShardedParameter) and own.dtype.is_floating_point:
        if not saved.dtype.is_floating_point:
            raise CheckpointError(
                f"`{name}` is {own.dtype} in the model and {saved.dtype} in the files, as quantized weights are. Load "
                "weights that are not quantized."
            )


def _incompatible_keys(
    own: Mapping[str, Any], saved: Mapping[str, SavedTensor | None], names: Mapping[str, str], strict: bool
) -> IncompatibleKeys:
    """What is on one side only. Objects that are no tensors, such as the number of an epoch, do not count in files.

    Raises:
        CheckpointError: There is something, and `strict` is set.
    """
    there = {id(own[name]) for name in names.values()}  # one of tied names is enough
    found = IncompatibleKeys(
        missing_keys=[name for name in own if id(own[name]) not in there],
        unexpected_keys=[name for name, each in saved.items() if each is not None and name not in names],
    )
    sides = (found.missing_keys, "the model, not in the files"), (found.unexpected_keys, "the files, not in the model")
    differing = [f"{_listed(lacking)}: only in {where}" for lacking, where in sides if lacking]
    if strict and differing:
        raise CheckpointError(
            f"{'; '.join(differing)}. Build the model that was saved, say by `rename=` which names are the same, or "
            "load with `strict=False`."
        )
    return found


def _listed(names: Collection[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in list(names)[:_SHOWN]) + rest
