"""State tables of units and gradients.

Four small machines, each one table from (state, event) to the next state. An event that a table does not list is
illegal and raises; no code infers a state from whether some attribute is None.

- `UnshardState`: what a unit's slot holds for it.
- `UnitPhase`: who is using the unit's parameters. A forward inside the backward is a recomputation and changes
  nothing.
- `GradBufferState`: the buffer in which one backward's gradients wait for their reduction.
- `AccumulatorState`: the accumulated gradient. PARTIAL still lacks other ranks' parts; SHARDED is the mean over all
  ranks.

Inside a bucket every parameter has flags of its own, `GradFlag`, and a table of what each event sets and clears.

Pure.
"""

from __future__ import annotations

from enum import Enum, IntEnum
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


class GradFlag(IntEnum):
    """Facts about one parameter's gradient on this rank.

    Attributes:
        USED: This rank has contributed to it since gradients were cleared.
        MAYBE_USED: Some rank may have contributed to it in this accumulation window, or it is exposed.
        ARRIVED: It has arrived in the present backward and no first hop has taken it.
        ACCUMULATED: The accumulator holds a sum of it; where not set, its bytes there are undefined.
        HAS_PRIOR_MEAN: The result holds an earlier mean of it; where not set, its bytes there are undefined.
    """

    USED = 0
    MAYBE_USED = 1
    ARRIVED = 2
    ACCUMULATED = 3
    HAS_PRIOR_MEAN = 4


GRAD_FLAG_EVENTS: dict[str, tuple[tuple[GradFlag, ...], tuple[GradFlag, ...]]] = {  # what an event sets and clears
    "arrive": ((GradFlag.USED, GradFlag.ARRIVED), ()),
    "accumulate": ((GradFlag.ACCUMULATED,), ()),
    "reduce": ((GradFlag.ACCUMULATED,), (GradFlag.ARRIVED,)),
    "end_backward": ((), (GradFlag.ARRIVED,)),
    "start_window": ((GradFlag.MAYBE_USED,), (GradFlag.ACCUMULATED, GradFlag.HAS_PRIOR_MEAN)),
    "reopen_window": ((GradFlag.MAYBE_USED,), (GradFlag.ACCUMULATED,)),
    "finish": ((GradFlag.HAS_PRIOR_MEAN,), (GradFlag.MAYBE_USED,)),
    "expose": ((GradFlag.MAYBE_USED,), ()),
    "clear": ((), (GradFlag.USED, GradFlag.MAYBE_USED, GradFlag.ACCUMULATED, GradFlag.HAS_PRIOR_MEAN)),
}


class GradFlags:
    """The flags of all parameters of one bucket: for each flag an integer whose bit `i` is parameter `i`'s.

    Args:
        count: Number of parameters.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._everywhere = (1 << count) - 1
        self._bits = [0] * len(GradFlag)

    def apply(self, event: str, position: int) -> None:
        """Apply `event` to the parameter at `position`."""
        self._apply(event, 1 << position)

    def apply_to_all(self, event: str) -> None:
        """Apply `event` to every parameter."""
        self._apply(event, self._everywhere)

    def has(self, flag: GradFlag, position: int) -> bool:
        """Whether the parameter at `position` has `flag`."""
        return self._bits[flag] >> position & 1 == 1

    def any(self, flag: GradFlag) -> bool:
        """Whether any parameter has `flag`."""
        return self._bits[flag] != 0

    def having(self, flag: GradFlag) -> list[int]:
        """Positions of the parameters that have `flag`."""
        return self._positions(self._bits[flag])

    def lacking(self, flag: GradFlag) -> list[int]:
        """Positions of the parameters that lack `flag`."""
        return self._positions(self._everywhere & ~self._bits[flag])

    def _apply(self, event: str, parameters: int) -> None:
        changes = GRAD_FLAG_EVENTS.get(event)
        if changes is None:
            raise LifecycleError(f"`{event}` is no event of a gradient. Known events: {', '.join(GRAD_FLAG_EVENTS)}.")
        for flag in changes[0]:
            self._bits[flag] |= parameters
        for flag in changes[1]:
            self._bits[flag] &= ~parameters

    def _positions(self, bits: int) -> list[int]:
        return [position for position in range(self._count) if bits >> position & 1] if bits else []


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
