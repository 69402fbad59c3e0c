"""Process groups of one rank, and the scratch memory of their collectives.

The groups are those that `comm.resources` makes on a backend with streams: roles on one stream share a group over the
same ranks.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mics_strategy.comm.route import ALL_GATHER, REDUCE_SCATTER
from mics_strategy.comm.scratch import all_gather_scratch_bytes, all_reduce_scratch_bytes, reduce_scatter_scratch_bytes
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.scopes import COLLECTIVES

if TYPE_CHECKING:
    import torch

    from mics_strategy.comm.route import Route, SizedRoutes
    from mics_strategy.scopes import Scopes
    from mics_strategy.topology import Span

# 0.5 to 0.7 GB on four A100 (NVIDIA/nccl#964). Not measured by this project.
COMMUNICATOR_BYTES = 600_000_000

_STREAMS = {  # roles by stream
    "gather": ("param_all_gather", "secondary_all_gather", "param_sync"),
    "reduce": ("grad_reduce_scatter",),
    "second_hop": ("second_hop_reduce_scatter", "second_hop_all_reduce"),
}


def num_communicators(scopes: Scopes) -> int:
    """NCCL's communicators of one rank: one for each process group, and the default one."""
    groups = {("control", scopes.span(1, scopes.world_size))}
    groups |= {
        ("control", span) for span in (scopes.span(1, scopes.optimizer), scopes.span_of("second_hop_all_reduce"))
    }
    for variant in _variants(scopes):
        for stream, roles in _STREAMS.items():
            for role in roles:
                groups |= {
                    (stream, span) for route in _routes(variant.routes(role)) for span in _spans(route, role, scopes)
                }
    return 1 + len([span for _, span in groups if span.size > 1])


def _variants(scopes: Scopes) -> list[Scopes]:
    """The scopes, and with codecs of gradients also those without: `grad_codec_until` switches between them."""
    has_codec = scopes.codecs.first_hop is not None or scopes.codecs.second_hop is not None
    return [scopes, scopes.without_grad_codecs()] if has_codec else [scopes]


def _routes(sized: SizedRoutes | None) -> list[Route]:
    if sized is None:
        return []
    return [sized.hierarchical, *([] if sized.flat is None else [sized.flat])]


def _spans(route: Route, role: str, scopes: Scopes) -> tuple[Span, ...]:
    """Ranks of each stage of a role's collectives."""
    span = scopes.span_of(role)
    return span.split_by_link() if len(route.hops) > 1 else (span,)


class Workspaces:
    """Scratch memory by stream: that of the largest collective, twice where one is encoded ahead.

    Args:
        scopes: Degrees and codecs.
    """

    def __init__(self, scopes: Scopes) -> None:
        self._largest = dict.fromkeys(_STREAMS, 0)
        self._stream_of = {role: stream for stream, roles in _STREAMS.items() for role in roles}
        self._variants = _variants(scopes)
        self._sized = {role: [variant.routes(role) for variant in self._variants] for role in COLLECTIVES}
        self._encodes = {
            stream: any(route.is_quantized for role in roles for sized in self._sized[role] for route in _routes(sized))
            for stream, roles in _STREAMS.items()
        }

    def reserve(self, role: str, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Announce a collective.

        Args:
            role: Role of the collective.
            numel: Elements of its full tensor.
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the sum.
        """
        for sized in self._sized[role]:
            if sized is not None:
                route = sized.for_bytes(numel * wire.itemsize)
                self._keep(role, _scratch_bytes(role, route, numel, wire, dtype))

    def reserve_coalesced(self, role: str, numel: int, wire: torch.dtype) -> None:
        """Announce a collective of several tensors in one launch; see `reserve`."""
        for route in self.coalescing_routes(role, numel * wire.itemsize):
            shard_numel = numel // route.size
            rows = route.strides[:-1] if COLLECTIVES[role] == REDUCE_SCATTER else (1,)
            self._keep(role, aligned_bytes(*((shard_numel * count, wire) for count in rows)))

    def coalescing_routes(self, role: str, full_bytes: int) -> Iterator[Route]:
        """The routes of a tensor that can take several tensors in one launch: those that are not quantized."""
        for sized in self._sized[role]:
            if sized is not None and not (route := sized.for_bytes(full_bytes)).is_quantized:
                yield route

    def _keep(self, role: str, num_bytes: int) -> None:
        stream = self._stream_of[role]
        self._largest[stream] = max(self._largest[stream], num_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all streams together."""
        return sum((2 if self._encodes[stream] else 1) * largest for stream, largest in self._largest.items())


def _scratch_bytes(role: str, route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    collective = COLLECTIVES[role]
    if collective == ALL_GATHER:
        return all_gather_scratch_bytes(route, numel // route.size)
    if collective == REDUCE_SCATTER:
        return reduce_scatter_scratch_bytes(route, numel, wire, dtype)
    return all_reduce_scratch_bytes(route, numel, wire, dtype)
