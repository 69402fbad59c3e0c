"""How many bytes do the model states of one rank take, and what do they cost to keep together?

Closed formulas over the number of parameters, for a choice of scopes; padding and travelling buffers are not in them.
`schedule` plans the same traffic collective by collective, and tests hold the two together.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mics_strategy.comm.route import HopTraffic, all_gather_traffic, all_reduce_traffic, reduce_scatter_traffic
from mics_strategy.comm.traffic import SENT_BYTES
from mics_strategy.scopes import Scopes

_SUM_DTYPE = torch.float32
_SUM_BYTES = _SUM_DTYPE.itemsize
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # any of their size: only that matters
_MOMENTS = 2  # Adam's


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Parameters of one dtype, trained or frozen.

    Attributes:
        numel: Elements of all of them.
        master_bytes: Of one element, as the optimizer updates it.
        param_bytes: Of one element, as it is gathered and used.
        wire_bytes: Of one element of the gradient, as it travels.
        is_trained: Whether it has gradients and optimizer states.
    """

    numel: int
    master_bytes: int
    param_bytes: int
    wire_bytes: int
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """What one optimizer step sends: bytes that enter a node (and leave it), and that a rank sends inside its node."""

    between_nodes_bytes: int
    inside_node_bytes: int


def state_bytes(kinds: Sequence[ParameterKind], scopes: Scopes) -> int:
    """Bytes of parameters, gradients and Adam's states on one rank. Frozen parameters have neither of the latter.

    Beside parameters that are sharded over fewer ranks than optimizer states, the engine keeps the shard of the finer
    scope of frozen ones, too, so that all parameters are labelled alike.

    Source:
        PaRO (arXiv:2310.06003) table 2; AMSP (arXiv:2311.00257) equation 1; with gradients summed in fp32, and the
        reduced gradient of a finer optimizer scope beside the sum.
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
    """What one optimizer step sends, when every unit is gathered for the forward and for the backward.

    Every kind of parameters counts as one large tensor: what goes in another way because it is small is not told apart.

    Source:
        MiCS (arXiv:2205.00119) sections 3.2 to 3.4; PaRO table 3, corrected; AMSP equations A2 to A10.
    """
    sizes = {axis.name: axis.size for axis in scopes.axes}
    between = inside = 0
    for times, message in (pair for kind in kinds for pair in _messages(kind, scopes, num_micro_steps)):
        sent = times * SENT_BYTES[message.collective](message.full_bytes, message.size)
        in_node = math.prod(sizes[name] for name in message.axis.split("+") if name.startswith("intra_node"))
        if in_node < message.size:  # a ring passes each of its nodes once; as many rings as the node has groups
            between += sent * scopes.ranks_per_node // in_node
        if in_node > 1:
            inside += sent
    return StepTraffic(between_nodes_bytes=between, inside_node_bytes=inside)


def _messages(kind: ParameterKind, scopes: Scopes, num_micro_steps: int) -> Iterator[tuple[int, HopTraffic]]:
    """What all parameters of a kind send in a step, as if they were one bucket, and how often."""
    param, wire = _DTYPES[kind.param_bytes], _DTYPES[kind.wire_bytes]
    for_backward = "secondary_all_gather" if scopes.secondary < scopes.params else "param_all_gather"
    for purpose, times, numel in (
        ("param_all_gather", num_micro_steps, kind.numel),
        (for_backward, num_micro_steps, kind.numel),
        ("param_sync", int(kind.is_trained), kind.numel // scopes.params),
    ):
        route = scopes.route(purpose, numel * kind.param_bytes)
        for message in all_gather_traffic(route, numel, param) if route is not None else ():
            yield times, message
    if not kind.is_trained:
        return
    for purpose, times, numel in (
        ("grad_reduce_scatter", num_micro_steps, kind.numel),
        ("second_hop_reduce_scatter", 1, kind.numel // scopes.grads),
    ):
        route = scopes.route(purpose, numel * kind.wire_bytes)
        for message in reduce_scatter_traffic(route, numel, wire) if route is not None else ():
            yield times, message
    numel = kind.numel // scopes.optimizer
    route = scopes.route("second_hop_all_reduce", numel * kind.wire_bytes)
    if route is not None:
        for message in all_reduce_traffic(route, numel, wire, _SUM_DTYPE):
            yield 1, message
