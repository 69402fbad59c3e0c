"""Process groups, transports, threads and scratch memory of one sharded model.

The only module that makes process groups.

All ranks make the groups of the same spans, in one order. A group lists its ranks by shard index, not by rank number
(``sort_ranks=False``): the local-rank-major order is not ascending, and DTensor returns wrongly ordered data,
without an error, for a mesh whose order differs from its group's.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from typing_extensions import override

from mics_strategy import errors
from mics_strategy.comm import peer_memory
from mics_strategy.comm.communicator import AnyCommunicator, Communicator, SizeDispatch
from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.kernel_warmup import KernelWarmup
from mics_strategy.comm.queue import CommThread, RouteQueue
from mics_strategy.comm.ranges import Ranges
from mics_strategy.comm.route import Route
from mics_strategy.comm.traffic import TrafficLog
from mics_strategy.comm.transport import (
    GlooTransport,
    Transport,
    backend_of,
    cancel_group,
    is_point_to_point,
    make_transport,
    timeout_of,
)
from mics_strategy.comm.watched_work import call_watch
from mics_strategy.comm.work import has_pending_work
from mics_strategy.comm.workspace import Workspace
from mics_strategy.scopes import STREAM_OF, STREAMS, Scopes
from mics_strategy.topology import Span

_MESH_ROLES = ("shard", "replicate")
_FAMILIES = {**STREAMS, "mesh": _MESH_ROLES}  # roles whose ranks share a group
# A bound device makes a group a split of the default one, in which all ranks take part: one for the groups of a span
# if each rank makes its own alone, else one for each group. Before 2.14 torch names a group that its members alone make
# by the number of groups that a rank is in, which differs between ranks after a user's `new_group([0, 1])`.
_ONLY_MEMBERS_MAKE_GROUPS = torch.__version__ >= "2.14"


class CommResources:
    """Makes the communicators of one sharded model, and closes what they use.

    All-gathers of parameters, reduce-scatters of gradients in a backward, the second hop of gradients and outer steps
    have their own groups and queues, so that none waits for another. The models of one process share groups over the
    same ranks: those of one role, and elsewhere than on gloo those of one stream. There control messages use the
    default group.

    Args:
        world_size: Ranks of the job.
        device: Device of the model, with its index where there are several.

    Attributes:
        rank: Rank of this process.
        number: Number of models that this job has sharded before.
        process_id: Process that has the communication threads. A forked child has none of them.
        is_point_to_point: Whether tensors are sent point to point instead of by the backend's collectives.
        watchdog: Finds out whether ranks have diverged.
        call_watch: Lets it do so while a call of torch blocks the host.
        traffic_log: Log of the collectives that were submitted.
        ranges: Ranges of the model.
        workspaces: Scratch memory by queue.
    """

    def __init__(self, world_size: int, device: torch.device | str) -> None:
        self.world_size = world_size
        self.rank = dist.get_rank()
        self.device = torch.device(device)
        self.is_point_to_point = is_point_to_point(dist.group.WORLD, self.device.type)
        self.traffic_log = TrafficLog()
        self.ranges = Ranges()
        self.number = _count_models()
        self.process_id = os.getpid()
        self.call_watch = call_watch(self.rank)
        self.call_watch.records.begin_model()
        self.watchdog = self.call_watch.watchdog
        self.watchdog.num_models = self.number + 1
        self.workspaces = {stream: Workspace() for stream in STREAMS}
        self._transports: list[Transport] = []
        self._warmups: list[KernelWarmup] = []
        self._threads: dict[str, CommThread] = {}
        self._device_meshes: list[DeviceMesh] = []
        if self.device.type == "cpu":
            _on_gloo.add(self)

    def communicator(self, role: str, scopes: Scopes, workspace: Workspace | None = None) -> AnyCommunicator | None:
        """The communicator of a role; None where its span holds one rank. Collective.

        An axis of one rank sends nothing.

        Args:
            role: Role of the collectives; see `Scopes.routes`.
            scopes: Ranks, axes and codecs of the role.
            workspace: Scratch memory; that of the role's queue by default.
        """
        with_both_algorithms = self.size_dispatch(role, scopes, workspace)
        routes = scopes.routes(role)
        if with_both_algorithms is not None or routes is None:
            return with_both_algorithms
        return self._communicator_on(role, routes.hierarchical, scopes.span_of(role), workspace)

    def size_dispatch(self, role: str, scopes: Scopes, workspace: Workspace | None = None) -> SizeDispatch | None:
        """The communicator of a role that has both algorithms. Collective.

        It is None where the role has at most one algorithm.

        Args:
            role: Role of the collectives; see `Scopes.routes`.
            scopes: Ranks, axes and codecs of the role.
            workspace: Scratch memory; that of the role's queue by default.
        """
        routes, span = scopes.routes(role), scopes.span_of(role)
        if routes is None or routes.flat is None:
            return None
        hierarchical = self._communicator_on(role, routes.hierarchical, span, workspace)
        flat = self._communicator_on(role, routes.flat, span, workspace)
        return SizeDispatch(flat, hierarchical, routes.hierarchical_from_bytes)

    def _communicator_on(self, role: str, route: Route, span: Span, workspace: Workspace | None) -> Communicator:
        stages = span.split_by_link()[::-1] if len(route.stages) > 1 else (span,)
        transports = [self._transport(role, stage) for stage in stages]
        for transport, stage in zip(transports, stages, strict=True):
            if stage.is_inside_node:
                _enable_peer_memory(transport)
        stream = STREAM_OF[role]
        thread = self._thread(stream) if transports[0].blocks_host else None
        queue = RouteQueue(
            name=stream if thread is None else thread.name,
            route=route,
            transports=transports,
            ranks=frozenset(span.group_ranks(self.rank)),
            workspace=workspace or self.workspaces[stream],
            thread=thread,
            watchdog=self.watchdog,
            traffic_log=self.traffic_log,
            ranges=self.ranges,
        )
        communicator = Communicator(queue, self.device)
        self._warmups.append(communicator.warmup)
        return communicator

    def _thread(self, stream: str) -> CommThread:
        """The communication thread that takes the place of a stream."""
        if stream not in self._threads:
            self._threads[stream] = CommThread(f"{stream} {self.number}", self.watchdog, self._transports)
        return self._threads[stream]

    def control_group(self, role: str, span: Span) -> ControlGroup | None:
        """The control group of a span; None where it holds one rank. Collective."""
        if span.size == 1:
            return None
        return ControlGroup(self._transport(role, span), self.traffic_log, self.watchdog, self.ranges)

    def _transport(self, role: str, span: Span) -> Transport:
        group = self._group(role, span)
        if group is None:
            raise errors.LifecycleError(f"No group for {role} over one rank. This is a defect; please report it.")
        transport = make_transport(group, span.name, self.device.type)
        if group is not dist.group.WORLD:  # which is the user's to destroy
            self._transports.append(transport)
        return transport

    def _group(self, role: str, span: Span) -> dist.ProcessGroup | None:
        if span.size == 1:
            return None
        if self._is_default_group(role, span):
            return dist.group.WORLD
        shared = _groups.setdefault(dist.group.WORLD, {})
        key = self._family_of(role)
        if (key, span) not in shared:
            own = span.group_ranks(self.rank)
            for members in [own] if _ONLY_MEMBERS_MAKE_GROUPS else span.groups(self.world_size):
                description = f"mics.{role}.{span.name}"
                group = new_group(members, description, self.device.type, is_mesh=role in _MESH_ROLES)
                if self.rank in members:
                    shared[key, span] = group
        return shared[key, span]

    def _is_default_group(self, role: str, span: Span) -> bool:
        """Whether a role uses the default group.

        Not on gloo, where other threads than the one that trains may send in the default group (asynchronous saves of
        torch), and messages are matched by their number.
        """
        if backend_of(dist.group.WORLD, self.device.type) == "gloo" or span.size < self.world_size:
            return False
        return role == "control" or (role in _MESH_ROLES and span.is_in_rank_order)

    def _family_of(self, role: str) -> str:
        """The roles that share a group where their ranks are the same.

        They are on one stream, so that all ranks submit their collectives in one order. Gloo matches its own
        all-reduces by their number in the group, and every model has a thread that submits them.
        """
        if backend_of(dist.group.WORLD, self.device.type) == "gloo":
            return f"{role} {self.number}" if role.endswith("_all_reduce") else role
        return next((family for family, roles in _FAMILIES.items() if role in roles), role)

    @property
    def num_groups(self) -> int:
        """Number of this rank's process groups. The default group and those of earlier models count."""
        return 1 + len(_groups.get(dist.group.WORLD, {}))

    def connect(self) -> None:
        """Use every group once, in an order that all ranks share, and the kernels of codecs. Collective.

        NCCL makes a communicator when its group is first used, if not before, from memory outside torch's allocator. A
        step that uses a group for the first time would run out of memory after all else fits.
        """
        for warmup in self._warmups:
            warmup.launch()
        world = dist.group.WORLD
        for group in [world, *_groups.get(world, {}).values()] if world is not None and self.world_size > 1 else []:
            make_transport(group, "", self.device.type).all_reduce(torch.zeros(1, device=self.device))

    def device_mesh(self, shard_span: Span, replicate_span: Span) -> DeviceMesh:
        """The device mesh of replicas by shards, without axes of one rank. Collective."""
        mesh = self._make_device_mesh(shard_span, replicate_span)
        self._device_meshes.append(mesh)
        return mesh

    def _make_device_mesh(self, shard_span: Span, replicate_span: Span) -> DeviceMesh:
        shard, replicate = self._group("shard", shard_span), self._group("replicate", replicate_span)
        shard_ranks = shard_span.group_ranks(self.rank)
        if shard is not None and replicate is not None:
            ranks = torch.tensor(
                [shard_span.group_ranks(member) for member in replicate_span.group_ranks(shard_ranks[0])]
            )
            return DeviceMesh.from_group(
                [replicate, shard], self.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard")
            )
        if replicate is not None:
            ranks = torch.tensor(replicate_span.group_ranks(self.rank))
            return DeviceMesh.from_group(replicate, self.device.type, mesh=ranks, mesh_dim_names=("replicate",))
        group = shard
        if group is None:
            timeout = timeout_of(dist.group.WORLD, self.device.type)
            group = dist.new_group([self.rank], timeout=timeout, use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.device.type, mesh=torch.tensor(shard_ranks), mesh_dim_names=("shard",))

    def stop(self) -> None:
        """End the communication threads. Not collective. Collectives that no rank waits for may be unfinished."""
        for thread in self._threads.values():
            thread.close()

    def fail_stuck(self) -> None:
        """Fail what was cancelled and does not wake up; see `CommThread.fail_stuck`. From any thread."""
        for thread in list(self._threads.values()):
            thread.fail_stuck()

    @property
    def is_stuck(self) -> bool:
        """Whether a communication thread still waits, and was left alone."""
        return any(thread.is_stuck for thread in self._threads.values())

    def close(self) -> None:
        """Destroy the groups, which ends the threads of gloo. Not collective; no collective may be unfinished."""
        self.stop()
        if self.is_stuck:
            keep_groups()
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        for mesh in self._device_meshes:
            getattr(mesh, "_pg_registry", {}).clear()  # torch 2.13; older versions know groups by name


def _enable_peer_memory(transport: Transport) -> None:
    """Let the ranks of one node, on gloo, read one another's memory if each can.

    Collective; nothing is in flight.

    Cost:
        That of `peer_memory.handshake`.
    """
    if isinstance(transport, GlooTransport):
        ranks, timeout = transport.fingerprint.ranks, timeout_of(transport.group, "cpu")
        transport.read_peers(peer_memory.handshake(ranks, transport.index, transport.gather_row, timeout))


class _UnsortedRank(int):
    """A rank that compares by its position. torch 2.11 sorts the ranks of a group."""

    position: int

    @override
    def __lt__(self, other: int) -> bool:
        return self.position < other.position if isinstance(other, _UnsortedRank) else int(self) < other


def new_group(
    members: list[int], description: str, device_type: str = "cpu", *, is_mesh: bool = False
) -> dist.ProcessGroup:
    """Make a group of `members` in their order. Collective over all ranks, of which each may be in one group.

    Its timeout is the one that the user gave for the default group.

    Args:
        members: Ranks of the job.
        description: Name of the group in torch's logs.
        device_type: Device type of the tensors that the group will send.
        is_mesh: Whether it has all backends of the default group: users may gather a DTensor that they have moved to
            the CPU. Otherwise it has that of `device_type` alone; gloo's would connect all its ranks.
    """
    make: Callable[..., dist.ProcessGroup] = functools.partial(
        dist.new_group,
        timeout=timeout_of(dist.group.WORLD, device_type),
        backend=None if is_mesh else backend_of(dist.group.WORLD, device_type),
        use_local_synchronization=_ONLY_MEMBERS_MAKE_GROUPS,
        group_desc=description,
    )
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return make(members, sort_ranks=False)
    ranks = [_UnsortedRank(member) for member in members]
    for position, rank in enumerate(ranks):
        rank.position = position
    return make(ranks)


def new_host_group(description: str) -> dist.ProcessGroup:
    """Make a group of all ranks on gloo, for data in host memory. Collective.

    Args:
        description: Name of the group in torch's logs.
    """
    make: Callable[..., dist.ProcessGroup] = dist.new_group
    return make(backend="gloo", timeout=timeout_of(dist.group.WORLD, "cpu"), group_desc=description)


_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, Span], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_on_gloo: weakref.WeakSet[CommResources] = weakref.WeakSet()
_num_models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def cancel_collectives() -> None:
    """Fail the collectives in flight of all groups of this process, also of those that a script has made.

    They fail on the other ranks of the groups as well. From any thread. For models on gloo.
    """
    for transport in [transport for resources in list(_on_gloo) for transport in list(resources._transports)]:
        transport.cancel()
    for group in list(dist.distributed_c10d._world.pg_map):
        cancel_group(group)
    for resources in list(_on_gloo):
        resources.fail_stuck()


def backend_of_default_group() -> str:
    """What to pass to `init_process_group` to make the default group once more."""
    return dist.get_backend() if dist.get_backend() != "undefined" else dist.get_backend_config()


def abandon_groups() -> None:
    """End the communication threads, and destroy all groups of this process, of which ranks were lost.

    Not collective. Behind `cancel_collectives`.
    """
    for resources in list(_on_gloo):
        resources.close()
        _on_gloo.discard(resources)
    if (world := dist.group.WORLD) is not None:
        _groups.pop(world, None)
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # part of names; also if the default group could not be made


def _count_models() -> int:
    """The number of models that this job has sharded before. All ranks shard models in the same order."""
    number = _num_models.get(dist.group.WORLD, 0)
    if number == 0:
        _forget_meshes()
    _num_models[dist.group.WORLD] = number + 1
    return number


def _forget_meshes() -> None:
    """Empty DTensor's caches.

    They know a mesh by its ranks: results would have the groups of an equal mesh of an earlier default group, which are
    gone, or whose names other groups have now.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def keep_groups() -> None:
    """Let no group be freed: its destructor joins its threads, of which one waits, or is the parent process's."""
    groups = {id(group): group for group in dist.distributed_c10d._world.pg_map}
    groups |= {id(transport.group): transport.group for own in _on_gloo for transport in own._transports}
    for group in groups.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@atexit.register
def _close_gloo() -> None:
    """End gloo's threads while the interpreter lives.

    A thread that frees a tensor later aborts the process (torch 2.13).

    Unfinished collectives belong to a job that has failed; closing would wait for them, up to the timeout. A forked
    child has none of the threads; there nothing may wait for them.
    """
    owned = [resources for resources in _on_gloo if resources.process_id == os.getpid()]
    if len(owned) < len(_on_gloo):
        keep_groups()
    for resources in owned:
        resources.stop()
    if any(resources.is_stuck for resources in owned):
        keep_groups()
    elif not has_pending_work():
        for resources in owned:
            resources.close()
        _groups.clear()
