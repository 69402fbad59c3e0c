"""The communicators and placements of one sharded model, by role."""

from __future__ import annotations

import functools
from typing import TypeVar

import torch

from mics_strategy import errors
from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.desync import STEPS, CollectiveFingerprint, first_mismatch
from mics_strategy.comm.islands import Island
from mics_strategy.comm.placement import ReplicaRandom, ShardPlacement
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.workspace import Workspace
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Span

GradCommunicators = tuple[  # reduce-scatter of the first hop; reduce-scatter and all-reduce of the second hop
    AnyCommunicator | None, AnyCommunicator | None, AnyCommunicator | None
]

T = TypeVar("T")


class ProcessGroups:
    """The process groups of one sharded model, by role.

    A communicator is None where its span holds one rank: such an axis sends nothing. Groups are made, which is
    collective.

    Args:
        scopes: Ranks, axes and size thresholds of each model state.
        resources: Makes the communicators.
        seed: Seed of the random numbers drawn into shards, the same on all ranks.

    Attributes:
        resources: Groups, threads and scratch memory of the communicators.
        island: Ranks that synchronize gradients in every step: all, but with outer steps.
        world_group: Control group of these ranks; None for one rank.
        param_comm: Communicator of the parameters' all-gathers.
        secondary_comm: Communicator of the secondary copy's all-gathers.
        grad_comm: Communicator of the gradients' reduce-scatters in a backward.
        second_scatter_comm: Communicator of the second hop's reduce-scatters.
        replica_comm: Communicator of the second hop's all-reduces.
        shard_group: Control group of the ranks that hold different shards.
        trainable_placement: Placement of trainable parameters.
    """

    def __init__(self, scopes: Scopes, resources: CommResources, seed: int) -> None:
        self.scopes = scopes
        self.resources = resources
        self.rank = resources.rank
        self.device = resources.device
        self.traffic_log = resources.traffic_log
        self.island = Island(scopes, resources)
        self.world_group = self.island.group
        self._steps: CollectiveFingerprint | None = None
        if self.world_group is not None:
            peers = self.world_group.transport.fingerprint
            self._steps = CollectiveFingerprint(ranks=peers.ranks, index=peers.index)
        self.param_comm = resources.communicator("param_all_gather", scopes)
        self.secondary_comm = resources.communicator("secondary_all_gather", scopes)
        self.grad_comm, self.second_scatter_comm, self.replica_comm = self._grad_communicators(scopes)
        shard_span = scopes.span(1, scopes.optimizer)
        self.shard_group = resources.control_group("shard", shard_span)
        index = shard_span.index(self.rank)
        self.trainable_placement = ShardPlacement(
            degree=scopes.optimizer,
            index=index,
            sync_comm=resources.communicator("param_sync", scopes),
            model=resources.number,
            device_mesh=resources.device_mesh(shard_span, scopes.span(scopes.optimizer, scopes.world_size)),
            random=ReplicaRandom(seed, index, self.device),
        )

    @property
    def workspaces(self) -> dict[str, Workspace]:
        """Scratch memory by queue."""
        return self.resources.workspaces

    @property
    def secondary_span(self) -> Span:
        """Span of the secondary copy's all-gathers."""
        return self.scopes.span_of("secondary_all_gather")

    @property
    def is_stream_ordered(self) -> bool:
        """Whether a stream runs collectives one after the other.

        Then all may use one buffer. On gloo threads run them, and their results are put in place when something waits.
        """
        return self.world_group is None or not self.world_group.transport.blocks_host

    @functools.cached_property
    def unquantized(self) -> GradCommunicators:
        """Communicators of gradients without codecs. The first access is collective."""
        return self._grad_communicators(self.scopes.without_grad_codecs())

    @functools.cached_property
    def exact_sync_comm(self) -> AnyCommunicator | None:
        """Unquantized communicator of param syncs, for the references of differences.

        None without differences. The first access is collective.
        """
        if not self.scopes.codecs.has_differences:
            return None
        return self.resources.communicator("param_sync", self.scopes.without_weight_codec())

    def disable_grad_codecs(self) -> None:
        """Send gradients unquantized from now on. Called on every rank between two optimizer steps."""
        self.grad_comm, self.second_scatter_comm, self.replica_comm = self.unquantized
        self.scopes = self.scopes.without_grad_codecs()

    def _grad_communicators(self, scopes: Scopes) -> GradCommunicators:
        first_hop, second_scatter = (
            self.resources.communicator("grad_reduce_scatter", scopes),
            self.resources.communicator("second_hop_reduce_scatter", scopes),
        )
        return first_hop, second_scatter, self.resources.communicator("second_hop_all_reduce", scopes)

    def make_benchmark_communicator(self, role: str, workspace: Workspace) -> AnyCommunicator:
        """A second communicator of a role, which uses `workspace`, for timing. Collective."""
        comm = self.resources.communicator(role, self.scopes, workspace)
        if comm is None:
            raise errors.LifecycleError(
                f"The role {role} has no collective to time. This is a defect; please report it."
            )
        return comm

    @functools.cached_property
    def frozen_placement(self) -> ShardPlacement:
        """The placement of frozen parameters.

        The degree is 1 with `params="replicate"`, as no optimizer shards them.

        Its device mesh has the same ranks as that of trainable parameters, so that one operation may use both.
        """
        if self.scopes.params > 1:
            return self.trainable_placement
        trainable = self.trainable_placement
        return ShardPlacement(
            degree=1,
            index=0,
            model=trainable.model,
            device_mesh=trainable.device_mesh,
            sync_comm=None,
            random=trainable.random.for_shard(0),
        )

    def record_backward(self) -> None:
        """Count a backward that begins. The watchdog compares the counts of ranks that wait for each other."""
        self.resources.watchdog.num_backwards += 1

    def record_step(self) -> None:
        """Count an optimizer step. All ranks step equally often, or gradients of different steps would be added."""
        if self._steps is not None:
            self._steps.update(f"step {self._steps.count + 1}")

    def record_options(self, label: str) -> None:
        """Record the options of an optimizer step, which all ranks have in common."""
        records = self.resources.call_watch.records
        records.record(label, self.island.ranks, is_ordered=False)
        records.moment += 1

    def reduce_over_shards(self, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        """The sum or maximum of a scalar over the ranks with different shards, in place. Not part of a plan."""
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
        records = self.resources.call_watch.records.fingerprints
        if self.scopes.num_islands > 1:  # those of a synchronous model beside this one are of all ranks
            own = set(self.island.ranks)
            records = {name: record for name, record in records.items() if own.issuperset(record.ranks)}
        return fingerprints | records

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators of stochastic rounding. Their order is the same in every run with this configuration."""
        return [generator for workspace in self.workspaces.values() for generator in workspace.generators]

    @property
    def desync_digest(self) -> int:
        """A number of 32 bits with a sign that adds up to 0, modulo 2**32, over all ranks that are in sync.

        They are while they submit the same collectives in the same order.
        """
        total = sum(fingerprint.digest for fingerprint in self._fingerprints.values())
        return (total + 2**31) % 2**32 - 2**31

    def agree_on(self, value: T, purpose: str) -> list[T]:
        """Every rank's value, in rank order. Collective.

        Args:
            value: Object that can be pickled.
            purpose: Subject of the agreement, for errors; the same on all ranks.

        Raises:
            LifecycleError: Other ranks wait for something else.
            CommunicationError: A rank died, did not take part in time, or gathers for another purpose.
        """
        job_group = self.island.job_group
        if job_group is None or not job_group.transport.blocks_host:
            return gather_objects(value, purpose)
        with self.resources.call_watch.watching(f"agreement on {purpose}", frozenset(range(self.scopes.job_size))):
            return gather_objects(value, purpose)

    def is_in_sync(self) -> bool:
        """Whether all ranks have submitted the same collectives in one order. Collective."""
        return sum(self.island.gather_objects(self.desync_digest, "digests of collectives")) % 2**32 == 0

    def first_mismatch(self) -> str:
        """The first collective in which ranks differ, as text. Collective."""
        by_rank = self.island.gather_objects(self._fingerprints, "fingerprints of collectives")
        return first_mismatch(dict(zip(self.island.ranks, by_rank, strict=True)))
