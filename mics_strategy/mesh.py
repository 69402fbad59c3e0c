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
from mics_strategy.agreement import gather_objects
from mics_strategy.collectives.by_size import AnyCollective, BySize
from mics_strategy.collectives.calibration import Finding, Surroundings, calibrate
from mics_strategy.collectives.channel import Channel
from mics_strategy.collectives.collective import Collective
from mics_strategy.collectives.lane import AtOnce, Lane, Runner
from mics_strategy.collectives.ledger import Ledger
from mics_strategy.collectives.ops import is_anything_under_way
from mics_strategy.collectives.peers import Peers
from mics_strategy.collectives.route import Route
from mics_strategy.collectives.trail import STEPS, Trail, first_difference
from mics_strategy.collectives.transport import Transport, is_gloo, moves, timeout_of
from mics_strategy.collectives.watch import Watch
from mics_strategy.collectives.workspace import Workspace
from mics_strategy.scopes import Scopes
from mics_strategy.shards import ReplicaRandom, Shards
from mics_strategy.topology import Span

T = TypeVar("T")
GradCollectives = tuple[AnyCollective | None, AnyCollective | None, AnyCollective | None]  # first hop; scatter, reduce
_FAMILIES = {
    "gather": ("gather", "secondary", "update"),
    "reduce": ("reduce",),
    "second_hop": ("second_scatter", "second_reduce"),
}


class Mesh:
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
        self.ledger = Ledger()
        self.device = torch.device(device)
        self._number = _count_meshes()
        self._watch = Watch(str(self._number), self.rank)
        self.workspaces = {family: Workspace() for family in _FAMILIES}
        self._transports: list[Transport] = []
        self._lanes: dict[str, Lane] = {}
        self.written: list[torch.Tensor] = []  # digests of what forwards wrote into parameters, since the last step
        world = scopes.world_size
        self.control = self._peers("control", scopes.span(1, world))
        self._steps: Trail | None = None
        if self.control is not None:
            peers = self.control.transport.trail
            self._steps = Trail(ranks=peers.ranks, index=peers.index)
        self.findings = self._calibrate(scopes)
        self.scopes = scopes = scopes.decided({(each.collective, each.span): each.from_bytes for each in self.findings})
        self.has_secondary = scopes.secondary < scopes.params
        self.secondary_span = scopes.span_of("secondary")
        self.gather_params = self._collective("gather", scopes)
        self.gather_secondary = self._collective("secondary", scopes)
        self.reduce_grads, self.second_scatter, self.second_reduce = self._grad_collectives(scopes)
        self.among_shards = self._peers("shard", scopes.span(1, scopes.optimizer))
        update = self._collective("update", scopes)
        self._device_mesh = self._make_device_mesh(
            scopes.span(1, scopes.optimizer), scopes.span(scopes.optimizer, world)
        )
        index = scopes.span(1, scopes.optimizer).index(self.rank)
        self._seed = gather_objects(torch.initial_seed())[0]
        self.trained = Shards(
            degree=scopes.optimizer,
            index=index,
            device_mesh=self._device_mesh,
            update=update,
            random=ReplicaRandom(self._seed, index, self.device),
        )
        if self.device.type == "cpu":
            _gloo_meshes.add(self)

    def _calibrate(self, scopes: Scopes) -> list[Finding]:
        if self.control is None:
            return []
        in_both_ways = scopes.in_both_ways()

        def make(purpose: str, workspace: Workspace) -> AnyCollective | None:
            return self._collective(purpose, in_both_ways, workspace)

        found = calibrate(
            scopes, Surroundings(control=self.control, device=self.device, make=make, gather=gather_objects)
        )
        self.ledger.take()
        return found

    @functools.cached_property
    def uncoded(self) -> GradCollectives:
        """Collectives of gradients without codecs. Collective where it is asked for first."""
        return self._grad_collectives(self.scopes.without_grad_codecs())

    def drop_grad_codecs(self) -> None:
        """Send gradients as they are, from now on. On every rank between two optimizer steps."""
        self.reduce_grads, self.second_scatter, self.second_reduce = self.uncoded
        self.scopes = self.scopes.without_grad_codecs()

    def _grad_collectives(self, scopes: Scopes) -> GradCollectives:
        reduce, scatter = self._collective("reduce", scopes), self._collective("second_scatter", scopes)
        return reduce, scatter, self._collective("second_reduce", scopes)

    def stop(self) -> None:
        """End the lanes. Not collective; what no rank waits for any more may be under way."""
        for lane in self._lanes.values():
            lane.close(self._transports)

    def close(self) -> None:
        """Let go of the groups, which ends the threads of gloo. Not collective; nothing may be under way."""
        self.stop()
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        getattr(self._device_mesh, "_pg_registry", {}).clear()  # torch 2.13; before, it knows groups by name

    def _collective(self, purpose: str, scopes: Scopes, workspace: Workspace | None = None) -> AnyCollective | None:
        routes, span = scopes.routes(purpose), scopes.span_of(purpose)
        if routes is None:
            return None
        large = self._on_route(purpose, routes.large, span, workspace)
        if routes.small is None:
            return large
        return BySize(self._on_route(purpose, routes.small, span, workspace), large, routes.from_bytes)

    def trial(self, purpose: str, workspace: Workspace) -> AnyCollective:
        """The collective of a purpose once more, which uses that workspace, to be timed. Collective."""
        made = self._collective(purpose, self.scopes, workspace)
        if made is None:
            raise errors.LifecycleError(f"Nothing travels for {purpose}. This is a defect; please report it.")
        return made

    def _on_route(self, purpose: str, route: Route, span: Span, workspace: Workspace | None) -> Collective:
        stages = span.by_link()[::-1] if route.fast is not None else (span,)
        transports = [self._transport(purpose, stage) for stage in stages]
        for transport, stage in zip(transports, stages, strict=True):
            if stage.is_inside_node:
                transport.read_memory()
        family = next(family for family, purposes in _FAMILIES.items() if purpose in purposes)
        channel = Channel(
            route=route, transports=transports, ranks=frozenset(span.members(self.rank)), watch=self._watch
        )
        runner = self._runner(family, transports)
        return Collective(channel, runner, workspace or self.workspaces[family], self.ledger, self.device)

    def _runner(self, family: str, transports: list[Transport]) -> Runner:
        """The lane of a family of collectives, whose order among one another is kept; or none where none is needed."""
        if not is_gloo(transports[0].group, self.device.type):
            return AtOnce()
        if family not in self._lanes:
            self._lanes[family] = Lane(f"{family} {self._number}", self._watch)
        return self._lanes[family]

    def _peers(self, purpose: str, span: Span) -> Peers | None:
        return None if span.size == 1 else Peers(self._transport(purpose, span), self.ledger, self._watch)

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
        key = purpose if purpose != "second_reduce" else f"{purpose} {self._number}"
        if (key, span) not in shared:
            for members in span.groups(self.scopes.world_size):
                group = new_group(members, f"mics.{purpose}.{span.name}", self.device.type, urgent=purpose == "reduce")
                if self.rank in members:
                    shared[key, span] = group
        return shared[key, span]

    @functools.cached_property
    def frozen(self) -> Shards:
        """Of frozen parameters: whole where parameters are not sharded, as there is no optimizer to shard them for.

        Labelled over the same ranks as trained ones, so that an operation may have both.
        """
        if self.scopes.params > 1:
            return self.trained
        random = ReplicaRandom(self._seed, 0, self.device)
        return Shards(degree=1, index=0, device_mesh=self.trained.device_mesh, update=None, random=random)

    def _make_device_mesh(self, shard_span: Span, replicate_span: Span) -> DeviceMesh:
        shard, replicate = self._group("shard", shard_span), self._group("replicate", replicate_span)
        shard_ranks = shard_span.members(self.rank)
        if shard is not None and replicate is not None:
            ranks = torch.tensor([shard_span.members(member) for member in replicate_span.members(shard_ranks[0])])
            return DeviceMesh.from_group(
                [replicate, shard], self.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard")
            )
        if replicate is not None:
            ranks = torch.tensor(replicate_span.members(self.rank))
            return DeviceMesh.from_group(replicate, self.device.type, mesh=ranks, mesh_dim_names=("replicate",))
        group = shard
        if group is None:
            timeout = timeout_of(dist.group.WORLD, self.device.type)
            group = dist.new_group([self.rank], timeout=timeout, use_local_synchronization=True)
        return DeviceMesh.from_group(group, self.device.type, mesh=torch.tensor(shard_ranks), mesh_dim_names=("shard",))

    def note_backward(self) -> None:
        """A backward begins; ranks that wait in vain compare how many each has begun."""
        self._watch.num_backwards += 1

    def note_step(self) -> None:
        """An optimizer has stepped. All ranks step alike, or gradients of different steps would be added."""
        if self._steps is not None:
            self._steps.note(f"step {self._steps.count + 1}")

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
        }
        trails = {
            f"{name} over {transport.axis}": transport.trail
            for name, collective in watched.items()
            if collective is not None
            for transport in collective.transports
        }
        if self._steps is not None:
            trails[STEPS] = self._steps
        if self.among_shards is not None:
            trails[f"whole tensors over {self.among_shards.axis}"] = self.among_shards.transport.trail
        return trails

    @property
    def generators(self) -> list[torch.Generator]:
        """What stochastic rounding draws from, in the same order in every run with this configuration."""
        return [generator for workspace in self.workspaces.values() for generator in workspace.generators]

    @property
    def balance(self) -> int:
        """Adds up to 0 over all ranks while they gather and reduce the same in the same order."""
        return sum(trail.balance for trail in self._trails.values())

    def is_balanced(self) -> bool:
        """Whether all ranks have gathered and reduced the same in the same order. Collective, on the default group."""
        return sum(gather_objects(self.balance)) == 0

    def first_difference(self) -> str:
        """Where ranks have parted, in words. Collective, on the default group."""
        return first_difference(gather_objects(self._trails))


class _Placed(int):
    """A rank that torch 2.11, which sorts the ranks of a group, leaves where it is."""

    place: int

    @override
    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


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
    ranks = [_Placed(member) for member in members]
    for place, rank in enumerate(ranks):
        rank.place = place
    return make(ranks, group_desc=description)


_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, Span], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_gloo_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()
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
    for mesh in list(_gloo_meshes):
        mesh.stop()
    if not is_anything_under_way():
        for mesh in list(_gloo_meshes):
            mesh.close()
        _groups.clear()
