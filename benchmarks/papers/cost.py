"""Model states of one rank by closed formulas over the number of parameters.

They are without padding and communication buffers, which `planner.memory` has.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mics_strategy.scopes import Scopes

_SUM_BYTES = 4  # gradients are summed in fp32
_MOMENTS = 2  # Adam's


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Parameters of one dtype, trained or frozen.

    Attributes:
        numel: Elements of all of them.
        master_bytes: Bytes of one element of the master, which the optimizer updates.
        param_bytes: Bytes of one element as it is gathered and used.
        is_trained: Whether they have gradients and optimizer states.
    """

    numel: int
    master_bytes: int
    param_bytes: int
    is_trained: bool


def state_bytes(kinds: Sequence[ParameterKind], scopes: Scopes) -> int:
    """Bytes of parameters, gradients and Adam's states on one rank.

    Frozen parameters have only the first.

    Where parameters are sharded over fewer ranks than optimizer states, the engine also keeps the shard of frozen
    parameters in the optimizer scope, so that all parameters have the same kind of DTensor. Where both are sharded over
    the same ranks, all-gathers send masters, cast if need be, and no rank keeps a copy.

    Source:
        PaRO (arXiv:2310.06003) table 2; AMSP (arXiv:2311.00257), memory of model states by sharding factors; with
        gradients summed in fp32, and the reduced gradient of a finer optimizer scope in addition to the sum.
    """
    return sum(_bytes_of(kind, scopes) for kind in kinds)


def _bytes_of(kind: ParameterKind, scopes: Scopes) -> int:
    master_degree = 1 if scopes.params == 1 and not kind.is_trained else scopes.optimizer
    master = kind.master_bytes / master_degree
    sends_master = scopes.params == master_degree and (scopes.params > 1 or kind.param_bytes == kind.master_bytes)
    parameters = 0.0 if sends_master else kind.param_bytes / scopes.params
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
