"""Loading of weights from other tools into a sharded model.

No rank needs memory for the full model. Every rank inspects the files, matches their names with the model's, and
raises for anything that does not fit before the model is changed. Then it reads its own rows of one tensor after
another, directly into its shard.
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
from mics_strategy.outer.target import outer_of

Rename = Callable[[str], str | None]
_EXTRA_STATE = "_extra_state"  # torch's name of the value of `get_extra_state`
_SHOWN = 5  # names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompatibleKeys:
    """Names that only the model or only the files have, as in `load_state_dict`.

    Attributes:
        missing_keys: Names of the model that are not in the files. Of tied names, one in the files is enough.
        unexpected_keys: Names in the files that the model does not have.
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
    """Load parameters and buffers of other tools into a sharded model. Collective.

    Supported formats: a ``.safetensors`` file; folders of `save_pretrained` and ``mics export``; a torch file with a
    state dict, at the top level or under ``state_dict``, ``model``, ``model_state_dict`` or ``module`` (as Lightning's
    checkpoints); a folder of torch's distributed checkpoint (FSDP2, Lightning); output of DeepSpeed's
    ``zero_to_fp32.py``, and its universal checkpoints. Values are converted to the dtypes of the model. Optimizers and
    random generators are not changed; use `load_checkpoint` to resume a run.

    Args:
        path: File or folder, readable by every rank. Rank 0's path is used.
        sharded: Model.
        strict: Whether names that only the model or only the files have are errors.
        rename: Function from a name in the files to a name of the model, or to None to skip it. ``"auto"`` removes (or
            adds) the one prefix with which most names match, such as ``module.`` of DDP and DeepSpeed, or ``model.``.
        weights_only: Whether objects in torch files must be plain data, as in `torch.load`.

    Returns:
        The names that only the model or only the files have. Empty if `strict` is set.

    Raises:
        CheckpointError: Files are missing, truncated, of an unknown format or of another model, or may run code. Raised
            on every rank before anything is changed, or later if a file becomes unreadable during the load.

    Cost:
        Memory of a rank: its own shard, which exists already, and mapped pages of 32 MiB of tensors or of the largest
        one. For a distributed checkpoint, about four copies of the largest saved item, because of how torch reads it.
        Disk reads: this rank's rows; all of a parameter that is not sharded along its first dimension.
    """
    finish_saves(sharded)
    root = gather_objects(Path(path))[0]
    if gather_objects(atomic.is_checkpoint(root))[0]:
        check_checkpoint(root)
    source = run_on_all_ranks(lambda: as_checkpoint_error(root, lambda: open_source(root, weights_only=weights_only)))
    model_state = sharded.model.state_dict(keep_vars=True)
    names = run_on_all_ranks(lambda: _names(model_state, source, root, rename))
    expected = {name: value for name, value in source.saved.items() if rename == "auto" or rename(name) is not None}
    difference = run_on_all_ranks(lambda: _difference(sharded, model_state, expected, names, strict=strict))
    extras = {name for name in names.values() if _is_extra(name, model_state[name])}

    def read() -> dict[str, Any]:
        with torch.no_grad():
            source.fill({saved: model_state[name] for saved, name in names.items() if name not in extras})
            return {name: source.value(saved) for saved, name in names.items() if name in extras}

    try:
        values = run_on_all_ranks(lambda: as_checkpoint_error(root, read))
    finally:
        sharded.mark_modified()
    sharded.internals.target.restart()
    if values:
        sharded.model.load_state_dict(values, strict=False)
    return difference


def _names(
    model_state: Mapping[str, Any], source: Source, path: Path, rename: Rename | Literal["auto"]
) -> dict[str, str]:
    """Map names in the files to names of the model, for those on both sides.

    Raises:
        CheckpointError: Two entries have the same name of the model, or an entry does not fit.
    """
    rename_one = prefix_between(model_state, source.saved, path) if rename == "auto" else rename
    names: dict[str, str] = {}
    saved_names: dict[str, str] = {}
    for saved_name, saved in source.saved.items():
        name = rename_one(saved_name)
        if name is None or name not in model_state:
            continue
        if name in saved_names:
            raise CheckpointError(
                f"`{saved_names[name]}` and `{saved_name}` of `{path}` both map to the model's `{name}`. Make `rename` "
                "return None for one of them."
            )
        names[saved_name], saved_names[name] = name, saved_name
        if not _is_extra(name, model_state[name]):
            _check_shapes(name, model_state[name], saved, may_be_flat=source.may_be_flat)
    return names


def _is_extra(name: str, value: Any) -> bool:
    """Whether a module loads the value with `set_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE or not isinstance(value, torch.Tensor)


def prefix_between(model_names: Collection[str], saved: Collection[str], path: Path) -> Rename:
    """Find the prefix with which most names in the files match the model.

    It is removed from, or added to, the names in the files.

    Args:
        model_names: Names of the model.
        saved: Names in the files.
        path: Path of the files, for errors.

    Returns:
        A function that renames; it returns None for names without the prefix.

    Raises:
        CheckpointError: No name matches with any prefix, or two prefixes match equally well.
    """
    matches: Counter[tuple[str, str]] = Counter()  # by removed and added prefix
    matches.update(
        (removed, "") for name in saved for removed in _prefixes(name) if name.removeprefix(removed) in model_names
    )
    matches.update(
        ("", added) for name in model_names for added in _prefixes(name) if added and name.removeprefix(added) in saved
    )
    most = max(matches.values(), default=0)
    best = sorted(affixes for affixes, count in matches.items() if count == most)
    if not best:
        raise CheckpointError(
            f"No name in `{path}` matches the model: the files have {_listed(saved)}; the model has "
            f"{_listed(model_names)}. Build the model that was saved, or pass `rename=`, a function from names in the "
            "files to names of the model."
        )
    if len(best) > 1 and ("", "") not in best:
        (removed, added), (other_removed, other_added) = best[:2]
        raise CheckpointError(
            f"The names in `{path}` match the model equally well with the prefixes `{removed or added}` and "
            f"`{other_removed or other_added}`. Choose one: `rename=lambda name: "
            f"name.removeprefix({removed or added!r}) if name.startswith({removed or added!r}) else None`."
        )
    removed, added = ("", "") if ("", "") in best else best[0]
    return lambda name: added + name.removeprefix(removed) if name.startswith(removed) else None


def _prefixes(name: str) -> list[str]:
    """Return the prefixes of a dotted name: the empty one and all that end in a dot."""
    return ["", *(name[: position + 1] for position, character in enumerate(name) if character == ".")]


def _check_shapes(name: str, value: Any, saved: SavedTensor | None, *, may_be_flat: bool) -> None:
    shape = None if saved is None else saved.shape
    is_flat = may_be_flat and shape is not None and len(shape) == 1 and shape.numel() == value.numel()
    if shape != value.shape and not is_flat:
        raise CheckpointError(
            f"`{name}` has shape {list(value.shape)} in the model and {'none' if shape is None else list(shape)} in "
            "the files. Build the model with the configuration with which it was saved."
        )
    if saved is not None and isinstance(value, ShardedParameter) and value.dtype.is_floating_point:
        if not saved.dtype.is_floating_point:
            raise CheckpointError(
                f"`{name}` is {value.dtype} in the model and {saved.dtype} in the files, which is the dtype of "
                "quantized weights. Load weights that are not quantized."
            )


def _difference(
    sharded: Sharded,
    model_state: Mapping[str, Any],
    saved: Mapping[str, SavedTensor | None],
    names: Mapping[str, str],
    *,
    strict: bool,
) -> IncompatibleKeys:
    """As `_incompatible_keys`, checked for islands that are between outer steps."""
    keys = _incompatible_keys(model_state, saved, names, strict)
    if (outer := outer_of(sharded)) is not None:
        outer.check_load(keys.missing_keys)
    return keys


def _incompatible_keys(
    model_state: Mapping[str, Any], saved: Mapping[str, SavedTensor | None], names: Mapping[str, str], strict: bool
) -> IncompatibleKeys:
    """Find the names on one side only.

    Objects in the files that are not tensors do not count.

    Raises:
        CheckpointError: There are such names, and `strict` is set.
    """
    loaded_ids = {id(model_state[name]) for name in names.values()}  # of tied names, one is enough
    keys = IncompatibleKeys(
        missing_keys=[name for name in model_state if id(model_state[name]) not in loaded_ids],
        unexpected_keys=[name for name, entry in saved.items() if entry is not None and name not in names],
    )
    sides = (keys.missing_keys, "the model, not in the files"), (keys.unexpected_keys, "the files, not in the model")
    problems = [f"{_listed(unmatched)}: only in {side}" for unmatched, side in sides if unmatched]
    if strict and problems:
        raise CheckpointError(
            f"{'; '.join(problems)}. Build the model that was saved, map the names with `rename=`, or load with "
            "`strict=False`."
        )
    return keys


def _listed(names: Collection[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in list(names)[:_SHOWN]) + rest
