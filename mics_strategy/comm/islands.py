"""The ranks that synchronize gradients in every step, and what connects them with the rest of the job."""

from __future__ import annotations

from contextlib import nullcontext
from operator import itemgetter
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.resources import CommResources
from mics_strategy.scopes import Scopes

T = TypeVar("T")


class Island:
    """The island of this rank: the whole job without outer steps. Its groups are made, which is collective.

    Args:
        scopes: Ranks of the island and of the job.
        resources: Makes the communicators.

    Attributes:
        ranks: Ranks of the island.
        index: Index of this rank among them.
        group: Control group of the island; None for one rank.
        job_group: Control group of all ranks; None for one rank.
        outer_comm: Communicator of the outer step's all-reduces, between islands; None for one island.
        job_mesh: Device mesh of all ranks in one dimension, "shard"; None for one island.
    """

    def __init__(self, scopes: Scopes, resources: CommResources) -> None:
        first = resources.rank - resources.rank % scopes.world_size
        self.ranks = range(first, first + scopes.world_size)
        self.index = resources.rank - first
        self.job_group = self.group = resources.control_group("control", scopes.span(1, scopes.job_size))
        self.job_mesh: DeviceMesh | None = None
        if scopes.num_islands > 1:
            self.group = resources.control_group("control", scopes.span(1, scopes.world_size))
            all_ranks = scopes.span(1, scopes.job_size)
            self.job_mesh = resources.device_mesh(all_ranks, scopes.span(scopes.job_size, scopes.job_size))
        self.outer_comm = resources.communicator("outer_all_reduce", scopes)
        self._in_group = scopes.span(1, scopes.world_size).group_ranks(resources.rank)  # not always ascending
        self._resources = resources

    def gather_objects(self, value: T, purpose: str) -> list[T]:
        """The values of `ranks`, in their order. Collective over them.

        Args:
            value: Object that can be pickled.
            purpose: Subject of the agreement, for errors; the same on all ranks.
        """
        if self.group is None:
            return [value]
        is_watched = self.group.transport.blocks_host
        watch = self._resources.call_watch.watching(f"agreement on {purpose}", frozenset(self.ranks))
        with watch if is_watched else nullcontext():
            if self.group is self.job_group:
                return gather_objects(value, purpose)
            values = gather_objects(value, purpose, self.group.transport.group)
        return [value for _, value in sorted(zip(self._in_group, values, strict=True), key=itemgetter(0))]
