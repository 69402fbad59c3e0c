"""Which ranks work together? The only file that makes process groups.

Every rank makes every group, in one order. A group lists its ranks by shard index, not by number
(``sort_ranks=False``): the local-rank-major order is not ascending, and DTensor returns wrongly ordered data,
without an error, for a mesh whose order differs from its group's.
"""

from __future__ import annotations

import atexit
import inspect
import os
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from mics_strategy import errors
from mics_strategy.collectives.flat import FlatCollective, Ledger
from mics_strategy.collectives.ops import is_anything_under_way
from mics_strategy.collectives.trail import Trail, first_difference
from mics_strategy.config import ShardConfig
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Place, Span, Topology, topology_from_places

T = TypeVar("T")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How the masters of trained, or of frozen, parameters lie over the ranks.

    Attributes:
        degree: Ranks over which they are sharded.
        index: Which shard this rank holds.
        device_mesh: Labels them; replicas by shards, axes of one rank left out.
        update: Gathers them over what the parameter scope lacks; None where that is nothing.
    """

    degree: int
    index: int
    device_mesh: DeviceMesh
    update: FlatCollective | None


class Mesh:
    """The process groups of one sharded model, by what they carry.

    A collective is None where its span holds one rank: such an axis sends nothing. Gathers and reductions
    have groups of their own, so that one never waits for the other. Models of one process share groups that carry the
    same over the same ranks.

    Args:
        scopes: Ranks and axes of each model state.
        device_type: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, scopes: Scopes, device_type: str) -> None:
        self.scopes = scopes
        self.rank = dist.get_rank()
        self.ledger = Ledger()
        self._collectives: list[FlatCollective] = []
        world = scopes.world_size
        self.has_secondary = scopes.secondary < scopes.params
        self.secondary_span = scopes.span(1, scopes.secondary if self.has_secondary else 1)
        self.gather_params = self._collective("gather", scopes.span(1, scopes.params))
        self.gather_secondary = self._collective("secondary", self.secondary_span)
        self.reduce_grads = self._collective("reduce", scopes.span(1, scopes.grads))
        self.second_scatter = self._collective("second_hop", scopes.span(scopes.grads, scopes.optimizer))
        self.second_reduce = self._collective("second_hop", scopes.span(scopes.optimizer, world))
        self.control = self._collective("control", scopes.span(1, world))
        self.among_shards = self._collective("shard", scopes.span(1, scopes.optimizer))
        self.device_type = device_type
        update = self._collective("update", scopes.span(scopes.params, scopes.optimizer))
        self._device_mesh = self._make_device_mesh(
            scopes.span(1, scopes.optimizer), scopes.span(scopes.optimizer, world)
        )
        index = scopes.span(1, scopes.optimizer).index(self.rank)
        self.trained = Shards(degree=scopes.optimizer, index=index, device_mesh=self._device_mesh, update=update)
        if device_type == "cpu":
            _gloo_meshes.add(self)

    def close(self) -> None:
        """Let go of the groups, which ends the threads of gloo. Not collective; nothing may be under way."""
        for collective in self._collectives:
            if dist.is_initialized():
                with suppress(ValueError):  # of a default group that is gone
                    dist.destroy_process_group(collective.group)
            del collective.group
        self._collectives.clear()
        getattr(self._device_mesh, "_pg_registry", {}).clear()  # torch 2.13; before, it knows groups by name

    def _collective(self, purpose: str, span: Span) -> FlatCollective | None:
        group = self._group(purpose, span)
        return None if group is None else self._collective_over(group, span)

    def _collective_over(self, group: dist.ProcessGroup, span: Span) -> FlatCollective:
        collective = FlatCollective(group, span.name, self.ledger)
        self._collectives.append(collective)
        return collective

    def _group(self, purpose: str, span: Span) -> dist.ProcessGroup | None:
        if span.size == 1:
            return None
        shared = _groups.setdefault(dist.group.WORLD, {})
        if (purpose, span) not in shared:
            for members in span.groups(self.scopes.world_size):
                group = new_group(members, f"mics.{purpose}.{span.name}")
                if self.rank in members:
                    shared[purpose, span] = group
        return shared[purpose, span]

    @property
    def frozen(self) -> Shards:
        """Of frozen parameters: whole where parameters are not sharded, as there is no optimizer to shard them for.

        Labelled over the same ranks as trained ones, so that an operation may have both.
        """
        if self.scopes.params > 1:
            return self.trained
        return Shards(degree=1, index=0, device_mesh=self.trained.device_mesh, update=None)

    def _make_device_mesh(self, shard_span: Span, replicate_span: Span) -> DeviceMesh:
        shard, replicate = self._group("shard", shard_span), self._group("replicate", replicate_span)
        shard_ranks = shard_span.members(self.rank)
        if shard is not None and replicate is not None:
            ranks = torch.tensor([shard_span.members(member) for member in replicate_span.members(shard_ranks[0])])
            return DeviceMesh.from_group(
                [replicate, shard], self.device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
            )
        if replicate is not None:
            ranks = torch.tensor(replicate_span.members(self.rank))
            return DeviceMesh.from_group(replicate, self.device_type, mesh=ranks, mesh_dim_names=("replicate",))
        group = shard if shard is not None else dist.new_group([self.rank], use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.device_type, mesh=torch.tensor(shard_ranks), mesh_dim_names=("shard",))

    def reduce_over_shards(self, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        """The sum or maximum of a scalar over the ranks that hold different shards, in place. No plan has it."""
        return value if self.among_shards is None else self.among_shards.combine(value, is_max=is_max)

    @property
    def _trails(self) -> dict[str, Trail]:
        watched = {
            "gathers": self.gather_params,
            "secondary gathers": self.gather_secondary,
            "updates": self.trained.update,
            "reductions": self.reduce_grads,
            "whole tensors": self.among_shards,
        }
        return {f"{name} over {group.axis}": group.trail for name, group in watched.items() if group is not None}

    @property
    def balance(self) -> int:
        """Adds up to 0 over all ranks while they gather and reduce the same in the same order."""
        return sum(trail.balance for trail in self._trails.values())

    def first_difference(self) -> str:
        """Where ranks have parted, in words. Collective, on the default group."""
        return first_difference(gather_objects(self._trails))


class _Placed(int):
    """A rank that torch 2.11, which sorts the ranks of a group, leaves where it is."""

    place: int

    @override
    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


def new_group(members: list[int], description: str) -> dist.ProcessGroup:
    """A group of `members` in their order."""
    make: Callable[..., dist.ProcessGroup] = dist.new_group
    if "sort_ranks" in inspect.signature(make).parameters:
        return make(members, sort_ranks=False, group_desc=description)
    ranks = [_Placed(member) for member in members]
    for place, rank in enumerate(ranks):
        rank.place = place
    return make(ranks, group_desc=description)


_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, Span], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_gloo_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


@atexit.register
def _close_gloo() -> None:
    """End gloo's threads while the interpreter lives: one that frees a tensor later aborts the process (torch 2.13).

    What is still under way belongs to a job that has failed; closing would wait for it, up to the timeout.
    """
    if not is_anything_under_way():
        for mesh in list(_gloo_meshes):
            mesh.close()
        _groups.clear()


def discover_topology(config: ShardConfig) -> Topology:
    """The explicit topology of `config`, or the one that the ranks' environment describes.

    Cost: one object gather over the world when the topology is not explicit.

    Raises:
        ConfigError: Uneven or cyclic placement of ranks on nodes.
    """
    if isinstance(config.topology, Topology):
        return config.topology
    return topology_from_places(gather_objects(Place(node=node_name())))


def node_name() -> str:
    """A text that is equal on, and only on, the ranks of one node.

    The host and the boot of its kernel, because hosts in containers may share a name; and the launcher's number of the
    node, because a launcher may put several "nodes" on one host.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    number = next((f" {name}={os.environ[name]}" for name in _NODE_VARIABLES if name in os.environ), "")
    return f"{socket.gethostname()} {boot[:8]}{number}"


def gather_objects(value: T) -> list[T]:
    """Every rank's `value`, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(check: Callable[[], T]) -> T:
    """Run a local check; if it raises on any rank, raise on all of them.

    A rank that raises alone leaves the others waiting in their next collective.

    Raises:
        MiCSError: The first rank's error, of the same class, naming the ranks that found it.
    """
    result: T | None = None
    failure: tuple[str, str] | None = None
    own: errors.MiCSError | None = None
    try:
        result = check()
    except errors.MiCSError as error:
        own, failure = error, (type(error).__name__, str(error))
    failures = gather_objects(failure)
    found = [rank for rank, other in enumerate(failures) if other is not None]
    if not found:
        return result  # type: ignore[return-value]
    name, message = failures[found[0]] or ("MiCSError", "")
    where = "" if len(found) == len(failures) else f" (found on rank {', '.join(map(str, found))})"
    raise getattr(errors, name)(message + where) from own


def require_same(values: dict[str, str]) -> None:
    """Refuse a job whose ranks disagree.

    Args:
        values: What must be equal, by a name that the error can show.

    Raises:
        ConfigError: On every rank, naming the value and the two ranks that differ.
    """
    everyone = gather_objects(values)
    for name, value in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other.get(name) != value:
                raise errors.ConfigError(
                    f"`{name}` differs between ranks: {value} on rank 0, {other.get(name)} on rank {rank}. "
                    "Give every rank the same script and the same configuration."
                )
