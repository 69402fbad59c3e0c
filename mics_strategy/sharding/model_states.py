"""How many bytes do the model states of one rank take, and what do they cost to keep together?

Closed formulas over the number of parameters, for a choice of scopes; padding and travelling buffers are not in them.
`schedule` plans the same traffic collective by collective, and tests hold the two together.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mics_strategy.collectives.traffic import all_reduce_bytes, gather_bytes, reduce_scatter_bytes
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Span

_SUM_BYTES = 4  # gradients are summed in fp32
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

    Source:
        MiCS (arXiv:2205.00119) sections 3.2 to 3.4; PaRO table 3, corrected; AMSP equations A2 to A10.
    """
    gather, secondary = scopes.span(1, scopes.params), scopes.span(1, scopes.secondary)
    reduce, second = scopes.span(1, scopes.grads), scopes.span(scopes.grads, scopes.optimizer)
    replicas, update = scopes.span(scopes.optimizer, scopes.world_size), scopes.span(scopes.params, scopes.optimizer)
    sent: list[tuple[Span, int]] = []
    for kind in kinds:
        whole = kind.numel * kind.param_bytes
        sent.append((gather, num_micro_steps * gather_bytes(whole, gather.size)))
        sent.append((secondary, num_micro_steps * gather_bytes(whole, secondary.size)))
        if not kind.is_trained:
            continue
        grads = kind.numel * kind.wire_bytes
        sent.append((reduce, num_micro_steps * reduce_scatter_bytes(grads, reduce.size)))
        sent.append((second, reduce_scatter_bytes(grads // scopes.grads, second.size)))
        sent.append((replicas, all_reduce_bytes(grads // scopes.optimizer, replicas.size)))
        sent.append((update, gather_bytes(whole // scopes.params, update.size)))
    between = inside = 0
    for span, num_bytes in sent:
        in_node = _ranks_in_node(span)
        if in_node < span.size:  # a ring passes each of its nodes once; as many rings as the node has groups
            between += num_bytes * scopes.ranks_per_node // in_node
        if in_node > 1:
            inside += num_bytes
    return StepTraffic(between_nodes_bytes=between, inside_node_bytes=inside)


def _ranks_in_node(span: Span) -> int:
    size = 1
    for axis in span.axes:
        size *= axis.size if axis.name.startswith("intra_node") else 1
    return size
