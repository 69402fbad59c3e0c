"""Cost model: model states of one rank, and traffic of one optimizer step.

Closed formulas over the number of parameters, for given scopes; without padding and communication buffers.
`engine.plan` plans the same traffic collective by collective, and tests compare the two.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.route import (
    SENT_BYTES,
    HopTraffic,
    all_gather_traffic,
    all_reduce_traffic,
    reduce_scatter_traffic,
)

if TYPE_CHECKING:
    from mics_strategy.scopes import Scopes

_SUM_DTYPE = torch.float32
_SUM_BYTES = _SUM_DTYPE.itemsize
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # any dtype of that size
_MOMENTS = 2  # Adam's


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Parameters of one dtype, trained or frozen.

    Attributes:
        numel: Elements of all of them.
        master_bytes: Bytes of one element of the master, which the optimizer updates.
        param_bytes: Bytes of one element as it is gathered and used.
        wire_bytes: Bytes of one element of the gradient on the wire.
        is_trained: Whether they have gradients and optimizer states.
    """

    numel: int
    master_bytes: int
    param_bytes: int
    wire_bytes: int
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Traffic of one optimizer step.

    Attributes:
        between_nodes_bytes: Bytes that enter a node, and as many that leave it.
        inside_node_bytes: Bytes that one rank sends inside its node.
    """

    between_nodes_bytes: int
    inside_node_bytes: int


def state_bytes(kinds: Sequence[ParameterKind], scopes: Scopes) -> int:
    """Bytes of parameters, gradients and Adam's states on one rank.

    Frozen parameters have only the first.

    Where parameters are sharded over fewer ranks than optimizer states, the engine also keeps the shard of frozen
    parameters in the optimizer scope, so that all parameters have the same kind of DTensor.

    Source:
        PaRO (arXiv:2310.06003) table 2; AMSP (arXiv:2311.00257), memory of model states by sharding factors; with
        gradients summed in fp32, and the reduced gradient of a finer optimizer scope in addition to the sum.
    """
    return sum(_bytes_of(kind, scopes) for kind in kinds)


def _bytes_of(kind: ParameterKind, scopes: Scopes) -> int:
    master_degree = 1 if scopes.params == 1 and not kind.is_trained else scopes.optimizer
    master = kind.master_bytes / master_degree
    is_master = scopes.params == master_degree and kind.param_bytes == kind.master_bytes
    parameters = 0.0 if is_master else kind.param_bytes / scopes.params
    if scopes.secondary < scopes.params:
        parameters += kind.param_bytes / scopes.secondary
    gradients = 0.0
    if kind.is_trained:
        master += _MOMENTS * kind.master_bytes / scopes.optimizer
        gradients = _SUM_BYTES / scopes.grads
        if scopes.grads != scopes.optimizer:
            gradients += _SUM_BYTES / scopes.optimizer
        if kind.master_bytes < _SUM_BYTES:
            gradients += kind.master_bytes / scopes.optimizer
    return round(kind.numel * (master + parameters + gradients))


def step_traffic(kinds: Sequence[ParameterKind], scopes: Scopes, num_micro_steps: int) -> StepTraffic:
    """Traffic of one optimizer step.

    Every unit is gathered for the forward and for the backward.

    Each kind of parameters counts as one large tensor: the flat route of small tensors is not modelled.

    Source:
        MiCS (arXiv:2205.00119) sections 3.2 to 3.4; PaRO (arXiv:2310.06003) table 3, corrected; AMSP
        (arXiv:2311.00257), communication cost by sharding factors.
    """
    sizes = {axis.name: axis.size for axis in scopes.axes}
    between_bytes = inside_bytes = 0
    for count, hop in (pair for kind in kinds for pair in _hops(kind, scopes, num_micro_steps)):
        sent_bytes = count * SENT_BYTES[hop.collective](hop.full_bytes, hop.size)
        in_node = math.prod(sizes[name] for name in hop.axis.split("+") if name.startswith("intra_node"))
        if in_node < hop.size:  # a ring enters each of its nodes once; as many rings as the node has groups
            between_bytes += sent_bytes * scopes.ranks_per_node // in_node
        if in_node > 1:
            inside_bytes += sent_bytes
    return StepTraffic(between_nodes_bytes=between_bytes, inside_node_bytes=inside_bytes)


def _hops(kind: ParameterKind, scopes: Scopes, num_micro_steps: int) -> Iterator[tuple[int, HopTraffic]]:
    """The collectives of all parameters of a kind in a step, each with its count.

    The parameters count as one bucket.
    """
    param, wire = _DTYPES[kind.param_bytes], _DTYPES[kind.wire_bytes]
    num_gathers = 2 * num_micro_steps
    num_primary = int(kind.is_trained) if scopes.has_secondary else num_gathers  # frozen ones: before the first step
    for role, count, numel in (
        ("param_all_gather", num_primary, kind.numel),
        ("secondary_all_gather", num_gathers - num_primary, kind.numel),
        ("param_sync", int(kind.is_trained), kind.numel // scopes.params),
    ):
        route = scopes.route(role, numel * kind.param_bytes)
        for hop in all_gather_traffic(route, numel, param) if route is not None else ():
            yield count, hop
    if not kind.is_trained:
        return
    for role, count, numel in (
        ("grad_reduce_scatter", num_micro_steps, kind.numel),
        ("second_hop_reduce_scatter", 1, kind.numel // scopes.grads),
    ):
        route = scopes.route(role, numel * kind.wire_bytes)
        for hop in reduce_scatter_traffic(route, numel, wire) if route is not None else ():
            yield count, hop
    numel = kind.numel // scopes.optimizer
    route = scopes.route("second_hop_all_reduce", numel * kind.wire_bytes)
    if route is not None:
        for hop in all_reduce_traffic(route, numel, wire, _SUM_DTYPE):
            yield 1, hop
