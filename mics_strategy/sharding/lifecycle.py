"""What may happen to a unit next?

Four small machines, each one table from (state, event) to the next state. What a table does not list is
illegal and raises; nothing infers a state from whether some attribute is None.

- `Content`: what a unit's slot holds for it.
- `Phase`: who is using the unit's parameters. A forward inside the backward is a recomputation and changes
  nothing.
- `Collection`: the buffer in which one backward's gradients wait for their reduction.
- `Gradient`: the accumulated gradient. PARTIAL still lacks other ranks' parts; SHARDED is the mean over all
  ranks.

Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from mics_strategy.errors import LifecycleError


class Content(Enum):
    """What the slot holds for its unit."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class Phase(Enum):
    """Who uses the unit's unsharded parameters."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Collection(Enum):
    """Where one backward's gradients of a bucket are."""

    EMPTY = "empty"
    FILLING = "filling"
    REDUCING = "reducing"


class Gradient(Enum):
    """What the gradient accumulator of a bucket holds."""

    NONE = "none"
    PARTIAL = "partial"
    SHARDED = "sharded"


S = TypeVar("S", Content, Phase, Collection, Gradient)

CONTENT: dict[tuple[Content, str], Content] = {
    (Content.SHARDED, "gather"): Content.UNSHARDING,
    (Content.UNSHARDING, "arrive"): Content.UNSHARDED,
    (Content.UNSHARDED, "evict"): Content.SHARDED,
}

PHASE: dict[tuple[Phase, str], Phase] = {
    (Phase.IDLE, "enter_forward"): Phase.FORWARD,
    (Phase.FORWARD, "exit_forward"): Phase.IDLE,
    (Phase.IDLE, "enter_backward"): Phase.BACKWARD,
    (Phase.BACKWARD, "enter_backward"): Phase.BACKWARD,
    (Phase.BACKWARD, "enter_forward"): Phase.BACKWARD,
    (Phase.BACKWARD, "exit_forward"): Phase.BACKWARD,
    (Phase.BACKWARD, "exit_backward"): Phase.IDLE,
}

COLLECTION: dict[tuple[Collection, str], Collection] = {
    (Collection.EMPTY, "collect"): Collection.FILLING,
    (Collection.FILLING, "collect"): Collection.FILLING,
    (Collection.EMPTY, "launch"): Collection.REDUCING,
    (Collection.FILLING, "launch"): Collection.REDUCING,
    (Collection.REDUCING, "land"): Collection.EMPTY,
    (Collection.FILLING, "abandon"): Collection.EMPTY,
    (Collection.EMPTY, "abandon"): Collection.EMPTY,
}

GRADIENT: dict[tuple[Gradient, str], Gradient] = {
    (Gradient.NONE, "accumulate"): Gradient.PARTIAL,
    (Gradient.PARTIAL, "accumulate"): Gradient.PARTIAL,
    (Gradient.SHARDED, "accumulate"): Gradient.PARTIAL,
    (Gradient.PARTIAL, "finish"): Gradient.SHARDED,
    (Gradient.NONE, "clear"): Gradient.NONE,
    (Gradient.PARTIAL, "clear"): Gradient.NONE,
    (Gradient.SHARDED, "clear"): Gradient.NONE,
}


def advance(table: dict[tuple[S, str], S], state: S, event: str, subject: str) -> S:
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
