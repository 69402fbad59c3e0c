"""The order of units is recorded correctly and followed."""

from dataclasses import dataclass

import pytest

from mics_strategy.engine.order import ExecutionOrder, ForwardCall, PendingBackwards, TrainingPass
from mics_strategy.engine.rank_agreement import GlobalOrder, Turns


@dataclass(eq=False)
class _Unit:
    index: int
    num_pending_calls: int = 0
    earliest_enter: int = -1


def _units(count: int) -> list[_Unit]:
    return [_Unit(index) for index in range(count)]


def _call(unit: _Unit, enter: int, leave: int) -> ForwardCall:
    return ForwardCall(unit, enter, first_node=0, is_recomputed=False, leave=leave, versions=(0,))


def _forward(live: PendingBackwards, root: _Unit, layers: list[_Unit], clock: int = 0) -> list[ForwardCall]:
    """A forward of a root around its layers.

    The calls in the order in which they ended.
    """
    calls = []
    enter_root = clock
    for layer in layers:
        calls.append(_call(layer, clock + 1, clock + 2))
        clock += 2
    calls.append(_call(root, enter_root, clock + 1))
    for call in calls:
        live.push(call)
    return calls


def test_reduction_order_is_the_reverse_of_the_forward() -> None:
    root, *layers = _units(4)
    live = PendingBackwards()
    _forward(live, root, layers)
    assert [unit.index for unit in live.reduction_order()] == [3, 2, 1, 0]


def test_unit_entered_twice_waits_for_its_first_call() -> None:
    root, *layers = _units(3)
    live = PendingBackwards()
    _forward(live, root, [layers[0], layers[1], layers[0]])
    assert [unit.index for unit in live.reduction_order()] == [2, 1, 0]


def test_backward_follows_the_calls_backwards() -> None:
    root, *layers = _units(3)
    live = PendingBackwards()
    calls = _forward(live, root, layers)
    seen = []
    for call in reversed(calls):
        assert list(live.pop_until(call)) == []
        seen.append([unit.index for unit in live.upcoming(1)])
    assert seen == [[2], [1], []]


def test_upcoming_units_are_named_once_nearest_first() -> None:
    root, *layers = _units(5)
    live = PendingBackwards()
    _forward(live, root, [layers[0], layers[1], layers[2], layers[1], layers[3]])
    assert [[unit.index for unit in live.upcoming(count)] for count in (0, 3, 9)] == [[], [0, 4, 2], [0, 4, 2, 3, 1]]


def _pass(units: list[_Unit]) -> TrainingPass:
    """A pass in which the forwards of `units` have ended, in this order."""
    recorded = TrainingPass()
    for unit in units:
        recorded.record(unit, has_graph=False)
    return recorded


def _upcoming(recorded: TrainingPass, unit: _Unit, count: int = 9) -> list[int]:
    return [other.index for other in recorded.reach(unit)[:count]]


def test_checkpointed_units_are_recomputed_in_reverse() -> None:
    units = _units(4)
    recorded = _pass(units)
    assert [_upcoming(recorded, unit, 2) for unit in reversed(units)] == [[2, 1], [1, 0], [0], []]
    assert recorded.without_graph == {0, 1, 2, 3}


def test_checkpoint_around_several_units_recomputes_them_in_the_order_of_the_forward() -> None:
    units = _units(4)
    recorded = _pass(units)
    reached = [_upcoming(recorded, units[index]) for index in (2, 3, 0, 1)]
    assert reached == [[3, 1, 0], [1, 0], [1], []]


def test_units_that_a_backward_skips_are_prefetched_at_most_once() -> None:
    units = _units(4)
    recorded = _pass(units)
    assert [_upcoming(recorded, units[index]) for index in (2, 1, 0)] == [[3, 1, 0], [0], []]


def test_unit_that_the_pass_did_not_run_has_nothing_upcoming() -> None:
    first, second = _units(2)
    recorded = _pass([first])
    assert _upcoming(recorded, second) == []
    assert _upcoming(recorded, first) == []


def test_skipped_calls_are_yielded_latest_first() -> None:
    root, *layers = _units(4)
    live = PendingBackwards()
    calls = _forward(live, root, layers)
    assert [call.unit.index for call in live.pop_until(calls[0])] == [0, 3, 2]


def test_removed_call_yields_nothing() -> None:
    root, *layers = _units(2)
    live = PendingBackwards()
    calls = _forward(live, root, layers)
    list(live.pop_until(calls[0]))
    assert list(live.pop_until(calls[0])) == []


def test_pending_calls_are_counted_by_unit() -> None:
    root, layer = _units(2)
    live = PendingBackwards()
    _forward(live, root, [layer, layer])
    assert (root.num_pending_calls, layer.num_pending_calls) == (1, 2)
    list(live.drain())
    assert (root.num_pending_calls, layer.num_pending_calls) == (0, 0)


def _recorded(*entered: int) -> ExecutionOrder:
    recorded = ExecutionOrder()
    for index in entered:
        recorded.record_forward(index)
    recorded.freeze()
    return recorded


def test_no_unit_is_upcoming_while_recording() -> None:
    recorded = ExecutionOrder()
    recorded.record_forward(0)
    assert recorded.upcoming(3) == []


def test_upcoming_units_are_nearest_first() -> None:
    recorded = _recorded(0, 1, 2, 3)
    recorded.record_forward(0)
    assert recorded.upcoming(2) == [1, 2]


def test_no_unit_is_upcoming_after_the_last() -> None:
    recorded = _recorded(0, 1, 2)
    for index in (0, 1, 2):
        recorded.record_forward(index)
    assert recorded.upcoming(2) == []


def test_repeated_unit_is_followed_at_its_position() -> None:
    recorded = _recorded(0, 1, 2, 1, 3)
    for index in (0, 1, 2, 1):
        recorded.record_forward(index)
    assert recorded.upcoming(1) == [3]


def test_forward_that_skips_a_unit_finds_its_position_again() -> None:
    recorded = _recorded(0, 1, 2, 3)
    recorded.record_forward(0)
    recorded.record_forward(2)
    assert recorded.upcoming(1) == [3]


def test_unknown_unit_keeps_the_position() -> None:
    recorded = _recorded(0, 1, 2)
    recorded.record_forward(0)
    recorded.record_forward(9)
    assert recorded.upcoming(1) == [1]


def test_new_forward_starts_at_the_front() -> None:
    recorded = _recorded(0, 1, 2)
    for index in (0, 1, 2, 0):
        recorded.record_forward(index)
    assert recorded.upcoming(1) == [1]


def test_order_does_not_change_once_frozen() -> None:
    recorded = _recorded(0, 1, 2)
    recorded.record_forward(2)
    recorded.record_forward(1)
    assert recorded.forward_units == [0, 1, 2]


@pytest.mark.parametrize("what", ["freeze", "complete"])
def test_order_of_nothing_is_not_frozen(what: str) -> None:
    recorded = ExecutionOrder()
    getattr(recorded, what)()
    assert not recorded.is_frozen
    assert not recorded.is_complete


@pytest.mark.parametrize(
    ("entered", "expected"),
    [
        ([[0, 1, 2, 3]], [0, 1, 2, 3]),
        ([[0, 3, 2, 1]], [0, 3, 2, 1]),
        ([[0, 3, 1], [0, 3, 2, 1]], [0, 3, 2, 1]),  # a unit that only the second rank has run
        ([[0, 1], [0, 2], [0, 3]], [0, 3, 2, 1]),  # each rank its own: any order will do
        ([[0, 3, 1]], [0, 3, 1, 2]),  # 2 was run by none, and follows its neighbour
        ([[], []], [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_global_order_merges_the_forward_orders_of_the_ranks(entered: list[list[int]], expected: list[int]) -> None:
    common = GlobalOrder(_units(4))
    common.agree(entered)
    assert [unit.index for unit in common.units] == expected
    for order in entered:
        firsts = list(dict.fromkeys(order))
        assert [index for index in expected if index in firsts] == firsts


def test_global_order_yields_each_unit_once_until_it_restarts() -> None:
    units = _units(4)
    common = GlobalOrder(units)
    assert common.take_until(units[2]) == units[:3]
    assert common.take_until(units[1]) == []
    assert common.take_rest() == units[3:]
    assert common.take_rest() == []
    common.restart()
    assert common.take_rest() == units


def test_hops_start_in_their_order_when_all_before_them_have() -> None:
    turns: Turns[str] = Turns()
    turns.begin("abcde", ready="b")
    assert list(turns.take("c")) == []
    assert turns.unready_before("d") == ["a"]
    assert list(turns.take("a")) == ["a", "b", "c"]
    assert [item in turns for item in "cd"] == [False, True]
    assert turns.unready_before("a") == []
    assert list(turns.take("e")) == []
    assert list(turns.take_rest()) == ["d", "e"]


def test_a_hop_that_is_needed_now_takes_those_before_it_along_and_no_other() -> None:
    turns: Turns[str] = Turns()
    turns.begin("abcd", ready="cd")
    assert turns.take_until("b") == ["a", "b"]
    assert list(turns.take()) == ["c", "d"]
    turns.begin("ab")
    assert list(turns.take("b")) == []  # ready in the backward before, no longer now
    assert list(turns.take("a")) == ["a", "b"]
