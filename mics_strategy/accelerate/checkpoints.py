"""How are sharded models and optimizers laid down in the folders of Accelerate and `transformers.Trainer`?

Under the names that both look for. Sharded: ``pytorch_model_fsdp_0`` and ``optimizer_0``, folders to which every rank
writes its share. Full: ``pytorch_model_fsdp.bin`` and ``optimizer.bin``, whole tensors under plain names, as plain data
parallel training writes them. Either is read, whatever is to be written.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from mics_strategy.accelerate.plugin import MiCSPlugin
from mics_strategy.accelerate.rendezvous import broadcast_from_rank_0, run_on_all_ranks

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
_OF_DDP = {("optimizer", 0): "optimizer.pt"}  # of `transformers.Trainer` without shards
_UNFINISHED = "mics_strategy.unfinished"
_STEPS = "mics_strategy.steps_done"  # beside what torch's optimizers look at in a state dict


# -- what Accelerate and transformers call -------------------------------------------------------------------


def save_model(
    plugin: MiCSPlugin,
    accelerator: Any,
    model: Any,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    **_: Any,
) -> None:
    """Write a model's weights, of a peft model with `adapter_only` those that are trained. Collective."""
    sharded = accelerator.sharded_of(model)
    names = _trained(sharded) if adapter_only and is_peft_model(sharded.model) else None
    if _is_full(plugin):
        state = sharded.full_state_dict()
        _write({n: v for n, v in state.items() if names is None or n in names}, _file(output_dir, _MODEL, model_index))
    else:
        part = None if names is None else {n: v for n, v in sharded.model.state_dict().items() if n in names}
        save_checkpoint(Path(output_dir, f"{_MODEL}_{model_index}"), sharded, model_state=part)
    run_on_all_ranks(lambda: _remove_other_kind(plugin, output_dir, _MODEL, model_index))


def load_model(
    plugin: MiCSPlugin,
    accelerator: Any,
    model: Any,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    **_: Any,
) -> Any:
    """Read a model's weights, whoever has written them. Collective.

    Returns:
        Missing and unexpected keys.
    """
    sharded = accelerator.sharded_of(model)
    source = _found(plugin, input_dir, _MODEL, model_index) or _plain_weights(input_dir, model_index)
    if not (adapter_only and is_peft_model(sharded.model)):
        return load_weights(source, sharded)
    difference = load_weights(source, sharded, strict=False)
    lacking = sorted(_trained(sharded) & set(difference.missing_keys))
    if lacking:
        raise CheckpointError(
            f"`{source}` has no values for {len(lacking)} trained parameters, such as `{lacking[0]}`. Make the adapter "
            "as it was when it was saved."
        )
    return difference


def save_optimizer(
    plugin: MiCSPlugin,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Write an optimizer's states. Collective."""
    optimizer = framework.unwrap_optimizer(optimizer)
    sharded = accelerator.sharded_of(optimizer)
    if _is_full(plugin):
        sharded.warn_pending_gradients()
        state = sharded.full_optimizer_state_dict(optimizer)
        _write({**state, _STEPS: sharded.steps_done}, _file(output_dir, _OPTIMIZER, optimizer_index))
    else:
        save_checkpoint(
            Path(output_dir, f"{_OPTIMIZER}_{optimizer_index}"), sharded, {_OPTIMIZER: optimizer}, model_state={}
        )
    run_on_all_ranks(lambda: _remove_other_kind(plugin, output_dir, _OPTIMIZER, optimizer_index))


def load_optimizer(
    plugin: MiCSPlugin,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Read an optimizer's states. Collective.

    Raises:
        CheckpointError: There are none, or they are another optimizer's.
    """
    optimizer = framework.unwrap_optimizer(optimizer)
    sharded = accelerator.sharded_of(optimizer)
    source = _found(plugin, input_dir, _OPTIMIZER, optimizer_index)
    if source is None:
        raise CheckpointError(
            f"`{input_dir}` holds no optimizer number {optimizer_index}: neither `{_OPTIMIZER}_{optimizer_index}` nor "
            f"`{_file(input_dir, _OPTIMIZER, optimizer_index).name}`. Use an older checkpoint, which is whole."
        )
    if source.is_dir():
        OpenCheckpoint(source).load(sharded, {_OPTIMIZER: optimizer}, has_model=False)
        return
    state = run_on_all_ranks(lambda: _read(source))
    sharded.load_full_optimizer_state_dict(optimizer, state)
    sharded.steps_done = state.get(_STEPS, sharded.steps_done)


def _trained(sharded: Sharded) -> set[str]:
    return {name for name, parameter in sharded.model.named_parameters() if parameter.requires_grad}


def _is_full(plugin: MiCSPlugin) -> bool:
    return bool(plugin.state_dict_type == StateDictType.FULL_STATE_DICT)


def _remove_other_kind(plugin: MiCSPlugin, folder: str, name: str, index: int) -> None:
    """On rank 0, remove what an earlier save of the other kind left in the same folder: it would be loaded instead."""
    if dist.get_rank() != 0:
        return
    sharded = Path(folder, f"{name}_{index}")
    if not _is_full(plugin):
        _file(folder, name, index).unlink(missing_ok=True)
    elif not remove_checkpoint(sharded) and (sharded / ".metadata").is_file():  # of Accelerate's FSDP2
        shutil.rmtree(sharded)


def _file(folder: str, name: str, index: int) -> Path:
    return Path(folder, f"{name}.bin" if index == 0 else f"{name}_{index}.bin")


def _found(plugin: MiCSPlugin, folder: str, name: str, index: int) -> Path | None:
    """The folder or file of that name, rather of the kind that is written now; rank 0's counts."""
    sharded, full = Path(folder, f"{name}_{index}"), _file(folder, name, index)
    plain = Path(folder, _OF_DDP.get((name, index), full.name))
    in_order: tuple[Path, ...] = (full, plain, sharded) if _is_full(plugin) else (sharded, full, plain)
    if Path(folder).name == sharded.name:  # some name the part itself
        in_order = (Path(folder),)
    return broadcast_from_rank_0(next((path for path in in_order if path.exists()), None))


def _plain_weights(folder: str, index: int) -> Path:
    """The weights of one model as data parallel training saves them, or, of the first, whatever the folder holds."""
    names = [SAFE_WEIGHTS_NAME, WEIGHTS_NAME] if index == 0 else []
    names += [name.replace(".", f"_{index}.") for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME) if index > 0]
    found = broadcast_from_rank_0(next((path for name in names if (path := Path(folder, name)).exists()), None))
    if found is None and index > 0:
        raise CheckpointError(f"`{folder}` holds no model number {index}: `{_MODEL}_{index}` is not there.")
    return Path(folder) if found is None else found


def _read(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"`{file}` cannot be read ({error}). Use an older checkpoint, which is whole.") from error
    if any(isinstance(key, str) for key in state.get("state", {})):
        raise CheckpointError(
            f"`{file}` names parameters, as FSDP2's full optimizer states do, which are not read. Save them sharded "
            "there, or load the weights only."
        )
    return state


def _write(value: Any, file: Path) -> None:
    """Let rank 0 write a file, which is whole or as it was; a failure is raised on every rank. Collective."""

    def write() -> None:
        draft = file.with_name(f".{file.name}.draft")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, draft)
        os.replace(draft, file)

    run_on_all_ranks(lambda: write() if dist.get_rank() == 0 else None)


# -- whole states --------------------------------------------------------------------------------------------


@contextmanager
def saving(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> Iterator[tuple[Path, Path]]:
    """Where `save_state` writes, and where it will be: under its name when everything is there.

    A folder that holds other things than a checkpoint is written into as it is, and not loaded until that has ended.

    Raises:
        ValueError: No folder is given, and the project does not name checkpoints itself; or that one exists.
        CheckpointError: A rank could not write.
    """
    accelerator.rendezvous.require_every_rank("save_state")
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        target = _numbered(accelerator) / f"checkpoint_{accelerator.save_iteration}"
        if broadcast_from_rank_0(target.exists()):
            raise ValueError(
                f"`{target}` exists already. Set `accelerator.project_configuration.iteration` to the number to go on "
                "with."
            )
    elif output_dir is None:
        raise ValueError("`save_state()` was given no folder. Name one, or use `automatic_checkpoint_naming`.")
    else:
        target = Path(output_dir).expanduser().absolute()
    if broadcast_from_rank_0(_holds_other_things(target)):
        with _marked_until_finished(target):
            yield target, target
        return
    with atomic_checkpoint_folder(target, accelerator.handles) as draft:
        yield draft, target
    if project.automatic_checkpoint_naming and project.total_limit is not None:
        run_on_all_ranks(lambda: _remove_oldest(target.parent, project.total_limit) if dist.get_rank() == 0 else None)


def to_load(accelerator: Any, input_dir: str | os.PathLike[str] | None) -> Path:
    """The folder to load; where none is named, the newest whole one of those that the project names itself.

    Raises:
        ValueError: There is none.
        CheckpointError: It is damaged.
    """
    accelerator.rendezvous.require_every_rank("load_state")
    if input_dir is not None:
        folder = Path(input_dir).expanduser().absolute()
        if not broadcast_from_rank_0(folder.is_dir()):
            raise ValueError(f"Tried to find {folder} but folder does not exist")
        if broadcast_from_rank_0((folder / _UNFINISHED).exists()):
            raise CheckpointError(
                f"A save into `{folder}` did not finish, so its parts may be of different steps (`{_UNFINISHED}` is "
                "there). Use another checkpoint, and a folder of its own for each: that is whole or absent."
            )
        if broadcast_from_rank_0(is_checkpoint(folder)):
            check_checkpoint(folder)
        return folder
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    newest = newest_checkpoint(_numbered(accelerator))
    if newest is None:
        raise ValueError(f"`{_numbered(accelerator)}` holds no checkpoint.")
    return newest


def load_scaler(scaler: torch.amp.GradScaler, folder: Path) -> None:
    """Restore a gradient scaler as it was saved.

    Raises:
        CheckpointError: On every rank: the state was saved without one.
    """
    file = folder / SCALER_NAME
    if not broadcast_from_rank_0(file.is_file()):
        raise CheckpointError(
            f"`{folder}` holds no `{SCALER_NAME}`: it was saved without a gradient scaler, and this run has one. Load "
            "it with the `mixed_precision` that it was saved with."
        )
    scaler.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


@contextmanager
def _marked_until_finished(target: Path) -> Iterator[None]:
    """Mark a folder whose parts may be of different saves meanwhile; after a failure or a kill it stays so."""
    marker, is_first = target / _UNFINISHED, dist.get_rank() == 0
    run_on_all_ranks(lambda: marker.touch() if is_first else None)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # told to all ranks
        failure = error

    def finish() -> None:
        if failure is not None:
            raise CheckpointError(f"`{target}` was not saved: {type(failure).__name__}: {failure}") from failure

    run_on_all_ranks(finish)
    run_on_all_ranks(lambda: marker.unlink() if is_first else None)


def _numbered(accelerator: Any) -> Path:
    """The folder of the checkpoints that the project numbers."""
    return Path(accelerator.project_dir, "checkpoints").expanduser().absolute()


def _holds_other_things(target: Path) -> bool:
    return target.is_dir() and any(target.iterdir()) and not is_checkpoint(target)


def _remove_oldest(folder: Path, limit: int) -> None:
    """Keep the newest; called when the last one is whole."""
    numbers = {path: re.fullmatch(r"checkpoint_(\d+)", path.name) for path in folder.iterdir()}
    found = sorted((int(match[1]), path) for path, match in numbers.items() if match)
    for _, path in found[: max(0, len(found) - limit)]:
        if not remove_checkpoint(path):
            shutil.rmtree(path)
