"""How does a sharded model become a state dict, and back?

Everything has a name: parameters and buffers that of the plain model (``model.<name>``), states of the optimizer
number i that of their parameter (``optimizer_i.state.<name>.<key>``), groups their options and the names of their
parameters. Whoever knows the plain model can read it: torch's own tools, FSDP2, Lightning's consolidation. What an
optimizer keeps besides has names of its own; see `kept`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mics_strategy.checkpoint import rank_local
from mics_strategy.checkpoint.replicas import ReplicaId
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.optimizer.quantized import is_quantized, to_local
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

StateDict = dict[str, Any]
Optimizers = Sequence[Optimizer] | Mapping[str, Optimizer]
MODEL, OPTIMIZER = "model", "optimizer"
_SHOWN = 5  # names in an error


def by_key(optimizers: Optimizers) -> dict[str, Optimizer]:
    """Optimizers by the names under which their states are kept: their own, or ``optimizer_<position>``."""
    if isinstance(optimizers, Mapping):
        return dict(optimizers)
    return {f"{OPTIMIZER}_{position}": optimizer for position, optimizer in enumerate(optimizers)}


@dataclass(slots=True)
class LocalState:
    """What one rank holds of the state.

    Attributes:
        values: Nested dicts; leaves are DTensors, plain tensors and other values.
        copies: Of plain tensors that not all ranks hold, by flat name: which of the equal copies this one is.
    """

    values: StateDict
    copies: dict[str, ReplicaId] = field(default_factory=dict)

    def copy_of(self, name: str, value: Any) -> ReplicaId:
        """Which of the equal copies of a leaf this rank holds."""
        if isinstance(value, DTensor):
            return _copy_of(value)
        return self.copies.get(name) or ReplicaId(dist.get_rank(), dist.get_world_size())

    def add(self, path: tuple[str, str, str, str], value: Any, copy: ReplicaId) -> None:
        """Add a state as this rank keeps it.

        Args:
            path: The optimizer's key, the parameter's name, the state's, and the place.
            value: The state.
            copy: Which of the equal copies it is.
        """
        inside = self.values.setdefault(rank_local.KEY, {})
        for step in path[:-1]:
            inside = inside.setdefault(step, {})
        inside[path[-1]] = rank_local.RankLocalState(value)
        self.copies[".".join((rank_local.KEY, *path))] = copy


def local_state(sharded: Sharded, optimizers: Optimizers, model_state: StateDict | None = None) -> LocalState:
    """Name all that this rank holds. Nothing is copied.

    Args:
        sharded: The model.
        optimizers: In their order, or by name.
        model_state: In place of the model's own state dict.

    Raises:
        CheckpointError: An optimizer of which something has no name, or no known place.
    """
    names = names_of(sharded.model)
    state = sharded.model.state_dict() if model_state is None else model_state
    found = LocalState({MODEL: {name: _detached(value) for name, value in state.items()}})
    for key, optimizer in by_key(optimizers).items():
        check_known(optimizer)
        states: StateDict = {}
        for parameter, state in optimizer.state.items():
            name = _name(names, parameter, optimizer)
            owner = sharded.owner_of(optimizer, parameter)
            by_place = [each for each, value in state.items() if rank_local.is_rank_local(value, parameter, owner)]
            states[name] = {k: value for k, value in state.items() if k not in by_place or is_quantized(value)}
            if owner is not None:
                found.copies.update({f"{key}.state.{name}.{each}": ReplicaId(*sharded.replica) for each in state})
            copy = (
                _copy_of(parameter) if owner is None and isinstance(parameter, DTensor) else ReplicaId(*sharded.replica)
            )
            for each in by_place:
                found.add((key, name, each, rank_local.shard_key(parameter, owner)), state[each], copy)
        found.values[key] = {
            "state": states,
            "param_groups": [_group(names, g, optimizer) for g in optimizer.param_groups],
        }
    return found


def names_of(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its id; of tied ones, the first."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _group(names: Mapping[int, str], group: StateDict, optimizer: Optimizer) -> StateDict:
    params = [_name(names, parameter, optimizer) for parameter in group["params"]]
    return {**{key: value for key, value in group.items() if key != "params"}, "params": params}


def _name(names: Mapping[int, str], parameter: Any, optimizer: Optimizer) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} steps on a tensor {list(parameter.shape)} that is no parameter of the model, "
            "so its states have no name. Register it as a parameter of the model, or save that optimizer yourself."
        )
    return names[id(parameter)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _copy_of(tensor: DTensor) -> ReplicaId:
    """By the axes of the mesh over which it is repeated."""
    mesh, index, count = tensor.device_mesh, 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            index, count = index * mesh.size(axis) + mesh.get_local_rank(axis), count * mesh.size(axis)
    return ReplicaId(index, count)


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What a checkpoint holds.

    Attributes:
        entries: torch's description of each, by its flat name.
        optimizer_classes: Of the optimizers that were saved, where that is known.
    """

    entries: Mapping[str, Any]
    optimizer_classes: Sequence[str] = ()


def check_known(optimizer: Optimizer) -> None:
    """Refuse states of which nobody knows how they are read and written.

    Raises:
        CheckpointError: Naming the kind.
    """
    for states in optimizer.state.values():
        others = [(key, value) for key, value in states.items() if not is_quantized(value)]
        for key, leaf in ((key, leaf) for key, value in others for leaf in tree_leaves(value)):
            if isinstance(leaf, torch.Tensor) and type(to_local(leaf)) not in (torch.Tensor, nn.Parameter):
                raise CheckpointError(
                    f"`{key}` of {type(optimizer).__name__} holds a {type(to_local(leaf)).__name__}, of which it "
                    "is not known how it is saved. Save the weights only, or each rank's own "
                    "`optimizer.state_dict()`, which fits the same ranks and scopes."
                )


class LoadTarget:
    """Memory for what a checkpoint holds, and the way from there into the model and its optimizers.

    Parameters and buffers are read into their own memory, states of optimizers into new tensors, each in this rank's
    share only.

    Args:
        sharded: The model.
        optimizers: In the order in which they were saved, or by the same names.
        saved: What the checkpoint holds.
        strict: Whether what is missing or superfluous is an error.
        has_model: Whether the model is read, too.

    Raises:
        CheckpointError: The checkpoint is of another model or other optimizers.
    """

    def __init__(
        self,
        sharded: Sharded,
        optimizers: Optimizers,
        saved: CheckpointContents,
        *,
        strict: bool,
        has_model: bool = True,
    ) -> None:
        self._sharded = sharded
        self._optimizers = by_key(optimizers)
        self._saved = saved.entries
        self._optimizer_classes = saved.optimizer_classes
        self._origins: dict[tuple[str, str], rank_local.StateSource] = {}
        self._strict = strict
        self._names = names_of(sharded.model)
        self.values: StateDict = {MODEL: self._of_model() if has_model else {}}
        for position, key in enumerate(self._optimizers):
            self.values[key] = self._of_optimizer(position, key)

    def _of_model(self) -> StateDict:
        own = self._sharded.model.state_dict(keep_vars=True)
        saved = {name.removeprefix(f"{MODEL}."): entry for name, entry in self._saved.items() if _is_in(name, MODEL)}
        if self._strict:
            _check_same_names("the model", set(own), set(saved))
        for name in set(own) & set(saved):
            shape = getattr(saved[name], "size", None)
            if isinstance(own[name], torch.Tensor) and shape != own[name].shape:
                raise CheckpointError(
                    f"`{name}` has shape {list(own[name].shape)} in the model and {list(shape or ())} in the "
                    "checkpoint. Build the model with the configuration that it was saved with."
                )
        return {name: _detached(value) for name, value in own.items() if name in saved}

    def _of_optimizer(self, position: int, key: str) -> StateDict:
        optimizer = self._optimizers[key]
        if not any(_is_in(name, key) for name in self._saved):
            count = sum(name.endswith(".param_groups.0.params") for name in self._saved)
            raise CheckpointError(
                f"The checkpoint holds no `{key}`; it was saved with {count} optimizers. Pass as many as there were, "
                "in the same order."
            )
        states: StateDict = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = _name(self._names, parameter, optimizer)
                prefix = f"{key}.state.{name}."
                saved = [key for key in self._saved if key.startswith(prefix)]
                owner = self._sharded.owner_of(optimizer, parameter)
                if owner in (None, self._sharded.index):
                    exact = self._kept(position, optimizer, rank_local.StateSource(key, name, parameter, owner))
                    rooms = {k.removeprefix(prefix): _empty_like_saved(self._saved[k], parameter, owner) for k in saved}
                    if rooms or exact:
                        states[name] = {k: room for k, room in rooms.items() if k not in exact}
        return {"state": states, "param_groups": self._groups(f"{key}.param_groups")}

    def _kept(self, position: int, optimizer: Optimizer, origin: rank_local.StateSource) -> set[str]:
        """Ask for what was saved by place; the states of which that is all that is needed."""
        are_quantized = rank_local.quantizes_like(optimizer, position, self._optimizer_classes)
        wanted = origin.request(self._saved, are_quantized=are_quantized)
        if wanted:
            self._origins[origin.optimizer, origin.name] = origin
            self.values.setdefault(rank_local.KEY, {}).setdefault(origin.optimizer, {})[origin.name] = wanted
        return {state for state, places in wanted.items() if all(map(origin.is_exact, places))}

    def _groups(self, key: str) -> list[StateDict]:
        groups: dict[int, StateDict] = {}
        for name, entry in self._saved.items():
            if _is_in(name, key):
                number, _, option = name.removeprefix(f"{key}.").partition(".")
                groups.setdefault(int(number), {})[option] = _empty_like_saved(entry, None, None)
        return [groups[number] for number in sorted(groups)]

    def optimizer_states(self) -> list[StateDict]:
        """What was read for each optimizer, as its own state dict.

        Raises:
            CheckpointError: Groups of an optimizer that do not fit the saved ones.
        """
        for (key, name), origin in self._origins.items():
            states = self.values[key]["state"].setdefault(name, {})
            for state, places in self.values[rank_local.KEY][key][name].items():
                [(place, loaded)] = places.items()
                states[state] = origin.restore(place, loaded, states.get(state))
        return [self._numbered(optimizer, self.values[key]) for key, optimizer in self._optimizers.items()]

    def apply(self, optimizer_states: list[StateDict]) -> None:
        """Put what was read where it belongs. Parameters and tensors among the buffers are there already."""
        model = self._sharded.model
        others = {name: value for name, value in self.values[MODEL].items() if not isinstance(value, torch.Tensor)}
        if others:
            model.load_state_dict(others, strict=False)
        self._sharded.mark_modified()
        for optimizer, states in zip(self._optimizers.values(), optimizer_states, strict=True):
            optimizer.load_state_dict(states)

    def _numbered(self, optimizer: Optimizer, loaded: StateDict) -> StateDict:
        """A state dict as this optimizer's own: parameters by number, its own groups with the saved options."""
        saved_in = {name: number for number, group in enumerate(loaded["param_groups"]) for name in group["params"]}
        states: dict[int, StateDict] = {}
        groups: list[StateDict] = []
        own: set[str] = set()
        for group in optimizer.param_groups:
            names = [_name(self._names, parameter, optimizer) for parameter in group["params"]]
            first = len(own)
            own.update(names)
            states.update({first + i: loaded["state"][name] for i, name in enumerate(names) if name in loaded["state"]})
            sources = sorted({saved_in[name] for name in names if name in saved_in})
            if len(sources) > 1 and self._strict:
                raise CheckpointError(
                    f"A group of {type(optimizer).__name__} holds parameters of the saved groups {sources}, whose "
                    "options may differ. Make the groups as they were, or load with `strict=False`: the first's count."
                )
            options = loaded["param_groups"][sources[0]] if sources else group
            groups.append({**options, "params": list(range(first, len(own)))})
        if self._strict:
            _check_same_names(type(optimizer).__name__, own, set(saved_in))
        return {"state": states, "param_groups": groups}


def empty_model_like_saved(sharded: Sharded, metadata: Metadata) -> StateDict:
    """New memory for a saved model, by names: this rank's share where the model cuts the tensor, None for no tensor."""
    own = sharded.model.state_dict(keep_vars=True)
    saved = {
        name.removeprefix(f"{MODEL}."): e for name, e in metadata.state_dict_metadata.items() if _is_in(name, MODEL)
    }
    return {name: _empty_like_saved(entry, own.get(name), None) for name, entry in saved.items()}


def _is_in(name: str, key: str) -> bool:
    return name.startswith(f"{key}.")


def _check_same_names(whose: str, own: set[str], saved: set[str]) -> None:
    for found, what in ((own - saved, "not in the checkpoint"), (saved - own, "only in the checkpoint")):
        if found:
            rest = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise CheckpointError(
                f"Of {whose}, {', '.join(sorted(found)[:_SHOWN])}{rest}: {what}. Build model and optimizer as they "
                "were saved, or load with `strict=False`."
            )


def _empty_like_saved(entry: Any, parameter: torch.Tensor | None, owner: int | None) -> Any:
    """Memory for a saved value: this rank's share, where it is cut as its parameter is; None for what is no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if isinstance(parameter, ShardedParameter) and owner is None and entry.size == parameter.shape and parameter.dim():
        return parameter.like_self(torch.empty_like(parameter.local, dtype=dtype))
    return torch.empty(entry.size, dtype=dtype)
