"""The state tables allow every legal event and no other."""

import itertools
import random
from enum import Enum
from pathlib import Path

import pytest

from mics_strategy.engine.lifecycle import (
    ACCUMULATOR_TRANSITIONS,
    GRAD_BUFFER_TRANSITIONS,
    GRAD_FLAG_EVENTS,
    PHASE_TRANSITIONS,
    UNSHARD_TRANSITIONS,
    AccumulatorState,
    GradBufferState,
    GradFlag,
    GradFlags,
    UnitPhase,
    UnshardState,
    transition,
)
from mics_strategy.errors import LifecycleError

TABLES = {
    UnshardState: UNSHARD_TRANSITIONS,
    UnitPhase: PHASE_TRANSITIONS,
    GradBufferState: GRAD_BUFFER_TRANSITIONS,
    AccumulatorState: ACCUMULATOR_TRANSITIONS,
}
EVENTS = sorted({event for table in TABLES.values() for _, event in table})
ILLEGAL = [
    (states, state, event)
    for states, table in TABLES.items()
    for state in states
    for event in EVENTS
    if (state, event) not in table
]
README = Path(__file__).parents[2] / "mics_strategy" / "engine" / "README.md"
tables = pytest.mark.parametrize("states", TABLES, ids=lambda states: states.__name__)


@pytest.mark.parametrize(
    ("states", "state", "event"), ILLEGAL, ids=[f"{t.__name__}-{s.value}-{e}" for t, s, e in ILLEGAL]
)
def test_events_outside_of_the_tables_raise(states: type[Enum], state: Enum, event: str) -> None:
    with pytest.raises(LifecycleError, match=f"layer: `{event}` came while its {states.__name__} was"):
        transition(TABLES[states], state, event, "layer")


@tables
def test_error_names_what_was_allowed(states: type[Enum]) -> None:
    table = TABLES[states]
    for state in states:
        with pytest.raises(LifecycleError) as caught:
            transition(table, state, "dance", "layer")
        allowed = [event for known, event in table if known is state]
        assert all(event in str(caught.value) for event in allowed)


@tables
def test_every_state_can_be_left_and_reached(states: type[Enum]) -> None:
    table = TABLES[states]
    assert {state for state, _ in table} == set(states)
    assert set(table.values()) == set(states)


@tables
@pytest.mark.parametrize("seed", range(5))
def test_random_legal_events_lead_to_known_states(states: type[Enum], seed: int) -> None:
    table, state, generator = TABLES[states], next(iter(states)), random.Random(seed)
    for _ in range(200):
        event = generator.choice([event for known, event in table if known is state])
        state = transition(table, state, event, "layer")
        assert isinstance(state, states)


@pytest.mark.parametrize(
    ("table", "state", "events", "end"),
    [
        (
            UNSHARD_TRANSITIONS,
            UnshardState.SHARDED,
            ["start_unshard", "finish_unshard", "reshard"],
            UnshardState.SHARDED,
        ),
        (
            PHASE_TRANSITIONS,
            UnitPhase.IDLE,
            ["enter_forward", "exit_forward", "enter_backward", "exit_backward"],
            UnitPhase.IDLE,
        ),
        (PHASE_TRANSITIONS, UnitPhase.BACKWARD, ["enter_forward", "exit_forward", "exit_backward"], UnitPhase.IDLE),
        (
            GRAD_BUFFER_TRANSITIONS,
            GradBufferState.EMPTY,
            ["bind_buffer", "bind_buffer", "start_reduce", "finish_reduce"],
            GradBufferState.EMPTY,
        ),
        (GRAD_BUFFER_TRANSITIONS, GradBufferState.EMPTY, ["start_reduce", "finish_reduce"], GradBufferState.EMPTY),
        (
            ACCUMULATOR_TRANSITIONS,
            AccumulatorState.NONE,
            ["accumulate", "accumulate", "finish", "zero_grad"],
            AccumulatorState.NONE,
        ),
        (ACCUMULATOR_TRANSITIONS, AccumulatorState.SHARDED, ["accumulate", "finish"], AccumulatorState.SHARDED),
    ],
    ids=["unshard", "step", "recompute", "start_reduce", "unused", "accumulate", "resume"],
)
def test_life_of_a_step(table: dict, state: Enum, events: list[str], end: Enum) -> None:
    for event in events:
        state = transition(table, state, event, "layer")
    assert state is end


def test_gradient_cannot_be_finished_twice() -> None:
    with pytest.raises(LifecycleError, match="finish"):
        transition(ACCUMULATOR_TRANSITIONS, AccumulatorState.SHARDED, "finish", "layer")


def test_parameters_cannot_be_lost_in_the_forward() -> None:
    with pytest.raises(LifecycleError, match="exit_backward"):
        transition(PHASE_TRANSITIONS, UnitPhase.FORWARD, "exit_backward", "layer")


FLAG_SETS = [set(flags) for n in range(len(GradFlag) + 1) for flags in itertools.combinations(GradFlag, n)]
FINAL = {  # for each flag, in the order of GradFlag: + set, - cleared, . unchanged
    "add_grad": "+.+..",
    "accumulate": "...+.",
    "start_reduce": "..-+.",
    "end_backward": "..-..",
    "start_accumulation": ".+.--",
    "resume_accumulation": ".+.-.",
    "finish": "....+",
    "discard_unused": ".-.--",
    "zero_grad": "--.--",
}


def _flags(grad_flags: GradFlags, position: int) -> set[GradFlag]:
    return {flag for flag in GradFlag if grad_flags.has(flag, position)}


def _grad_flags(count: int, position: int, flags: set[GradFlag]) -> GradFlags:
    """Flags of `count` parameters, of which the one at `position` has `flags`; made by a search over events."""
    paths: dict[frozenset[GradFlag], list[str]] = {frozenset(): []}
    pending: list[frozenset[GradFlag]] = [frozenset()]
    while frozenset(flags) not in paths:
        state = pending.pop(0)
        for event, (sets, clears) in GRAD_FLAG_EVENTS.items():
            following = (state | set(sets)) - set(clears)
            if following not in paths:
                paths[following] = [*paths[state], event]
                pending.append(following)
    made = GradFlags(count)
    for event in paths[frozenset(flags)]:
        made.apply(event, [position])
    return made


def test_every_event_on_flags_is_listed_here() -> None:
    assert FINAL.keys() == GRAD_FLAG_EVENTS.keys()


@pytest.mark.parametrize("event", GRAD_FLAG_EVENTS)
@pytest.mark.parametrize(
    "before", FLAG_SETS, ids=lambda flags: "+".join(f.name.lower() for f in sorted(flags)) or "none"
)
def test_event_sets_and_clears_the_flags_of_one_parameter(before: set[GradFlag], event: str) -> None:
    signs = dict(zip(GradFlag, FINAL[event], strict=True))
    after = {flag for flag in GradFlag if signs[flag] == "+" or (signs[flag] == "." and flag in before)}
    one, all_of_one = _grad_flags(3, 1, before), _grad_flags(1, 0, before)
    one.apply(event, [1])
    all_of_one.apply(event)
    assert _flags(one, 1) == _flags(all_of_one, 0) == after
    assert _flags(one, 0) == _flags(one, 2) == set()
    for flag in GradFlag:
        assert one.positions_with(flag) == ([1] if flag in after else [])
        assert one.positions_without(flag) == ([0, 2] if flag in after else [0, 1, 2])
        assert one.any(flag) == (flag in after)


def test_event_on_all_reaches_every_parameter() -> None:
    flags = GradFlags(70)  # more than a machine word
    flags.apply("add_grad")
    flags.apply("end_backward", [69])
    assert flags.positions_with(GradFlag.USED) == list(range(70))
    assert flags.positions_without(GradFlag.ARRIVED) == [69]


def test_unknown_event_on_flags_raises() -> None:
    with pytest.raises(LifecycleError, match=r"`dance`.*add_grad"):
        GradFlags(1).apply("dance", [0])


def test_the_engines_page_has_the_tables() -> None:
    rows = [
        f"{states.__name__:<18}{state.value:<12}{event:<16}-> {following.value}"
        for states, table in TABLES.items()
        for (state, event), following in table.items()
    ]
    assert "\n".join(rows) in README.read_text()
