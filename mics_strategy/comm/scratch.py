"""Memory that collectives need: scratch memory of their stages, and communicators of NCCL.

Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mics_strategy.comm.route import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Route,
    SizedRoutes,
    Stage,
    all_reduce_slice,
    is_plain_all_reduce,
    sum_dtype,
)
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.scopes import COLLECTIVES, STREAM_OF, Scopes
from mics_strategy.topology import Span

# 0.5 to 0.7 GB on four A100 (NVIDIA/nccl#964). Not measured by this project.
COMMUNICATOR_BYTES = 600_000_000


def scratch_bytes(
    route: Route, collective: str, numel: int, wire: torch.dtype, dtype: torch.dtype, *, sums_natively: bool
) -> int:
    """Bytes for one collective.

    Args:
        route: Route of the collective.
        collective: `ALL_GATHER`, `REDUCE_SCATTER` or `ALL_REDUCE` of `route`.
        numel: Elements of the full tensor.
        wire: Dtype of unquantized payloads.
        dtype: Dtype of the result.
        sums_natively: Whether the backend adds; see `Transport`.
    """
    if collective == ALL_GATHER:
        return _all_gather_bytes(route, numel // route.size)
    if collective == REDUCE_SCATTER:
        return _StageBytes(route, wire, dtype, sums_natively).reduce_scatter(numel // route.size, wire)
    return _all_reduce_bytes(route, numel, wire, dtype, sums_natively)


def coalesced_scratch_bytes(route: Route, collective: str, numel: int, wire: torch.dtype) -> int:
    """Bytes for a collective on several tensors in one launch; for arguments see `scratch_bytes`."""
    rows = route.strides[:-1] if collective == REDUCE_SCATTER else (1,)
    return 0 if route.is_quantized else aligned_bytes(*((numel // route.size * count, wire) for count in rows))


def _all_gather_bytes(route: Route, numel: int) -> int:
    """Bytes for an all-gather of shards of `numel` elements: all ranks' payloads."""
    codec = route.stages[0].codec
    has_differences = codec is not None and codec.differences
    difference = [(numel, torch.float32)] if has_differences else []
    return _payload_bytes(route, route.num_quantized, numel) + aligned_bytes(*difference)


def _all_reduce_bytes(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype, sums_natively: bool) -> int:
    if not numel or is_plain_all_reduce(route, wire, dtype):
        return 0
    sums = _StageBytes(route, wire, dtype, sums_natively)
    full_numel = route.num_slices * all_reduce_slice(route, numel)
    row_numel, first_dtype = full_numel // route.size, sums.sum_dtype(route.stages[-1])
    num_bytes = sums.partial_sums(row_numel, first_dtype)
    num_bytes += _payload_bytes(route, route.num_quantized_sums, row_numel)
    if route.is_quantized or not sums_natively:
        source = first_dtype if len(route.stages) == 1 else sums.sum_dtype(route.stages[1])
        num_bytes += sums.sum_of(route.stages[0], row_numel, source) + aligned_bytes((row_numel, dtype))
        if not route.is_quantized and source != wire:
            num_bytes += aligned_bytes((route.stages[0].size * row_numel, wire))
    if full_numel != numel or first_dtype != dtype:
        num_bytes += aligned_bytes((full_numel, first_dtype))
    if len(route.stages) > 1 and wire != first_dtype:
        num_bytes += aligned_bytes((full_numel, wire))
    return num_bytes


def _payload_bytes(route: Route, num_stages: int, numel: int) -> int:
    """Bytes of the payloads of all ranks of the first stages. It is 0 where they are not quantized."""
    codec = route.stages[0].codec
    return 0 if codec is None else aligned_bytes((route.strides[num_stages] * codec.encoded_bytes(numel), torch.uint8))


class _StageBytes:
    """Scratch memory of the stages of one sum; for arguments see `scratch_bytes`."""

    def __init__(self, route: Route, wire: torch.dtype, dtype: torch.dtype, sums_natively: bool) -> None:
        self._route = route
        self._wire = wire
        self._sums_natively = sums_natively
        self.sum_dtype = partial(sum_dtype, wire=wire, dtype=dtype, sums_natively=sums_natively)

    def reduce_scatter(self, numel: int, source: torch.dtype) -> int:
        """Bytes for all stages of a reduce-scatter.

        Args:
            numel: Elements of each rank's sum.
            source: Dtype of the full tensor.
        """
        if len(self._route.stages) > 1:
            return self.partial_sums(numel, source) + self.sum_of(
                self._route.stages[0], numel, self.sum_dtype(self._route.stages[1])
            )
        return self.sum_of(self._route.stages[0], numel, source)

    def partial_sums(self, numel: int, source: torch.dtype) -> int:
        """Bytes for the sums of all stages but the slowest; for arguments see `reduce_scatter`."""
        num_bytes = 0
        for stage, rows in reversed([*zip(self._route.stages, self._route.strides, strict=False)][1:]):
            num_bytes += self.sum_of(stage, rows * numel, source)
            source = self.sum_dtype(stage)
            num_bytes += aligned_bytes((rows * numel, source))
        return num_bytes

    def sum_of(self, stage: Stage, numel: int, source: torch.dtype) -> int:
        """Bytes for one stage that sums tables of `source`, with rows of `numel` elements."""
        if stage.codec is not None:
            return 2 * aligned_bytes((stage.size * stage.codec.encoded_bytes(numel), torch.uint8))
        if self._sums_natively:
            return aligned_bytes((numel, self._wire))
        return (1 if source == self._wire else 2) * aligned_bytes((stage.size * numel, self._wire))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommLayout:
    """Routes of a job's collectives, and what follows from them alone.

    The groups are those that `comm.resources` makes on a backend with streams: roles on one stream share a group over
    the same ranks, and control messages use the default group.

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
    mesh_spans, controls = {scopes.span(1, scopes.optimizer), scopes.span_of("second_hop_all_reduce")}, set()
    if scopes.num_islands > 1:
        mesh_spans.add(scopes.span(1, scopes.job_size))
        controls.add(("control", scopes.span(1, scopes.world_size)))
    in_default_group = [span for span in mesh_spans if span.size == scopes.job_size and span.is_in_rank_order]
    groups = controls | {("mesh", span) for span in mesh_spans if span not in in_default_group}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveShape:
    """A collective that needs scratch memory.

    Attributes:
        role: Role of the collective.
        numel: Elements of its full tensor.
        wire: Dtype of unquantized payloads.
        dtype: Dtype of the sum.
        is_coalesced: Whether it takes several tensors in one launch.
    """

    role: str
    numel: int
    wire: torch.dtype
    dtype: torch.dtype
    is_coalesced: bool = False


def workspace_bytes(comms: CommLayout, shapes: Iterable[CollectiveShape]) -> int:
    """Scratch memory of all streams on a backend that adds: on each that of the largest collective.

    It is doubled where one collective is encoded while another is sent.
    """
    largest = dict.fromkeys(STREAM_OF.values(), 0)
    for shape in shapes:
        stream = STREAM_OF[shape.role]
        for sized in comms.routes[shape.role]:
            route = sized.for_bytes(shape.numel * shape.wire.itemsize)
            largest[stream] = max(largest[stream], _scratch_bytes(route, shape))
    return sum((2 if stream in comms.encoded_streams else 1) * num_bytes for stream, num_bytes in largest.items())


def _scratch_bytes(route: Route, shape: CollectiveShape) -> int:
    collective = COLLECTIVES[shape.role]
    if shape.is_coalesced:
        return coalesced_scratch_bytes(route, collective, shape.numel, shape.wire)
    return scratch_bytes(route, collective, shape.numel, shape.wire, shape.dtype, sums_natively=True)
