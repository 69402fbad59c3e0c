"""Which ranks work together? The only file that makes process groups.

Every rank makes every group, in one order. A group lists its ranks by shard index, not by number
(``sort_ranks=False``): the local-rank-major order is not ascending, and DTensor returns wrongly ordered data,
without an error, for a mesh whose order differs from its group's.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from mics_strategy import errors
from mics_strategy.comm.communicator import AnyCommunicator, Communicator, SizeDispatch
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.desync import STEPS, CollectiveFingerprint, DesyncWatchdog, first_mismatch
from mics_strategy.comm.placement import ReplicaRandom, ShardPlacement
from mics_strategy.comm.queue import CommThread, Executor, InlineExecutor, RouteBinding
from mics_strategy.comm.route import Route
from mics_strategy.comm.traffic_log import TrafficLog
from mics_strategy.comm.transport import Transport, is_gloo, moves, timeout_of
from mics_strategy.comm.work import has_pending_work
from mics_strategy.comm.workspace import Workspace
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Span
from mics_strategy.tuning.autotune import BenchmarkContext, TuningResult, autotune

T = TypeVar("T")
GradCommunicators = tuple[
    AnyCommunicator | None, AnyCommunicator | None, AnyCommunicator | None
]  # first hop; scatter, reduce
_QUEUES = {
    "gather": ("param_all_gather", "secondary_all_gather", "param_sync"),
    "reduce": ("grad_reduce_scatter",),
    "second_hop": ("second_hop_reduce_scatter", "second_hop_all_reduce"),
}


class ProcessGroups:
    """The process groups of one sharded model, by what they carry.

    A collective is None where its span holds one rank: such an axis sends nothing. What brings parameters, what takes
    gradients away in a backward, and what does so in the second hop, have groups and lanes of their own, so that none
    waits for another. Models of one process share groups that carry the same over the same ranks.

    Args:
        scopes: Ranks and axes of each model state.
        device: Device of the model, with its index where there are several.
    """

    def __init__(self, scopes: Scopes, device: torch.device | str) -> None:
        self.scopes = scopes
        self.rank = dist.get_rank()
        self.traffic_log = TrafficLog()
        self.device = torch.device(device)
        self._number = _count_meshes()
        self._watchdog = DesyncWatchdog(str(self._number), self.rank)
        self.workspaces = {family: Workspace() for family in _QUEUES}
        self._transports: list[Transport] = []
        self._executors: dict[str, CommThread] = {}
        self.write_digests: list[torch.Tensor] = []  # of what forwards wrote into parameters since the last step
        world = scopes.world_size
        self.world_group = self._control_group("control", scopes.span(1, world))
        self._steps: CollectiveFingerprint | None = None
        if self.world_group is not None:
            peers = self.world_group.transport.fingerprint
            self._steps = CollectiveFingerprint(ranks=peers.ranks, index=peers.index)
        self.tuning_results = self._autotune(scopes)
        self.scopes = scopes = scopes.with_tuning(
            {(each.collective, each.span): each.from_bytes for each in self.tuning_results}
        )
        self.has_secondary = scopes.secondary < scopes.params
        self.secondary_span = scopes.span_of("secondary_all_gather")
        self.param_comm = self._communicator("param_all_gather", scopes)
        self.secondary_comm = self._communicator("secondary_all_gather", scopes)
        self.grad_comm, self.outer_grad_comm, self.replica_comm = self._grad_communicators(scopes)
        self.shard_group = self._control_group("shard", scopes.span(1, scopes.optimizer))
        update = self._communicator("param_sync", scopes)
        self._device_mesh = self._make_device_mesh(
            scopes.span(1, scopes.optimizer), scopes.span(scopes.optimizer, world)
        )
        index = scopes.span(1, scopes.optimizer).index(self.rank)
        self._seed = gather_objects(torch.initial_seed())[0]
        self.trainable_placement = ShardPlacement(
            degree=scopes.optimizer,
            index=index,
            device_mesh=self._device_mesh,
            sync_comm=update,
            random=ReplicaRandom(self._seed, index, self.device),
        )
        if self.device.type == "cpu":
            _on_gloo.add(self)

    def _autotune(self, scopes: Scopes) -> list[TuningResult]:
        if self.world_group is None:
            return []
        in_both_ways = scopes.with_both_algorithms()

        def make(purpose: str, workspace: Workspace) -> AnyCommunicator | None:
            return self._communicator(purpose, in_both_ways, workspace)

        found = autotune(
            scopes,
            BenchmarkContext(
                control_group=self.world_group, device=self.device, make_communicator=make, gather=gather_objects
            ),
        )
        self.traffic_log.drain()
        return found

    @functools.cached_property
    def unquantized(self) -> GradCommunicators:
        """Collectives of gradients without codecs. Collective where it is asked for first."""
        return self._grad_communicators(self.scopes.without_grad_codecs())

    def disable_grad_codecs(self) -> None:
        """Send gradients as they are, from now on. On every rank between two optimizer steps."""
        self.grad_comm, self.outer_grad_comm, self.replica_comm = self.unquantized
        self.scopes = self.scopes.without_grad_codecs()

    def _grad_communicators(self, scopes: Scopes) -> GradCommunicators:
        reduce, scatter = (
            self._communicator("grad_reduce_scatter", scopes),
            self._communicator("second_hop_reduce_scatter", scopes),
        )
        return reduce, scatter, self._communicator("second_hop_all_reduce", scopes)

    def stop(self) -> None:
        """End the lanes. Not collective; what no rank waits for any more may be under way."""
        for lane in self._executors.values():
            lane.close(self._transports)

    def close(self) -> None:
        """Let go of the groups, which ends the threads of gloo. Not collective; nothing may be under way."""
        self.stop()
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        getattr(self._device_mesh, "_pg_registry", {}).clear()  # torch 2.13; before, it knows groups by name

    def _communicator(self, purpose: str, scopes: Scopes, workspace: Workspace | None = None) -> AnyCommunicator | None:
        routes, span = scopes.routes(purpose), scopes.span_of(purpose)
        if routes is None:
            return None
        large = self._communicator_on(purpose, routes.hierarchical, span, workspace)
        if routes.flat is None:
            return large
        return SizeDispatch(
            self._communicator_on(purpose, routes.flat, span, workspace), large, routes.hierarchical_from_bytes
        )

    def make_benchmark_communicator(self, purpose: str, workspace: Workspace) -> AnyCommunicator:
        """The collective of a purpose once more, which uses that workspace, to be timed. Collective."""
        made = self._communicator(purpose, self.scopes, workspace)
        if made is None:
            raise errors.LifecycleError(f"Nothing travels for {purpose}. This is a defect; please report it.")
        return made

    def _communicator_on(self, purpose: str, route: Route, span: Span, workspace: Workspace | None) -> Communicator:
        stages = span.split_by_link()[::-1] if route.intra is not None else (span,)
        transports = [self._transport(purpose, stage) for stage in stages]
        for transport, stage in zip(transports, stages, strict=True):
            if stage.is_inside_node:
                transport.enable_peer_memory()
        family = next(family for family, purposes in _QUEUES.items() if purpose in purposes)
        channel = RouteBinding(
            route=route, transports=transports, ranks=frozenset(span.group_ranks(self.rank)), watch=self._watchdog
        )
        runner = self._executor(family, transports)
        return Communicator(channel, runner, workspace or self.workspaces[family], self.traffic_log, self.device)

    def _executor(self, family: str, transports: list[Transport]) -> Executor:
        """The lane of a family of collectives, whose order among one another is kept; or none where none is needed."""
        if not is_gloo(transports[0].group, self.device.type):
            return InlineExecutor()
        if family not in self._executors:
            self._executors[family] = CommThread(f"{family} {self._number}", self._watchdog)
        return self._executors[family]

    def _control_group(self, purpose: str, span: Span) -> ControlGroup | None:
        return (
            None if span.size == 1 else ControlGroup(self._transport(purpose, span), self.traffic_log, self._watchdog)
        )

    def _transport(self, purpose: str, span: Span) -> Transport:
        group = self._group(purpose, span)
        if group is None:
            raise errors.LifecycleError(f"No group for {purpose} over one rank. This is a defect; please report it.")
        transport = Transport(group, span.name, self.device.type)
        self._transports.append(transport)
        return transport

    def _group(self, purpose: str, span: Span) -> dist.ProcessGroup | None:
        if span.size == 1:
            return None
        shared = _groups.setdefault(dist.group.WORLD, {})
        # Gloo's own all-reduce is matched by its number in the group, and every model has a lane that asks for it.
        key = purpose if purpose != "second_hop_all_reduce" else f"{purpose} {self._number}"
        if (key, span) not in shared:
            for members in span.groups(self.scopes.world_size):
                group = new_group(
                    members, f"mics.{purpose}.{span.name}", self.device.type, urgent=purpose == "grad_reduce_scatter"
                )
                if self.rank in members:
                    shared[key, span] = group
        return shared[key, span]

    @functools.cached_property
    def frozen_placement(self) -> ShardPlacement:
        """Of frozen parameters: whole where parameters are not sharded, as there is no optimizer to shard them for.

        Labelled over the same ranks as trained ones, so that an operation may have both.
        """
        if self.scopes.params > 1:
            return self.trainable_placement
        random = ReplicaRandom(self._seed, 0, self.device)
        return ShardPlacement(
            degree=1, index=0, device_mesh=self.trainable_placement.device_mesh, sync_comm=None, random=random
        )

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

    def record_backward(self) -> None:
        """A backward begins; ranks that wait in vain compare how many each has begun."""
        self._watchdog.num_backwards += 1

    def record_step(self) -> None:
        """An optimizer has stepped. All ranks step alike, or gradients of different steps would be added."""
        if self._steps is not None:
            self._steps.update(f"step {self._steps.count + 1}")

    def reduce_over_shards(self, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        """The sum or maximum of a scalar over the ranks that hold different shards, in place. No plan has it."""
        return value if self.shard_group is None else self.shard_group.all_reduce_scalar(value, is_max=is_max)

    @property
    def _fingerprints(self) -> dict[str, CollectiveFingerprint]:
        watched = {
            "gathers": self.param_comm,
            "secondary gathers": self.secondary_comm,
            "updates": self.trainable_placement.sync_comm,
            "reductions": self.grad_comm,
        }
        trails = {
            f"{name} over {transport.axis}": transport.fingerprint
            for name, collective in watched.items()
            if collective is not None
            for transport in collective.transports
        }
        if self._steps is not None:
            trails[STEPS] = self._steps
        if self.shard_group is not None:
            trails[f"whole tensors over {self.shard_group.axis}"] = self.shard_group.transport.fingerprint
        return trails

    @property
    def generators(self) -> list[torch.Generator]:
        """What stochastic rounding draws from, in the same order in every run with this configuration."""
        return [generator for workspace in self.workspaces.values() for generator in workspace.generators]

    @property
    def desync_digest(self) -> int:
        """Adds up to 0 over all ranks while they gather and reduce the same in the same order."""
        return sum(trail.digest for trail in self._fingerprints.values())

    def is_in_sync(self) -> bool:
        """Whether all ranks have gathered and reduced the same in the same order. Collective, on the default group."""
        return sum(gather_objects(self.desync_digest)) == 0

    def first_mismatch(self) -> str:
        """Where ranks have parted, in words. Collective, on the default group."""
        return first_mismatch(gather_objects(self._fingerprints))


class _UnsortedRank(int):
    """A rank that torch 2.11, which sorts the ranks of a group, leaves where it is."""

    position: int

    @override
    def __lt__(self, other: int) -> bool:
        return self.position < other.position if isinstance(other, _UnsortedRank) else int(self) < other


def new_group(
    members: list[int], description: str, device_type: str = "cpu", *, urgent: bool = False
) -> dist.ProcessGroup:
    """A group of `members` in their order, with the timeout that the user gave for the default group.

    Args:
        members: Ranks of the job.
        description: Name of the group in torch's logs.
        device_type: Device of what the group will send.
        urgent: Give NCCL's own stream of the group, on which its kernels run, a high priority.
    """
    timeout = timeout_of(dist.group.WORLD, device_type)
    make: Callable[..., dist.ProcessGroup] = functools.partial(dist.new_group, timeout=timeout)
    if urgent and moves(dist.group.WORLD, device_type) == "nccl":
        options: Any = cast("Any", dist).ProcessGroupNCCL.Options()
        options.is_high_priority_stream, options._timeout = True, timeout
        make = functools.partial(make, pg_options=options)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return make(members, sort_ranks=False, group_desc=description)
    ranks = [_UnsortedRank(member) for member in members]
    for place, rank in enumerate(ranks):
        rank.position = place
    return make(ranks, group_desc=description)


_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, Span], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_on_gloo: weakref.WeakSet[ProcessGroups] = weakref.WeakSet()
_num_meshes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _count_meshes() -> int:
    """How many meshes the ranks of this job have made before, in the same order on all of them."""
    number = _num_meshes.get(dist.group.WORLD, 0)
    _num_meshes[dist.group.WORLD] = number + 1
    return number


@atexit.register
def _close_gloo() -> None:
    """End gloo's threads while the interpreter lives: one that frees a tensor later aborts the process (torch 2.13).

    What is still under way belongs to a job that has failed; closing would wait for it, up to the timeout.
    """
    for groups in list(_on_gloo):
        groups.stop()
    if not has_pending_work():
        for groups in list(_on_gloo):
            groups.close()
        _groups.clear()
