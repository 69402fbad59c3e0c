"""State tables of units and gradients.

There are four small state machines. Each is one table from (state, event) to the next state. An event that a table does
not list is illegal and raises.

- `UnshardState`: content of a unit's slot.
- `UnitPhase`: pass that uses the unit's parameters. A forward inside of the backward is a recomputation and changes
  nothing.
- `GradBufferState`: buffer of one backward's gradients until their reduction.
- `AccumulatorState`: accumulated gradient. PARTIAL lacks the parts of other ranks. SHARDED is the mean over all ranks.

In addition, every parameter of a bucket has flags, `GradFlag`, with a table of the flags that each event sets and
clears.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import TypeVar

from mics_strategy.errors import LifecycleError


class _State(Enum):
    """A state of one of the machines. It is hashed by identity, as tables are looked up in every hook."""

    __hash__ = object.__hash__


class UnshardState(_State):
    """State of a unit's unsharded parameters in its slot."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class UnitPhase(_State):
    """Pass that uses the unit's unsharded parameters."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class GradBufferState(_State):
    """State of the buffer of one backward's gradients of a bucket."""

    EMPTY = "empty"
    FILLING = "filling"
    REDUCING = "reducing"


class AccumulatorState(_State):
    """Content of a bucket's gradient accumulator."""

    NONE = "none"
    PARTIAL = "partial"
    SHARDED = "sharded"


class GradFlag(IntEnum):
    """Flags of one parameter's gradient on this rank.

    Attributes:
        USED: This rank has contributed to the gradient since gradients were cleared.
        MAYBE_USED: Some rank may have contributed to the gradient in this accumulation window, or it is exposed.
        ARRIVED: The gradient has arrived in the present backward and no first hop has taken it.
        ACCUMULATED: The accumulator holds a sum of the gradient. Without this flag its bytes there are undefined.
        HAS_PRIOR_MEAN: The result holds an earlier mean of the gradient. Without this flag its bytes there are
            undefined.
    """

    USED = 0
    MAYBE_USED = 1
    ARRIVED = 2
    ACCUMULATED = 3
    HAS_PRIOR_MEAN = 4


GRAD_FLAG_EVENTS: dict[
    str, tuple[tuple[GradFlag, ...], tuple[GradFlag, ...]]
] = {  # flags that an event sets, and flags that it clears
    "add_grad": ((GradFlag.USED, GradFlag.ARRIVED), ()),
    "accumulate": ((GradFlag.ACCUMULATED,), ()),
    "start_reduce": ((GradFlag.ACCUMULATED,), (GradFlag.ARRIVED,)),
    "end_backward": ((), (GradFlag.ARRIVED,)),
    "start_accumulation": ((GradFlag.MAYBE_USED,), (GradFlag.ACCUMULATED, GradFlag.HAS_PRIOR_MEAN)),
    "resume_accumulation": ((GradFlag.MAYBE_USED,), (GradFlag.ACCUMULATED,)),
    "finish": ((GradFlag.HAS_PRIOR_MEAN,), ()),
    "discard_unused": ((), (GradFlag.MAYBE_USED, GradFlag.ACCUMULATED, GradFlag.HAS_PRIOR_MEAN)),
    "zero_grad": ((), (GradFlag.USED, GradFlag.MAYBE_USED, GradFlag.ACCUMULATED, GradFlag.HAS_PRIOR_MEAN)),
}


_BIT = (1).__lshift__


class GradFlags:
    """Flags of all parameters of one bucket.

    Each flag is stored as an integer. Its bit `i` belongs to the parameter at position `i`.

    Args:
        count: Number of parameters.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._everywhere = (1 << count) - 1
        self._bits = [0] * len(GradFlag)

    def apply(self, event: str, positions: Iterable[int] | None = None) -> None:
        """Apply `event` to the parameters at `positions`; None for all of them."""
        bits = self._bits
        parameters = self._everywhere if positions is None else sum(map(_BIT, positions))
        changes = GRAD_FLAG_EVENTS.get(event)
        if changes is None:
            raise LifecycleError(f"`{event}` is no event of a gradient. Known events: {', '.join(GRAD_FLAG_EVENTS)}.")
        for flag in changes[0]:
            bits[flag] |= parameters
        for flag in changes[1]:
            bits[flag] &= ~parameters

    def has(self, flag: GradFlag, position: int) -> bool:
        """Whether the parameter at `position` has `flag`."""
        return self._bits[flag] >> position & 1 == 1

    def any(self, flag: GradFlag) -> bool:
        """Whether any parameter has `flag`."""
        return self._bits[flag] != 0

    def positions_with(self, flag: GradFlag) -> list[int]:
        """Positions of the parameters that have `flag`."""
        return self._positions(self._bits[flag])

    def positions_without(self, flag: GradFlag) -> list[int]:
        """Positions of the parameters that lack `flag`."""
        return self._positions(self._everywhere & ~self._bits[flag])

    def _positions(self, bits: int) -> list[int]:
        return [position for position in range(self._count) if bits >> position & 1] if bits else []


S = TypeVar("S", UnshardState, UnitPhase, GradBufferState, AccumulatorState)

UNSHARD_TRANSITIONS: dict[tuple[UnshardState, str], UnshardState] = {
    (UnshardState.SHARDED, "start_unshard"): UnshardState.UNSHARDING,
    (UnshardState.UNSHARDING, "finish_unshard"): UnshardState.UNSHARDED,
    (UnshardState.UNSHARDED, "reshard"): UnshardState.SHARDED,
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
    (GradBufferState.EMPTY, "bind_buffer"): GradBufferState.FILLING,
    (GradBufferState.FILLING, "bind_buffer"): GradBufferState.FILLING,
    (GradBufferState.EMPTY, "start_reduce"): GradBufferState.REDUCING,
    (GradBufferState.FILLING, "start_reduce"): GradBufferState.REDUCING,
    (GradBufferState.REDUCING, "finish_reduce"): GradBufferState.EMPTY,
    (GradBufferState.FILLING, "discard"): GradBufferState.EMPTY,
    (GradBufferState.EMPTY, "discard"): GradBufferState.EMPTY,
}

ACCUMULATOR_TRANSITIONS: dict[tuple[AccumulatorState, str], AccumulatorState] = {
    (AccumulatorState.NONE, "accumulate"): AccumulatorState.PARTIAL,
    (AccumulatorState.PARTIAL, "accumulate"): AccumulatorState.PARTIAL,
    (AccumulatorState.SHARDED, "accumulate"): AccumulatorState.PARTIAL,
    (AccumulatorState.PARTIAL, "finish"): AccumulatorState.SHARDED,
    (AccumulatorState.NONE, "zero_grad"): AccumulatorState.NONE,
    (AccumulatorState.PARTIAL, "zero_grad"): AccumulatorState.NONE,
    (AccumulatorState.SHARDED, "zero_grad"): AccumulatorState.NONE,
}


def transition(table: dict[tuple[S, str], S], state: S, event: str, subject: str) -> S:
    """The state after `event`.

    Args:
        table: Transition table of the machine.
        state: Present state.
        event: Name of the event.
        subject: Name of the unit or bucket, for the error.

    Raises:
        LifecycleError: The table does not allow `event` in `state`.
    """
    next_state = table.get((state, event))
    if next_state is None:
        allowed = sorted(name for source, name in table if source is state)
        raise LifecycleError(
            f"{subject}: `{event}` came while its {type(state).__name__} was {state.value}. Allowed in this state: "
            f"{', '.join(allowed)}. Check whether backward() ran inside its forward, whether its forward or backward "
            "ran in two threads, or whether the program caught an exception that interrupted one."
        )
    return next_state
