"""Routes of collectives: stages and codecs.

A collective over ranks of several nodes may go in stages, one for each kind of link that it crosses: inside the nodes,
between the nodes of a switch, between switches. An all-gather starts with the slowest links, a reduce-scatter with the
fastest. The local rank is the most significant digit of a rank's index, so every stage moves a contiguous slice, and
nothing is rearranged.

Of a tensor of M bytes over p ranks, k in a node, all ranks of a node together send M (p - k) / p to other nodes; one
stage over all ranks would send M (p - 1) / p at best. The same holds for the k ranks of a switch. The time of a small
tensor is not that of its bytes but that of messages that wait for one another, and one stage may be faster. So a role
has routes by size.

What a route sends: `traffic`.

Pure.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from functools import cached_property

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.topology import Span

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"  # with pieces of any sizes: a rank sends what it holds for others
NEVER = 2**63 - 1  # size threshold of collectives that are always flat
TunableCollective = tuple[str, "Span"]  # a collective over several kinds of links


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalThreshold:
    """Size threshold of hierarchical collectives, bytes of the full tensor.

    Smaller ones are flat.

    Attributes:
        from_bytes: Threshold of collectives that are not in `measured`. 0: all are hierarchical; `NEVER`: none is.
        measured: Measured thresholds.
        is_untuned: Whether a job may measure thresholds that are missing.
    """

    from_bytes: int = 0
    measured: tuple[tuple[TunableCollective, int], ...] = ()
    is_untuned: bool = False

    def for_collective(self, collective: TunableCollective) -> int:
        """The threshold of one collective over one span, bytes."""
        return dict(self.measured).get(collective, self.from_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: the ranks that it connects, and its codec."""

    axis: str
    size: int
    codec: Codec | None = None

    @property
    def is_inside_node(self) -> bool:
        """Whether its ranks share a node."""
        return all(name.startswith("intra_node") for name in self.axis.split("+"))


@dataclass(frozen=True, kw_only=True)  # without slots, for what is computed once
class Route:
    """The stages of one collective.

    The index of a rank is ``sum(index in stage k * strides[k])``: that in the last stage is the most significant digit.

    Attributes:
        stages: Stages, slowest links first; at least one. Where some have a codec, the first ones have it.

    Source:
        MiCS (arXiv:2205.00119) section 3.3; ZeRO++ (arXiv:2306.10209) section 3.3.
    """

    stages: tuple[Stage, ...]

    @cached_property
    def size(self) -> int:
        """Ranks that take part."""
        return math.prod(stage.size for stage in self.stages)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Ranks of the stages before each stage, and at the end of all stages.

        They are the strides of the digits of an index.
        """
        return tuple(itertools.accumulate((stage.size for stage in self.stages), operator.mul, initial=1))

    @property
    def num_slices(self) -> int:
        """Slices of an all-reduce that go over the slowest links by themselves.

        There is one for each rank of all other stages.
        """
        return self.size // self.stages[0].size

    @property
    def num_quantized(self) -> int:
        """Leading stages with a codec: an all-gather encodes once for all of them."""
        return sum(stage.codec is not None for stage in self.stages)

    @property
    def num_quantized_sums(self) -> int:
        """Leading stages through which an all-reduce sends its encoded sums back.

        Inside a node it sends them decoded, unless there is no other stage.
        """
        return sum(
            stage.codec is not None and not (index and stage.is_inside_node) for index, stage in enumerate(self.stages)
        )

    @property
    def is_quantized(self) -> bool:
        """Whether any stage is quantized."""
        return self.stages[0].codec is not None

    @property
    def has_feedback(self) -> bool:
        """Whether what an encoding of a sum loses is added to the next one."""
        codec = self.stages[0].codec
        return codec is not None and codec.feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRoutes:
    """The routes of one role, by the size of the tensor.

    Attributes:
        hierarchical: Route of tensors of `hierarchical_from_bytes` bytes or more; of all where `flat` is None.
        flat: Route of smaller tensors.
        hierarchical_from_bytes: Bytes of the full tensor, counted unquantized.
    """

    hierarchical: Route
    flat: Route | None = None
    hierarchical_from_bytes: int = 0

    def for_bytes(self, full_bytes: int) -> Route:
        """The route of a tensor of `full_bytes` bytes."""
        return self.flat if self.flat is not None and full_bytes < self.hierarchical_from_bytes else self.hierarchical


def is_plain_all_reduce(route: Route, wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether an all-reduce uses that of the backend.

    Such a route has one stage, and is neither quantized nor rounded.
    """
    return len(route.stages) == 1 and not route.is_quantized and wire == dtype


def sum_dtype(stage: Stage, wire: torch.dtype, dtype: torch.dtype, *, sums_natively: bool) -> torch.dtype:
    """Dtype in which the sums of a stage go on to the next; the last sums have `dtype`.

    Args:
        stage: The stage.
        wire: Dtype of unquantized payloads.
        dtype: Dtype of the last sums.
        sums_natively: Whether the backend adds, in the dtype that it sends; see `Transport`.
    """
    return wire if sums_natively and stage.codec is None else dtype


def all_reduce_multiple(route: Route) -> int:
    """The divisor of a slice of an all-reduce. Ranks have equal shares of a slice, in whole blocks of the codec."""
    codec = route.stages[0].codec
    return route.stages[0].size * (codec.bound_numel if codec is not None else 1)


def all_reduce_slice(route: Route, numel: int) -> int:
    """Elements, with padding, of one slice. A rank sends them over the slowest links."""
    multiple = all_reduce_multiple(route)
    return -(-numel // (route.num_slices * multiple)) * multiple
