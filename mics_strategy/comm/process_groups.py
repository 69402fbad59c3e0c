"""The process groups and communicators of one sharded model.

The only module that makes process groups.

Every rank makes every group, in one order. A group lists its ranks by shard index, not by rank number
(``sort_ranks=False``): the local-rank-major order is not ascending, and DTensor returns wrongly ordered data,
without an error, for a mesh whose order differs from its group's.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
from mics_strategy.comm.queue import CollectiveQueue, CommThread, InlineQueue, RouteBinding, ThreadQueue
from mics_strategy.comm.traffic_log import TrafficLog
from mics_strategy.comm.transport import Transport, backend_of, is_gloo, timeout_of
from mics_strategy.comm.work import has_pending_work
from mics_strategy.comm.workspace import Workspace
from mics_strategy.tuning.autotune import BenchmarkContext, TuningResult, autotune

if TYPE_CHECKING:
    from mics_strategy.comm.route import Route
    from mics_strategy.scopes import Scopes
    from mics_strategy.topology import Span

T = TypeVar("T")
GradCommunicators = tuple[  # reduce-scatter of the first hop; reduce-scatter and all-reduce of the second hop
    AnyCommunicator | None, AnyCommunicator | None, AnyCommunicator | None
]
_QUEUES = {  # roles by queue
    "gather": ("param_all_gather", "secondary_all_gather", "param_sync"),
    "reduce": ("grad_reduce_scatter",),
    "second_hop": ("second_hop_reduce_scatter", "second_hop_all_reduce"),
}


class ProcessGroups:
    """The process groups of one sharded model, by role.

    A communicator is None where its span holds one rank: such an axis sends nothing. All-gathers of parameters,
    reduce-scatters of gradients in a backward, and the second hop of gradients have their own groups and queues, so
    that none waits for another. The models of one process share groups of the same role over the same ranks.

    Args:
        scopes: Ranks and axes of each model state.
        device: Device of the model, with its index where there are several.

    Attributes:
        traffic_log: Log of the collectives that were submitted.
        workspaces: Scratch memory by queue.
        write_digests: Digests of values that forwards wrote into parameters since the last step.
        world_group: Control group of all ranks; None for one rank.
        tuning_results: Results of the autotuner, one for each tuned collective.
        param_comm: Communicator of the parameters' all-gathers.
        secondary_comm: Communicator of the secondary copy's all-gathers.
        grad_comm: Communicator of the gradients' reduce-scatters in a backward.
        outer_grad_comm: Communicator of the second hop's reduce-scatters.
        replica_comm: Communicator of the second hop's all-reduces.
        shard_group: Control group of the ranks that hold different shards.
        trainable_placement: Placement of trainable parameters.
    """

    def __init__(self, scopes: Scopes, device: torch.device | str) -> None:
        self.scopes = scopes
        self.rank = dist.get_rank()
        self.traffic_log = TrafficLog()
        self.device = torch.device(device)
        self._number = _count_models()
        self._watchdog = DesyncWatchdog(str(self._number), self.rank)
        self.workspaces = {queue: Workspace() for queue in _QUEUES}
        self._transports: list[Transport] = []
        self._threads: dict[str, CommThread] = {}
        self.write_digests: list[torch.Tensor] = []
        world = scopes.world_size
        self.world_group = self._control_group("control", scopes.span(1, world))
        self._steps: CollectiveFingerprint | None = None
        if self.world_group is not None:
            peers = self.world_group.transport.fingerprint
            self._steps = CollectiveFingerprint(ranks=peers.ranks, index=peers.index)
        self.tuning_results = self._autotune(scopes)
        self.scopes = scopes = scopes.with_tuning(
            {(result.collective, result.span): result.from_bytes for result in self.tuning_results}
        )
        self.secondary_span = scopes.span_of("secondary_all_gather")
        self.param_comm = self._communicator("param_all_gather", scopes)
        self.secondary_comm = self._communicator("secondary_all_gather", scopes)
        self.grad_comm, self.outer_grad_comm, self.replica_comm = self._grad_communicators(scopes)
        self.shard_group = self._control_group("shard", scopes.span(1, scopes.optimizer))
        sync_comm = self._communicator("param_sync", scopes)
        self._device_mesh = self._make_device_mesh(
            scopes.span(1, scopes.optimizer), scopes.span(scopes.optimizer, world)
        )
        index = scopes.span(1, scopes.optimizer).index(self.rank)
        self._seed = gather_objects(torch.initial_seed())[0]
        self.trainable_placement = ShardPlacement(
            degree=scopes.optimizer,
            index=index,
            device_mesh=self._device_mesh,
            sync_comm=sync_comm,
            random=ReplicaRandom(self._seed, index, self.device),
        )
        if self.device.type == "cpu":
            _on_gloo.add(self)

    def _autotune(self, scopes: Scopes) -> list[TuningResult]:
        if self.world_group is None:
            return []
        untuned_scopes = scopes.with_both_algorithms()

        def make(role: str, workspace: Workspace) -> AnyCommunicator | None:
            return self._communicator(role, untuned_scopes, workspace)

        results = autotune(
            scopes,
            BenchmarkContext(
                control_group=self.world_group, device=self.device, make_communicator=make, gather=gather_objects
            ),
        )
        self.traffic_log.drain()
        return results

    @functools.cached_property
    def unquantized(self) -> GradCommunicators:
        """Communicators of gradients without codecs. The first access is collective."""
        return self._grad_communicators(self.scopes.without_grad_codecs())

    def disable_grad_codecs(self) -> None:
        """Send gradients unquantized from now on.

        Called on every rank between two optimizer steps.
        """
        self.grad_comm, self.outer_grad_comm, self.replica_comm = self.unquantized
        self.scopes = self.scopes.without_grad_codecs()

    def _grad_communicators(self, scopes: Scopes) -> GradCommunicators:
        reduce, scatter = (
            self._communicator("grad_reduce_scatter", scopes),
            self._communicator("second_hop_reduce_scatter", scopes),
        )
        return reduce, scatter, self._communicator("second_hop_all_reduce", scopes)

    def stop(self) -> None:
        """End the communication threads. Not collective; collectives that no rank waits for may be unfinished."""
        for thread in self._threads.values():
            thread.close(self._transports)

    def close(self) -> None:
        """Destroy the groups, which ends the threads of gloo.

        Not collective; no collective may be unfinished.
        """
        self.stop()
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        getattr(self._device_mesh, "_pg_registry", {}).clear()  # torch 2.13; older versions know groups by name

    def _communicator(self, role: str, scopes: Scopes, workspace: Workspace | None = None) -> AnyCommunicator | None:
        routes, span = scopes.routes(role), scopes.span_of(role)
        if routes is None:
            return None
        hierarchical = self._communicator_on(role, routes.hierarchical, span, workspace)
        if routes.flat is None:
            return hierarchical
        return SizeDispatch(
            self._communicator_on(role, routes.flat, span, workspace), hierarchical, routes.hierarchical_from_bytes
        )

    def make_benchmark_communicator(self, role: str, workspace: Workspace) -> AnyCommunicator:
        """A second communicator of a role, which uses `workspace`, for timing. Collective."""
        comm = self._communicator(role, self.scopes, workspace)
        if comm is None:
            raise errors.LifecycleError(
                f"The role {role} has no collective to time. This is a defect; please report it."
            )
        return comm

    def _communicator_on(self, role: str, route: Route, span: Span, workspace: Workspace | None) -> Communicator:
        stages = span.split_by_link()[::-1] if route.intra is not None else (span,)
        transports = [self._transport(role, stage) for stage in stages]
        for transport, stage in zip(transports, stages, strict=True):
            if stage.is_inside_node:
                transport.enable_peer_memory()
        queue = next(queue for queue, roles in _QUEUES.items() if role in roles)
        binding = RouteBinding(
            route=route, transports=transports, ranks=frozenset(span.group_ranks(self.rank)), watchdog=self._watchdog
        )
        scratch = workspace or self.workspaces[queue]
        return Communicator(binding, self._queue(queue, binding, scratch), scratch, self.device)

    def _queue(self, name: str, binding: RouteBinding, workspace: Workspace) -> CollectiveQueue:
        """The queue of a communicator: a thread on gloo, the current stream on any other backend."""
        if not is_gloo(binding.transports[0].group, self.device.type):
            return InlineQueue(name, binding, workspace, self.traffic_log)
        if name not in self._threads:
            self._threads[name] = CommThread(f"{name} {self._number}", self._watchdog)
        return ThreadQueue(self._threads[name], binding, workspace, self.traffic_log)

    def _control_group(self, role: str, span: Span) -> ControlGroup | None:
        return None if span.size == 1 else ControlGroup(self._transport(role, span), self.traffic_log, self._watchdog)

    def _transport(self, role: str, span: Span) -> Transport:
        group = self._group(role, span)
        if group is None:
            raise errors.LifecycleError(f"No group for {role} over one rank. This is a defect; please report it.")
        transport = Transport(group, span.name, self.device.type)
        self._transports.append(transport)
        return transport

    def _group(self, role: str, span: Span) -> dist.ProcessGroup | None:
        if span.size == 1:
            return None
        shared = _groups.setdefault(dist.group.WORLD, {})
        # Gloo matches its own all-reduces by their number in the group, and every model has a thread that submits them.
        key = role if role != "second_hop_all_reduce" else f"{role} {self._number}"
        if (key, span) not in shared:
            for members in span.groups(self.scopes.world_size):
                group = new_group(
                    members, f"mics.{role}.{span.name}", self.device.type, urgent=role == "grad_reduce_scatter"
                )
                if self.rank in members:
                    shared[key, span] = group
        return shared[key, span]

    @functools.cached_property
    def frozen_placement(self) -> ShardPlacement:
        """The placement of frozen parameters.

        The degree is 1 where parameters are unsharded, as no optimizer shards them.

        Its device mesh has the same ranks as that of trainable parameters, so that one operation may use both.
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
        """Count a backward that begins.

        The watchdog compares the counts of ranks that wait for each other.
        """
        self._watchdog.num_backwards += 1

    def record_step(self) -> None:
        """Count an optimizer step.

        All ranks step equally often, or gradients of different steps would be added.
        """
        if self._steps is not None:
            self._steps.update(f"step {self._steps.count + 1}")

    def reduce_over_shards(self, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        """The sum or maximum of a scalar over the ranks with different shards, in place.

        Not part of a plan.
        """
        return value if self.shard_group is None else self.shard_group.all_reduce_scalar(value, is_max=is_max)

    @property
    def _fingerprints(self) -> dict[str, CollectiveFingerprint]:
        comms = {
            "parameter all-gathers": self.param_comm,
            "secondary all-gathers": self.secondary_comm,
            "parameter syncs": self.trainable_placement.sync_comm,
            "gradient reduce-scatters": self.grad_comm,
        }
        fingerprints = {
            f"{name} over {transport.axis}": transport.fingerprint
            for name, comm in comms.items()
            if comm is not None
            for transport in comm.transports
        }
        if self._steps is not None:
            fingerprints[STEPS] = self._steps
        if self.shard_group is not None:
            fingerprints[f"owned tensors over {self.shard_group.axis}"] = self.shard_group.transport.fingerprint
        return fingerprints

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators of stochastic rounding.

        Their order is the same in every run with this configuration.
        """
        return [generator for workspace in self.workspaces.values() for generator in workspace.generators]

    @property
    def desync_digest(self) -> int:
        """A number that adds up to 0 over all ranks that are in sync.

        They are while they submit the same collectives in the same order.
        """
        return sum(fingerprint.digest for fingerprint in self._fingerprints.values())

    def is_in_sync(self) -> bool:
        """Whether all ranks have submitted the same collectives in one order.

        Collective, on the default group.
        """
        return sum(gather_objects(self.desync_digest)) == 0

    def first_mismatch(self) -> str:
        """The first collective in which ranks differ, as text.

        Collective, on the default group.
        """
        return first_mismatch(gather_objects(self._fingerprints))


class _UnsortedRank(int):
    """A rank that compares by its position.

    torch 2.11 sorts the ranks of a group.
    """

    position: int

    @override
    def __lt__(self, other: int) -> bool:
        return self.position < other.position if isinstance(other, _UnsortedRank) else int(self) < other


def new_group(
    members: list[int], description: str, device_type: str = "cpu", *, urgent: bool = False
) -> dist.ProcessGroup:
    """Make a group of `members` in their order.

    Its timeout is the one that the user gave for the default group.

    Args:
        members: Ranks of the job.
        description: Name of the group in torch's logs.
        device_type: Device type of the tensors that the group will send.
        urgent: Whether NCCL's own stream of the group, on which its kernels run, has a high priority.
    """
    timeout = timeout_of(dist.group.WORLD, device_type)
    make: Callable[..., dist.ProcessGroup] = functools.partial(dist.new_group, timeout=timeout)
    if urgent and backend_of(dist.group.WORLD, device_type) == "nccl":
        options: Any = cast("Any", dist).ProcessGroupNCCL.Options()
        options.is_high_priority_stream, options._timeout = True, timeout
        make = functools.partial(make, pg_options=options)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return make(members, sort_ranks=False, group_desc=description)
    ranks = [_UnsortedRank(member) for member in members]
    for position, rank in enumerate(ranks):
        rank.position = position
    return make(ranks, group_desc=description)


_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, Span], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_on_gloo: weakref.WeakSet[ProcessGroups] = weakref.WeakSet()
_num_models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _count_models() -> int:
    """The number of models that this job has sharded before.

    All ranks shard models in the same order.
    """
    number = _num_models.get(dist.group.WORLD, 0)
    _num_models[dist.group.WORLD] = number + 1
    return number


@atexit.register
def _close_gloo() -> None:
    """End gloo's threads while the interpreter lives.

    A thread that frees a tensor later aborts the process (torch 2.13).

    Unfinished collectives belong to a job that has failed; closing would wait for them, up to the timeout.
    """
    for groups in list(_on_gloo):
        groups.stop()
    if not has_pending_work():
        for groups in list(_on_gloo):
            groups.close()
        _groups.clear()
