"""Process groups of one rank, and the scratch memory of their collectives.

The groups are those that `comm.resources` makes on a backend with streams: roles on one stream share a group over the
same ranks, and control messages use the default group.

Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mics_strategy.comm.route import ALL_GATHER, REDUCE_SCATTER, Route, SizedRoutes
from mics_strategy.comm.scratch import all_gather_scratch_bytes, all_reduce_scratch_bytes, reduce_scatter_scratch_bytes
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.scopes import COLLECTIVES, STREAM_OF, Scopes
from mics_strategy.topology import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class CommLayout:
    """Routes of a job's collectives, and what follows from them alone.

    Attributes:
        routes: Routes of each role; those without codecs of gradients as well, where there are such codecs.
        num_communicators: NCCL's communicators of one rank: one for each process group, and the default one.
        encoded_streams: Streams on which a collective is encoded while the one before it is sent.
        block_numels: Elements of a codec block, of frozen and of trained parameters.
        is_first_hop_quantized: Whether gradients are encoded in every backward.
    """

    routes: Mapping[str, tuple[SizedRoutes, ...]]
    num_communicators: int
    encoded_streams: frozenset[str]
    block_numels: tuple[int, int]
    is_first_hop_quantized: bool


@functools.lru_cache(maxsize=4096)
def comm_layout(scopes: Scopes) -> CommLayout:
    """The routes of a job. Cached: a planner asks for the same scopes often."""
    has_codec = scopes.codecs.first_hop is not None or scopes.codecs.second_hop is not None
    variants = [scopes, scopes.without_grad_codecs()] if has_codec else [scopes]
    routes = {role: tuple(s for variant in variants if (s := variant.routes(role)) is not None) for role in COLLECTIVES}
    mesh_spans = (scopes.span(1, scopes.optimizer), scopes.span_of("second_hop_all_reduce"))
    in_default_group = [span for span in mesh_spans if span.size == scopes.world_size and span.is_in_rank_order]
    groups = {("mesh", span) for span in mesh_spans if span not in in_default_group}
    encoded = set()
    for role, stream in STREAM_OF.items():
        for route in (route for sized in routes[role] for route in _both(sized)):
            groups |= {(stream, span) for span in _spans(route, role, scopes)}
            encoded |= {stream} if route.is_quantized else set()
    return CommLayout(
        routes=routes,
        num_communicators=1 + len([span for _, span in groups if span.size > 1]),
        encoded_streams=frozenset(encoded),
        block_numels=(scopes.block_numel(is_trainable=False), scopes.block_numel(is_trainable=True)),
        is_first_hop_quantized=scopes.is_quantized("grad_reduce_scatter"),
    )


def _both(sized: SizedRoutes) -> tuple[Route, ...]:
    return (sized.hierarchical,) if sized.flat is None else (sized.hierarchical, sized.flat)


def _spans(route: Route, role: str, scopes: Scopes) -> tuple[Span, ...]:
    """Ranks of each stage of a role's collectives."""
    span = scopes.span_of(role)
    return span.split_by_link() if len(route.stages) > 1 else (span,)


class Workspaces:
    """Scratch memory by stream: that of the largest collective.

    It is doubled where one collective is encoded while another is sent.

    Args:
        comms: Routes of the job.
    """

    def __init__(self, comms: CommLayout) -> None:
        self._comms = comms
        self._largest = dict.fromkeys(STREAM_OF.values(), 0)

    def reserve(self, role: str, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Announce a collective.

        Args:
            role: Role of the collective.
            numel: Elements of its full tensor.
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the sum.
        """
        for sized in self._comms.routes[role]:
            route = sized.for_bytes(numel * wire.itemsize)
            self._keep(role, _scratch_bytes(role, route, numel, wire, dtype))

    def reserve_coalesced(self, role: str, numel: int, wire: torch.dtype) -> None:
        """Announce a collective of several tensors in one launch; see `reserve`."""
        for route in coalescing_routes(self._comms, role, numel * wire.itemsize):
            shard_numel = numel // route.size
            rows = route.strides[:-1] if COLLECTIVES[role] == REDUCE_SCATTER else (1,)
            self._keep(role, aligned_bytes(*((shard_numel * count, wire) for count in rows)))

    def _keep(self, role: str, num_bytes: int) -> None:
        stream = STREAM_OF[role]
        self._largest[stream] = max(self._largest[stream], num_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all streams together."""
        return sum(
            (2 if stream in self._comms.encoded_streams else 1) * largest for stream, largest in self._largest.items()
        )


def coalescing_routes(comms: CommLayout, role: str, full_bytes: int) -> list[Route]:
    """The routes of a full tensor that take several tensors in one launch."""
    routes = [sized.for_bytes(full_bytes) for sized in comms.routes[role]]
    return [route for route in routes if not route.is_quantized]


def _scratch_bytes(role: str, route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    collective = COLLECTIVES[role]
    if collective == ALL_GATHER:
        return all_gather_scratch_bytes(route, numel // route.size)
    if collective == REDUCE_SCATTER:
        return reduce_scatter_scratch_bytes(route, numel, wire, dtype, sums_natively=True)
    return all_reduce_scratch_bytes(route, numel, wire, dtype, sums_natively=True)
