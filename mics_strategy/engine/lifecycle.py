"""What may happen to a unit next?

Four small machines, each one table from (state, event) to the next state. What a table does not list is
illegal and raises; nothing infers a state from whether some attribute is None.

- `UnshardState`: what a unit's slot holds for it.
- `UnitPhase`: who is using the unit's parameters. A forward inside the backward is a recomputation and changes
  nothing.
- `Collection`: the buffer in which one backward's gradients wait for their reduction.
- `AccumulatorState`: the accumulated gradient. PARTIAL still lacks other ranks' parts; SHARDED is the mean over all
  ranks.

Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from mics_strategy.errors import LifecycleError


class UnshardState(Enum):
    """What the slot holds for its unit."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class UnitPhase(Enum):
    """Who uses the unit's unsharded parameters."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class GradBufferState(Enum):
    """Where one backward's gradients of a bucket are."""

    EMPTY = "empty"
    FILLING = "filling"
    REDUCING = "reducing"


class AccumulatorState(Enum):
    """What the gradient accumulator of a bucket holds."""

    NONE = "none"
    PARTIAL = "partial"
    SHARDED = "sharded"


S = TypeVar("S", UnshardState, UnitPhase, GradBufferState, AccumulatorState)

UNSHARD_TRANSITIONS: dict[tuple[UnshardState, str], UnshardState] = {
    (UnshardState.SHARDED, "gather"): UnshardState.UNSHARDING,
    (UnshardState.UNSHARDING, "arrive"): UnshardState.UNSHARDED,
    (UnshardState.UNSHARDED, "evict"): UnshardState.SHARDED,
}

PHASE_TRANSITIONS: dict[tuple[UnitPhase, str], UnitPhase] = {
    (UnitPhase.IDLE, "enter_forward"): UnitPhase.FORWARD,
    (UnitPhase.FORWARD, "exit_forward"): UnitPhase.IDLE,
    (UnitPhase.IDLE, "enter_backward"): UnitPhase.BACKWARD,
    (UnitPhase.BACKWARD, "enter_backward"): UnitPhase.BACKWARD,
    (UnitPhase.BACKWARD, "enter_forward"): UnitPhase.BACKWARD,
    (UnitPhase.BACKWARD, "exit_forward"): UnitPhase.BACKWARD,
    (UnitPhase.BACKWARD, "exit_backward"): UnitPhase.IDLE,
}

GRAD_BUFFER_TRANSITIONS: dict[tuple[GradBufferState, str], GradBufferState] = {
    (GradBufferState.EMPTY, "collect"): GradBufferState.FILLING,
    (GradBufferState.FILLING, "collect"): GradBufferState.FILLING,
    (GradBufferState.EMPTY, "launch"): GradBufferState.REDUCING,
    (GradBufferState.FILLING, "launch"): GradBufferState.REDUCING,
    (GradBufferState.REDUCING, "land"): GradBufferState.EMPTY,
    (GradBufferState.FILLING, "abandon"): GradBufferState.EMPTY,
    (GradBufferState.EMPTY, "abandon"): GradBufferState.EMPTY,
}

ACCUMULATOR_TRANSITIONS: dict[tuple[AccumulatorState, str], AccumulatorState] = {
    (AccumulatorState.NONE, "accumulate"): AccumulatorState.PARTIAL,
    (AccumulatorState.PARTIAL, "accumulate"): AccumulatorState.PARTIAL,
    (AccumulatorState.SHARDED, "accumulate"): AccumulatorState.PARTIAL,
    (AccumulatorState.PARTIAL, "finish"): AccumulatorState.SHARDED,
    (AccumulatorState.NONE, "clear"): AccumulatorState.NONE,
    (AccumulatorState.PARTIAL, "clear"): AccumulatorState.NONE,
    (AccumulatorState.SHARDED, "clear"): AccumulatorState.NONE,
}


def transition(table: dict[tuple[S, str], S], state: S, event: str, subject: str) -> S:
    """The state after `event`.

    Args:
        table: One of the tables above.
        state: Where the machine is.
        event: What happens.
        subject: Names the unit in the error.

    Raises:
        LifecycleError: The table does not allow `event` in `state`.
    """
    following = table.get((state, event))
    if following is None:
        allowed = sorted(name for known, name in table if known is state)
        raise LifecycleError(
            f"{subject}: `{event}` came while its {type(state).__name__.lower()} was {state.value}; allowed then: "
            f"{', '.join(allowed)}. "
            "Was its forward or backward entered from two threads, or interrupted by an exception that was swallowed?"
        )
    return following
