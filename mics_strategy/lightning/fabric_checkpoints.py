"""Checkpoints of Fabric: `fabric.save` and `fabric.load` of sharded models.

By default a checkpoint is one ordinary file with the keys of the user's state, full tensors and unsharded names, like
the file of ``strategy="ddp"``. With ``state_dict_type="sharded"`` it is a folder of one sharded model and its
optimizers, to which every rank writes its shards. The keys that the model and the optimizers had in the user's state
are also saved. Both formats load, whichever is saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed import is_initialized
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from mics_strategy import (
    CheckpointError,
    ConfigError,
    OpenCheckpoint,
    Sharded,
    finish_saves,
    load_weights,
    newest_checkpoint,
    save_checkpoint,
)
from mics_strategy.checkpoint.whole_tensors import whole_tensors
from mics_strategy.comm.consensus import run_on_all_ranks
from mics_strategy.lightning.checkpoint_file import CheckpointFileMixin, as_path, check_not_folder, is_local

Filters = Mapping[str, Callable[[str, Any], bool]]
T = TypeVar("T")
_KEYS = "mics_strategy.fabric"  # entry of a folder: keys of the model and the optimizers in the user's state


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class FabricCheckpointMixin(CheckpointFileMixin):
    """Saving and loading of the Fabric strategy. Mixed into a Lightning strategy."""

    _state_dict_type: str
    _saves_asynchronously: bool

    def handle_of(self, target: Any) -> Sharded | None:
        """Return the handle of a model or of an optimizer's model; None for others."""
        raise NotImplementedError

    @property
    def handles(self) -> list[Sharded]:
        """Handles of all models that this strategy has sharded and that still exist."""
        raise NotImplementedError

    # -- saving -----------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(  # type: ignore[override]  # the Trainer's, for a type checker
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filters | None = None,
    ) -> None:
        """Save one file on rank 0, or a folder on all ranks. Collective.

        Args:
            path: Path of the checkpoint. Rank 0's path is used.
            state: Models, optimizers, other stateful objects and plain values, with equal keys on all ranks.
            storage_options: Options for a checkpoint plug-in that supports them.
            filter: Per key of `state`, a function that selects the entries of its state dict to save.

        Raises:
            TypeError: `storage_options` are given for a plug-in that does not support them, or for a folder.
            IsADirectoryError: `path` is a directory, but one file is to be written.
            ConfigError: A folder is requested for zero or several sharded models, or for a part of an optimizer.
            CheckpointError: A rank could not write; that rank raises its own error. Raised on every rank.

        Cost:
            One file: memory for all full tensors on rank 0's CPU. A folder: this rank's shards.
        """
        path, expected = self.broadcast((as_path(path), list(state)))
        _run_on_all_ranks(lambda: _check_keys(list(state), expected))
        filters = filter or {}
        if self._state_dict_type == "sharded":
            self._save_folder(path, state, storage_options, filters)
            return
        states = {key: self._whole(value) for key, value in state.items()}
        full_state = whole_tensors(lambda: _filtered(states, filters))
        self.write_file(full_state, path, storage_options)

    def _whole(self, value: Any) -> Any:
        """Return the state of one object, full on rank 0. Collective."""
        handle = self.handle_of(value)
        if handle is None:
            return value.state_dict() if isinstance(value, _Stateful) else value
        if isinstance(value, Optimizer):
            return handle.full_optimizer_state_dict(value)
        return handle.full_state_dict()

    def _save_folder(self, path: str | Path, state: dict[str, Any], storage_options: Any, filters: Filters) -> None:
        check_not_folder(path, storage_options)
        models, optimizers = self._sharded_in(state), _optimizers_in(state)
        partial_optimizers = sorted(set(filters) & set(optimizers))
        if partial_optimizers:
            raise ConfigError(
                f"`filter={{{partial_optimizers[0]!r}: ...}}` selects a part of an optimizer, but a folder stores "
                f"optimizers in full only. Leave {partial_optimizers[0]!r} out of the state, or use "
                "`state_dict_type='full'`."
            )
        ((key, sharded),) = _check_single_model(models, "saved").items()
        rest = {name: value for name, value in state.items() if name not in models and name not in optimizers}
        extra = _filtered({name: self._whole(value) for name, value in rest.items()}, filters)
        sharded.buffers.synchronize()
        model_state = _filtered({key: sharded.model.state_dict()}, filters).get(key, {}) if key in filters else None
        save_checkpoint(
            path,
            sharded,
            list(optimizers.values()),
            {**extra, _KEYS: {"model": key, "optimizers": list(optimizers)}},
            model_state=model_state,
            asynchronous=self._saves_asynchronously,
        )

    def _sharded_in(self, state: Mapping[str, Any]) -> dict[str, Sharded]:
        handles = {key: self.handle_of(value) for key, value in state.items() if isinstance(value, nn.Module)}
        return {key: handle for key, handle in handles.items() if handle is not None}

    # -- loading ----------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(  # type: ignore[override]
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore objects in place from a file or a folder of this or another strategy.

        Args:
            path: Path of the checkpoint. Rank 0's path is used. In a folder with several sharded checkpoints, the
                newest intact one is loaded.
            state: Objects by key; or one model, for a file of weights only; or one optimizer; or None.
            strict: Whether all keys of `state` and all names of the model must be in the checkpoint.
            weights_only: Same as in `torch.load`.

        Returns:
            Entries that were not restored, with full tensors in memory.

        Raises:
            KeyError: A key is missing in the checkpoint, and `strict` is set.
            CheckpointError: The checkpoint cannot be read, or belongs to another model.
            ConfigError: A folder is to be read without a sharded model.
        """
        path = self.broadcast(as_path(path))
        for sharded in self.handles:
            finish_saves(sharded)
        if is_local(path) and self.broadcast(Path(path).is_dir()):
            return self._load_folder(Path(path), state, strict, weights_only is not False)
        handle = self.handle_of(state)
        is_plain = type(self.checkpoint_io) is self.framework.plain_checkpoint_io and is_local(path)
        if handle is not None and isinstance(state, nn.Module) and is_plain:
            load_weights(path, handle, strict=strict, weights_only=weights_only is not False)
            return {}
        saved = _run_on_all_ranks(lambda: self.read_file(path, weights_only, "`fabric.load(..., weights_only=False)`"))
        if isinstance(state, nn.Module | Optimizer):
            self._restore({"": state}, "", saved, strict)
            return {}
        return cast("dict[str, Any]", _in_memory(self._restore_all(state or {}, saved, strict)))

    def _restore_all(self, state: dict[str, Any], saved: dict[str, Any], strict: bool) -> dict[str, Any]:
        """Restore the saved objects in place; return the other entries."""
        _check_none_missing(state, saved, strict)
        for key in [key for key in state if key in saved]:
            self._restore(state, key, saved[key], strict)
        return {key: value for key, value in saved.items() if key not in state}

    def _restore(self, state: dict[str, Any], key: str, saved: Any, strict: bool) -> None:
        value = state[key]
        handle = self.handle_of(value)
        if handle is not None and isinstance(value, Optimizer):
            handle.load_full_optimizer_state_dict(value, saved)
        elif handle is not None:
            handle.load_full_state_dict(saved, strict=strict)
        elif isinstance(value, nn.Module):
            value.load_state_dict(saved, strict=strict)
        elif isinstance(value, _Stateful):
            value.load_state_dict(_in_memory(saved))
        else:
            state[key] = _in_memory(saved)

    def _load_folder(self, path: Path, state: Any, strict: bool, weights_only: bool) -> dict[str, Any]:
        path = newest_checkpoint(path) or path
        if isinstance(state, nn.Module) and (handle := self.handle_of(state)) is not None:
            load_weights(path, handle, strict=strict, weights_only=weights_only)
            return {}
        if not state or isinstance(state, nn.Module | Optimizer):
            state_type = f"a {type(state).__name__}" if state else "no state"
            raise ConfigError(
                f"`{path}` is a folder. Folders load into a sharded model, but {state_type} was given. Pass "
                "`{'model': model}` with a model that was set up, or convert the folder to ordinary files with "
                "`mics export`."
            )
        checkpoint = OpenCheckpoint(path, weights_only=weights_only)
        extra = dict(checkpoint.extra)
        models, optimizers = self._sharded_in(state), _optimizers_in(state)
        others = {key: value for key, value in state.items() if key not in models and key not in optimizers}
        default_keys = {"model": next(iter(models), None), "optimizers": list(optimizers)[: checkpoint.num_optimizers]}
        saved = extra.pop(_KEYS, default_keys)
        _check_none_missing(_check_single_model(models, "loaded") if models else (), (saved["model"],), strict)
        _check_none_missing(optimizers, saved["optimizers"], strict)
        _check_none_missing(others, extra, strict)
        restored = _in_saved_order(saved["optimizers"], optimizers)
        model = models.get(saved["model"])
        sharded = model if model is not None or not restored else self.handle_of(restored[0])
        if sharded is not None:
            checkpoint.load(sharded, restored, strict=strict, has_model=model is not None)
        rest = self._restore_all(others, extra, strict)
        state.update(others)
        return rest


def _optimizers_in(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    return {key: value for key, value in state.items() if isinstance(value, Optimizer)}


def _check_single_model(models: dict[str, Sharded], operation: str) -> dict[str, Sharded]:
    if len(models) != 1:
        raise ConfigError(
            f"A folder holds exactly one sharded model, but the state to be {operation} has {len(models)} "
            f"({', '.join(map(repr, models)) or 'none was set up'}). Use one folder per model, or "
            "`state_dict_type='full'`."
        )
    return models


def _in_saved_order(saved: list[str], optimizers: dict[str, Optimizer]) -> list[Optimizer]:
    """Return the user's optimizers that were saved, in the saved order."""
    requested = [key for key in saved if key in optimizers]
    if requested != saved[: len(requested)]:
        raise ConfigError(
            f"The state has the optimizers {requested} of the saved {saved}. Optimizers load in the saved order "
            "without gaps. Add the missing ones before the last."
        )
    return [optimizers[key] for key in requested]


def _filtered(states: dict[str, Any], filters: Filters) -> dict[str, Any]:
    """Filter the entries of dicts, as Lightning does; empty dicts are omitted."""
    filtered: dict[str, Any] = {}
    for key, value in states.items():
        if key not in filters or not isinstance(value, dict):
            filtered[key] = value
        elif entries := {name: entry for name, entry in value.items() if filters[key](name, entry)}:
            filtered[key] = entries
    return filtered


def _run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run an action as in `run_on_all_ranks`. Before `fabric.launch()` this process is alone."""
    return run_on_all_ranks(action, CheckpointError) if is_initialized() else action()


def _check_keys(keys: list[str], expected: list[str]) -> None:
    if keys != expected:
        raise ConfigError(
            f"The state to be saved has the keys {keys} on this rank and {expected} on rank 0. Pass the same keys in "
            "the same order on every rank, because all ranks collect a model together."
        )


def _check_none_missing(requested: Iterable[str], available: Collection[Any], strict: bool) -> None:
    missing = [key for key in requested if key not in available]
    if strict and missing:
        raise KeyError(
            f"The requested state contains a key {missing[0]!r} that does not exist in the loaded checkpoint, which "
            f"has {sorted(map(str, available))}. Leave the key out, or load with `strict=False`."
        )


def _in_memory(value: Any) -> Any:
    """Copy the tensors of a value, because their file may be overwritten later."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
