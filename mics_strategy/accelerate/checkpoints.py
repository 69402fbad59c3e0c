"""Sharded models and optimizers in folders of Accelerate and transformers.

They are saved under the names that Accelerate and `transformers.Trainer` expect. Sharded: ``pytorch_model_fsdp_0`` and
``optimizer_0``, folders to which every rank writes its shards. Full: ``pytorch_model_fsdp.bin`` and ``optimizer.bin``,
full tensors with unsharded names, like the files of plain data parallelism. Both formats load, whichever is saved.

A script that saves on the main process only leaves that process waiting for the others, which continue to train.
Therefore ranks first synchronize through the job's key-value store, which no collective blocks. A rank that waits too
long raises an error with the missing ranks.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import SAFE_WEIGHTS_NAME, SCALER_NAME, WEIGHTS_NAME, is_peft_model
from torch.distributed.fsdp import StateDictType

from mics_strategy import (
    CheckpointError,
    OpenCheckpoint,
    Sharded,
    atomic_checkpoint_folder,
    check_checkpoint,
    is_checkpoint,
    load_weights,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from mics_strategy.accelerate import framework
from mics_strategy.comm import consensus
from mics_strategy.comm.consensus import broadcast_from_rank_0, run_on_files

if TYPE_CHECKING:
    from mics_strategy.accelerate.plugin import MiCSPlugin

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
_DDP_NAMES = {("optimizer", 0): "optimizer.pt"}  # name of `transformers.Trainer` without sharding
_UNFINISHED = "mics_strategy.unfinished"
_STEPS = "mics_strategy.steps_done"  # an additional key, which torch's optimizers ignore in a state dict
TIMEOUT_S = 300.0  # steps or evaluations before the call may take different times
T = TypeVar("T")


# -- functions that Accelerate and transformers call -------------------------------------------------------------------


def save_model(
    plugin: MiCSPlugin,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    **_: Any,
) -> None:
    """Save a model's weights. Collective. With `adapter_only`, only the trained weights of a peft model are saved."""
    sharded = accelerator.sharded_of(model)
    names = _trained_names(sharded) if adapter_only and is_peft_model(sharded.model) else None
    if _is_full(plugin):
        state = sharded.full_state_dict()
        _write({n: v for n, v in state.items() if names is None or n in names}, _file(output_dir, _MODEL, model_index))
    else:
        partial_state = None if names is None else {n: v for n, v in sharded.model.state_dict().items() if n in names}
        save_checkpoint(Path(output_dir, f"{_MODEL}_{model_index}"), sharded, model_state=partial_state)
    run_on_files(lambda: _remove_other_kind(plugin, output_dir, _MODEL, model_index))


def load_model(
    plugin: MiCSPlugin,
    accelerator: Any,
    model: Any,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    **_: Any,
) -> Any:
    """Load a model's weights, saved by this or another library, or all of a snapshot. Collective.

    Returns:
        Missing and unexpected keys; None for a snapshot.
    """
    snapshots = accelerator.trainer_snapshots
    if snapshots is not None and snapshots.is_in(input_dir):
        snapshots.load()
        return None
    sharded = accelerator.sharded_of(model)
    source = _find_saved(plugin, input_dir, _MODEL, model_index) or _plain_weights(input_dir, model_index)
    if not (adapter_only and is_peft_model(sharded.model)):
        return load_weights(source, sharded)
    keys = load_weights(source, sharded, strict=False)
    missing = sorted(_trained_names(sharded) & set(keys.missing_keys))
    if missing:
        raise CheckpointError(
            f"`{source}` has no values for {len(missing)} trained parameters, such as `{missing[0]}`. Build the "
            "adapter with the configuration with which it was saved."
        )
    return keys


def save_optimizer(
    plugin: MiCSPlugin,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Save the states of an optimizer. Collective."""
    optimizer = framework.unwrap_optimizer(optimizer)
    sharded = accelerator.sharded_of(optimizer)
    if _is_full(plugin):
        sharded.internals.warn_pending_gradients()
        state = sharded.full_optimizer_state_dict(optimizer)
        _write({**state, _STEPS: sharded.steps_done}, _file(output_dir, _OPTIMIZER, optimizer_index))
    else:
        save_checkpoint(
            Path(output_dir, f"{_OPTIMIZER}_{optimizer_index}"), sharded, {_OPTIMIZER: optimizer}, model_state={}
        )
    run_on_files(lambda: _remove_other_kind(plugin, output_dir, _OPTIMIZER, optimizer_index))


def load_optimizer(
    plugin: MiCSPlugin,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Load the states of an optimizer. Collective.

    Raises:
        CheckpointError: The states are missing, or belong to another optimizer.
    """
    if accelerator.trainer_snapshots is not None and accelerator.trainer_snapshots.is_in(input_dir):
        return  # loaded with the model
    optimizer = framework.unwrap_optimizer(optimizer)
    sharded = accelerator.sharded_of(optimizer)
    source = _find_saved(plugin, input_dir, _OPTIMIZER, optimizer_index)
    if source is None:
        raise CheckpointError(
            f"`{input_dir}` has no optimizer number {optimizer_index}: neither `{_OPTIMIZER}_{optimizer_index}` nor "
            f"`{_file(input_dir, _OPTIMIZER, optimizer_index).name}` exists. Load an older, complete checkpoint."
        )
    if source.is_dir():
        OpenCheckpoint(source).load(sharded, {_OPTIMIZER: optimizer}, has_model=False)
        return
    state = run_on_files(lambda: _read(source))
    sharded.load_full_optimizer_state_dict(optimizer, state)
    sharded.steps_done = state.get(_STEPS, sharded.steps_done)


def _trained_names(sharded: Sharded) -> set[str]:
    return {name for name, parameter in sharded.model.named_parameters() if parameter.requires_grad}


def _is_full(plugin: MiCSPlugin) -> bool:
    return bool(plugin.state_dict_type == StateDictType.FULL_STATE_DICT)


def _remove_other_kind(plugin: MiCSPlugin, folder: str, name: str, index: int) -> None:
    """Remove an earlier save in the other format, which would be loaded instead."""
    if dist.get_rank() != 0:
        return
    folder_path = Path(folder, f"{name}_{index}")
    if not _is_full(plugin):
        _file(folder, name, index).unlink(missing_ok=True)
    elif not remove_checkpoint(folder_path) and (folder_path / ".metadata").is_file():  # a folder of Accelerate's FSDP2
        shutil.rmtree(folder_path)


def _file(folder: str, name: str, index: int) -> Path:
    return Path(folder, f"{name}.bin" if index == 0 else f"{name}_{index}.bin")


def _find_saved(plugin: MiCSPlugin, folder: str, name: str, index: int) -> Path | None:
    """Find the folder or file of a name, the current format first; rank 0 decides."""
    sharded, full = Path(folder, f"{name}_{index}"), _file(folder, name, index)
    plain = Path(folder, _DDP_NAMES.get((name, index), full.name))
    candidates: tuple[Path, ...] = (full, plain, sharded) if _is_full(plugin) else (sharded, full, plain)
    if Path(folder).name == sharded.name:  # the path of the entry itself was given
        candidates = (Path(folder),)
    return broadcast_from_rank_0(next((path for path in candidates if path.exists()), None))


def _plain_weights(folder: str, index: int) -> Path:
    """Find the weights of plain data parallelism.

    Without a known file, the weights of the first model are the whole folder.
    """
    names = [SAFE_WEIGHTS_NAME, WEIGHTS_NAME] if index == 0 else []
    names += [name.replace(".", f"_{index}.") for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME) if index > 0]
    weights = broadcast_from_rank_0(next((path for name in names if (path := Path(folder, name)).exists()), None))
    if weights is None and index > 0:
        raise CheckpointError(
            f"`{folder}` has no model number {index}: `{_MODEL}_{index}` does not exist. Load as many models "
            "as were saved."
        )
    return Path(folder) if weights is None else weights


def _read(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"`{file}` cannot be read ({error}). Load an older, complete checkpoint.") from error
    if any(isinstance(key, str) for key in state.get("state", {})):
        raise CheckpointError(
            f"`{file}` names parameters, as full optimizer states of FSDP2 do. That format is not supported. Save "
            "sharded optimizer states with FSDP2, or load only the weights."
        )
    return state


def _write(value: Any, file: Path) -> None:
    """Write a file atomically on rank 0; failures raise on all ranks. Collective."""

    def write() -> None:
        draft = file.with_name(f".{file.name}.draft")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, draft)
        os.replace(draft, file)

    run_on_files(lambda: write() if dist.get_rank() == 0 else None)


# -- full states --------------------------------------------------------------------------------------------


@contextmanager
def saving(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> Iterator[tuple[Path, Path]]:
    """Yield the folder that `save_state` writes into, and its final path. Collective.

    The folder appears under its final path only when it is complete. If that path holds files other than a checkpoint,
    they are kept and the folder is written in place; it cannot be loaded until the save has ended.

    Raises:
        ValueError: No folder is given and the project does not name checkpoints automatically, or the folder that it
            names exists.
        CheckpointError: A rank could not write.
    """
    accelerator.rendezvous.require_every_rank("save_state")
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        target = _numbered_folder(accelerator) / f"checkpoint_{accelerator.save_iteration}"
        if broadcast_from_rank_0(target.exists()):
            raise ValueError(
                f"`{target}` already exists. Set `accelerator.project_configuration.iteration` to the number of the "
                "next checkpoint."
            )
    elif output_dir is None:
        raise ValueError("`save_state()` needs a folder. Pass one, or set `automatic_checkpoint_naming`.")
    else:
        target = Path(output_dir).expanduser().absolute()
    if broadcast_from_rank_0(_holds_other_files(target)):
        with _marked_until_finished(target):
            yield target, target
        return
    with atomic_checkpoint_folder(target, accelerator.handles) as draft:
        yield draft, target
    if project.automatic_checkpoint_naming and project.total_limit is not None:
        run_on_files(lambda: _remove_oldest(target.parent, project.total_limit) if dist.get_rank() == 0 else None)


def to_load(accelerator: Any, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to load.

    By default it is the newest intact one that the project has named.

    Raises:
        ValueError: There is no such folder.
        CheckpointError: The folder is damaged.
    """
    accelerator.rendezvous.require_every_rank("load_state")
    if input_dir is not None:
        folder = Path(input_dir).expanduser().absolute()
        if not broadcast_from_rank_0(folder.is_dir()):
            raise ValueError(f"Tried to find {folder} but folder does not exist")
        if broadcast_from_rank_0((folder / _UNFINISHED).exists()):
            raise CheckpointError(
                f"A save into `{folder}` did not finish (`{_UNFINISHED}` exists), so its files may belong to different "
                "steps. Load another checkpoint. Save each checkpoint into its own folder, which is then complete or "
                "absent."
            )
        if broadcast_from_rank_0(is_checkpoint(folder)):
            check_checkpoint(folder)
        return folder
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    newest = newest_checkpoint(_numbered_folder(accelerator))
    if newest is None:
        raise ValueError(f"`{_numbered_folder(accelerator)}` holds no checkpoint. Pass a folder, or save first.")
    return newest


def load_scaler(scaler: torch.amp.GradScaler, folder: Path) -> None:
    """Restore a gradient scaler.

    Raises:
        CheckpointError: The state was saved without a scaler. Raised on every rank.
    """
    file = folder / SCALER_NAME
    if not broadcast_from_rank_0(file.is_file()):
        raise CheckpointError(
            f"`{folder}` has no `{SCALER_NAME}`, because it was saved without a gradient scaler, but this run has one. "
            "Load it with the `mixed_precision` with which it was saved."
        )
    scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


@contextmanager
def _marked_until_finished(target: Path) -> Iterator[None]:
    """Mark a folder as unfinished during a save in place; a failure leaves the mark."""
    marker, is_first = target / _UNFINISHED, dist.get_rank() == 0
    run_on_files(lambda: marker.touch() if is_first else None)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # reported to all ranks
        failure = error

    def finish() -> None:
        if failure is not None:
            raise CheckpointError(f"`{target}` was not saved: {type(failure).__name__}: {failure}") from failure

    run_on_files(finish)
    run_on_files(lambda: marker.unlink() if is_first else None)


def _numbered_folder(accelerator: Any) -> Path:
    """Return the folder of the checkpoints that the project numbers."""
    return Path(accelerator.project_dir, "checkpoints").expanduser().absolute()


def _holds_other_files(target: Path) -> bool:
    return target.is_dir() and any(target.iterdir()) and not is_checkpoint(target)


def _remove_oldest(folder: Path, limit: int) -> None:
    """Remove the oldest checkpoints; called after the last one is complete."""
    numbers = {path: re.fullmatch(r"checkpoint_(\d+)", path.name) for path in folder.iterdir()}
    checkpoints = sorted((int(match[1]), path) for path, match in numbers.items() if match)
    for _, path in checkpoints[: max(0, len(checkpoints) - limit)]:
        if not remove_checkpoint(path):
            shutil.rmtree(path)


# -- synchronization of ranks ------------------------------------------------------------------------------------------


class SaveRendezvous:
    """Synchronization of ranks before they save or load."""

    def __init__(self) -> None:
        self._rendezvous = consensus.Rendezvous("met")

    def require_every_rank(self, call: str, timeout_s: float = TIMEOUT_S) -> None:
        """Return when all ranks have called this method equally often.

        Args:
            call: Name of the following operation, for the error.
            timeout_s: Longest wait for the last rank, in seconds.

        Raises:
            CheckpointError: A rank did not call it in time.
        """
        missing = self._rendezvous.missing_ranks(timeout_s)
        if missing:
            raise CheckpointError(
                f"Rank {', '.join(map(str, missing))} did not call `{call}` within {timeout_s:g} s of rank "
                f"{dist.get_rank()}. All ranks must save and load together: call it outside of "
                "`if accelerator.is_main_process`."
            )
