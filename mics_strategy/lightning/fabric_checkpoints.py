"""What does `fabric.save` write of sharded models, and how does `fabric.load` bring it back in place?

By default one ordinary file with the keys of the user's state, whole tensors and plain names: what `fabric.save` writes
with ``strategy="ddp"``. With ``state_dict_type="sharded"`` it is a folder to which every rank writes its share, of one
sharded model and its optimizers; which of the user's keys they had is kept beside them. Either kind is read, whatever
is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from mics_strategy import (
    ConfigError,
    OpenCheckpoint,
    Sharded,
    finish_saves,
    load_weights,
    newest_checkpoint,
    save_checkpoint,
)
from mics_strategy.lightning.checkpoint_file import CheckpointFileMixin, as_path, check_not_folder, is_local
from mics_strategy.lightning.consensus import run_on_all_ranks

Filters = Mapping[str, Callable[[str, Any], bool]]
_KEYS = "mics_strategy.fabric"  # in a folder: which keys of the user's state the model and the optimizers had


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class FabricCheckpointMixin(CheckpointFileMixin):
    """The part of the Fabric strategy that saves and restores. Mixed into a Lightning strategy."""

    _state_dict_type: str
    _saves_asynchronously: bool

    def handle_of(self, of: Any) -> Sharded | None:
        """The handle of a sharded model, or of the one that an optimizer steps on; None for anything else."""
        raise NotImplementedError

    @property
    def handles(self) -> list[Sharded]:
        """Of all models that this strategy has sharded and that are still there."""
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
        """Let rank 0 write one file, or every rank its share of a folder; a failure is raised on every rank.

        Args:
            path: Rank 0's counts.
            state: Models, optimizers, other objects with states, and plain values; the same keys on all ranks.
            storage_options: For a checkpoint plug-in that takes them.
            filter: By key of `state`, which entries of its state dict are saved.

        Raises:
            TypeError: `storage_options` for a checkpoint plug-in that has none, or for a folder.
            IsADirectoryError: `path` is a directory, and one file is to be written.
            ConfigError: A folder for other than one sharded model, or for a part of an optimizer.
            CheckpointError: A rank could not write; its own error is raised on it.

        Cost:
            One file: all whole tensors on rank 0's CPU. A folder: this rank's share.
        """
        path, expected = self.broadcast((as_path(path), list(state)))
        run_on_all_ranks(lambda: _check_keys(list(state), expected))
        filters = filter or {}
        if self._state_dict_type == "sharded":
            self._save_folder(path, state, storage_options, filters)
            return
        whole = {key: self._whole(value) for key, value in state.items()}
        self.write_file(_filtered(whole, filters), path, storage_options)

    def _whole(self, value: Any) -> Any:
        """The state of one object, whole on rank 0. Collective."""
        handle = self.handle_of(value)
        if handle is None:
            return value.state_dict() if isinstance(value, _Stateful) else value
        if isinstance(value, Optimizer):
            return handle.full_optimizer_state_dict(value)
        return handle.full_state_dict()

    def _save_folder(self, path: str | Path, state: dict[str, Any], storage_options: Any, filters: Filters) -> None:
        check_not_folder(path, storage_options)
        models, optimizers = self._sharded_in(state), _optimizers_in(state)
        parts = sorted(set(filters) & set(optimizers))
        if parts:
            raise ConfigError(
                f"`filter={{{parts[0]!r}: ...}}` asks for a part of an optimizer, which cannot be stepped on. Leave "
                f"{parts[0]!r} out of the state, or use `state_dict_type='full'`."
            )
        ((key, sharded),) = _only_one(models, "saved").items()
        rest = {name: value for name, value in state.items() if name not in models and name not in optimizers}
        extra = _filtered({name: self._whole(value) for name, value in rest.items()}, filters)
        sharded.synchronize_buffers()
        part = _filtered({key: sharded.model.state_dict()}, filters).get(key, {}) if key in filters else None
        save_checkpoint(
            path,
            sharded,
            list(optimizers.values()),
            {**extra, _KEYS: {"model": key, "optimizers": list(optimizers)}},
            model_state=part,
            asynchronous=self._saves_asynchronously,
        )

    def _sharded_in(self, state: Mapping[str, Any]) -> dict[str, Sharded]:
        found = {key: self.handle_of(value) for key, value in state.items() if isinstance(value, nn.Module)}
        return {key: handle for key, handle in found.items() if handle is not None}

    # -- loading ----------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(  # type: ignore[override]
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore objects in place from a file or folder, written by any number of ranks, by this strategy or another.

        Args:
            path: Rank 0's counts. A folder that holds sharded checkpoints means the newest whole one.
            state: Objects by key; or one model, whose weights alone are at `path`; or one optimizer; or nothing.
            strict: Whether keys of `state`, and names of the model, must all be there.
            weights_only: As `torch.load` takes it.

        Returns:
            What was not restored. Its tensors are in memory, whole.

        Raises:
            KeyError: `strict`, and the checkpoint has no such key.
            CheckpointError: It cannot be read, or is another model's.
            ConfigError: A folder that is to be read without a sharded model.
        """
        path = self.broadcast(as_path(path))
        for each in self.handles:
            finish_saves(each)
        if is_local(path) and self.broadcast(Path(path).is_dir()):
            return self._load_folder(Path(path), state, strict, weights_only is not False)
        handle = self.handle_of(state)
        is_plain = type(self.checkpoint_io) is self.framework.plain_checkpoint_io and is_local(path)
        if handle is not None and isinstance(state, nn.Module) and is_plain:
            load_weights(path, handle, strict=strict, weights_only=weights_only is not False)
            return {}
        found = run_on_all_ranks(lambda: self.read_file(path, weights_only, "`fabric.load(..., weights_only=False)`"))
        if isinstance(state, nn.Module | Optimizer):
            self._restore({"": state}, "", found, strict)
            return {}
        return cast("dict[str, Any]", _in_memory(self._restore_all(state or {}, found, strict)))

    def _restore_all(self, state: dict[str, Any], found: dict[str, Any], strict: bool) -> dict[str, Any]:
        """Restore what `found` has, in place; the rest of it."""
        _check_none_missing(state, found, strict)
        for key in [key for key in state if key in found]:
            self._restore(state, key, found[key], strict)
        return {key: value for key, value in found.items() if key not in state}

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
            what = f"a {type(state).__name__}" if state else "no state"
            raise ConfigError(
                f"`{path}` is a folder, which is read into a sharded model, and {what} was given. Pass `{{'model': "
                "model}` with a model that was set up, or make an ordinary file of it with `mics export`."
            )
        opened = OpenCheckpoint(path, weights_only=weights_only)
        extra = dict(opened.extra)
        models, optimizers = self._sharded_in(state), _optimizers_in(state)
        others = {key: value for key, value in state.items() if key not in models and key not in optimizers}
        in_order = {"model": next(iter(models), None), "optimizers": list(optimizers)[: opened.num_optimizers]}
        saved = extra.pop(_KEYS, in_order)
        _check_none_missing(_only_one(models, "loaded") if models else (), (saved["model"],), strict)
        _check_none_missing(optimizers, saved["optimizers"], strict)
        _check_none_missing(others, extra, strict)
        chosen = _first(saved["optimizers"], optimizers)
        model = models.get(saved["model"])
        sharded = model if model is not None or not chosen else self.handle_of(chosen[0])
        if sharded is not None:
            opened.load(sharded, chosen, strict=strict, has_model=model is not None)
        rest = self._restore_all(others, extra, strict)
        state.update(others)
        return rest


def _optimizers_in(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    return {key: value for key, value in state.items() if isinstance(value, Optimizer)}


def _only_one(models: dict[str, Sharded], done: str) -> dict[str, Sharded]:
    if len(models) != 1:
        raise ConfigError(
            f"A folder holds one sharded model, and the state to be {done} has {len(models)} "
            f"({', '.join(map(repr, models)) or 'none was set up'}). Use a folder for each model, or "
            "`state_dict_type='full'`."
        )
    return models


def _first(saved: list[str], optimizers: dict[str, Optimizer]) -> list[Optimizer]:
    """Those of the user's optimizers that were saved, in that order."""
    wanted = [key for key in saved if key in optimizers]
    if wanted != saved[: len(wanted)]:
        raise ConfigError(
            f"The state has the optimizers {wanted} of the saved {saved}, which are read in their order. Add those "
            "before the last one."
        )
    return [optimizers[key] for key in wanted]


def _filtered(states: dict[str, Any], filters: Filters) -> dict[str, Any]:
    """As Lightning filters: entries of the dicts that have a filter; a dict of which nothing is left is left out."""
    found: dict[str, Any] = {}
    for key, value in states.items():
        if key not in filters or not isinstance(value, dict):
            found[key] = value
        elif kept := {name: entry for name, entry in value.items() if filters[key](name, entry)}:
            found[key] = kept
    return found


def _check_keys(keys: list[str], expected: list[str]) -> None:
    if keys != expected:
        raise ConfigError(
            f"The state to be saved has the keys {keys} here and {expected} on rank 0. Give every rank the same keys, "
            "in the same order: collecting a model is done by all ranks together."
        )


def _check_none_missing(wanted: Iterable[str], found: Collection[Any], strict: bool) -> None:
    missing = [key for key in wanted if key not in found]
    if strict and missing:
        raise KeyError(
            f"The requested state contains a key {missing[0]!r} that does not exist in the loaded checkpoint, which "
            f"has {sorted(map(str, found))}. Leave it out, or load with `strict=False`."
        )


def _in_memory(value: Any) -> Any:
    """A copy of the tensors in `value`: the file that they are mapped from may be overwritten later."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
