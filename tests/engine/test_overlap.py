"""Communication overlaps compute.

Shown by the order of events, never by time.
"""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.queue import _QueuedTask
from tests import models
from tests.engine.events import recorded
from tests.engine.test_activation_checkpointing import FORMS
from tests.ranks import RankContext, RankPool

NODES = Topology(ranks_per_node=2)


def events_of_a_step(
    ctx: RankContext,
    overlap: str | set[str],
    micro_steps: int,
    preset: str = "mics",
    prefetch: int = 1,
    make_case: Callable[[], models.Case] = models.transformer,
) -> tuple[list[str], list[str]]:
    """Names of the units in order, and the events of the third step."""
    torch.manual_seed(0)
    case = make_case()
    model = case.build()
    config = ShardConfig.preset(preset, topology=NODES, overlap=overlap, prefetch=prefetch)
    sharded = shard(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = tuple({type(unit.module) for unit in sharded.internals.units[1:]})

    def step(index: int) -> None:
        for micro in range(micro_steps):
            with sharded.micro_step(micro, of=micro_steps):
                case.loss(model, case.batch(index, micro, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    with recorded(model, layers) as events:
        step(2)
    return [unit.name for unit in sharded.internals.units[1:]], list(events)


def before(events: list[str], first: str, second: str) -> bool:
    return events.index(first) < events.index(second)


def rank_zero(ranks: RankPool, overlap: str | set[str], micro_steps: int = 1) -> tuple[list[str], list[str]]:
    return ranks(4, events_of_a_step, overlap, micro_steps)[0]


def test_the_next_unit_is_gathered_under_the_forward_of_this_one(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "all")
    for this, following in pairwise(units):
        assert before(events, f"start all_gather {following}", f"forward {this}"), (this, following)
        assert before(events, f"forward {this}", f"wait all_gather {following}"), (this, following)


def test_without_overlap_a_unit_is_gathered_when_it_is_needed(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "none")
    for this, following in pairwise(units):
        assert before(events, f"forward {this}", f"start all_gather {following}"), (this, following)


def test_the_next_unit_is_gathered_under_the_backward_of_this_one(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "all")
    backward = events[events.index(f"forward {units[-1]}") :]
    gathered = [unit for unit in units if f"start all_gather {unit}" in backward]
    assert gathered, "some units must travel again"
    for unit in gathered:
        above = units[units.index(unit) + 1]
        assert before(backward, f"start all_gather {unit}", f"backward {above}"), unit


def backward_events(ranks: RankPool, preset: str, prefetch: int, form: str) -> tuple[list[str], list[str]]:
    """Names of the units in order, and the events after the last unit's first forward."""
    units, events = ranks(4, events_of_a_step, "all", 1, preset, prefetch, FORMS[form])[0]
    return units, events[events.index(f"forward {units[-1]}") + 1 :]


@pytest.mark.parametrize("form", ["not_recomputed", "around_call", "inside_forward", "reentrant"])
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("preset", ["mics", "paro-iig"])
def test_a_backward_gathers_as_many_units_ahead_as_a_forward(
    ranks: RankPool, preset: str, prefetch: int, form: str
) -> None:
    units, backward = backward_events(ranks, preset, prefetch, form)
    gathered = units[: len(units) - prefetch - 1]  # the others are still in their slots
    assert [unit for unit in reversed(units) if f"start all_gather {unit}" in backward] == gathered[::-1]
    for index, unit in enumerate(gathered):
        ahead = units[index + prefetch]
        assert before(backward, f"start all_gather {unit}", f"backward {ahead}"), (unit, ahead)
        if form == "reentrant":  # another recomputation stops before its end
            assert before(backward, f"start all_gather {unit}", f"forward {ahead}"), "the recomputation waits for it"
        assert before(backward, f"backward {units[index + prefetch + 1]}", f"start all_gather {unit}"), "needs its slot"


@pytest.mark.parametrize("form", ["not_recomputed", "reentrant"])
@pytest.mark.parametrize("preset", ["zero1", "paro-nig"])
def test_a_backward_gathers_nothing_where_parameters_are_whole(ranks: RankPool, preset: str, form: str) -> None:
    _, backward = backward_events(ranks, preset, 3, form)
    assert not [event for event in backward if event.startswith("start all_gather layers")]


def test_a_reduction_runs_under_the_backward_of_the_next_unit(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "all", micro_steps=2)
    for unit, below in zip(units[:0:-1], units[-2::-1], strict=False):
        assert before(events, f"start reduce_scatter {unit}", f"backward {below}"), unit
        assert before(events, f"start reduce_scatter {below}", f"wait reduce_scatter {unit}"), (
            "all gradients below were computed meanwhile"
        )


def test_without_overlap_a_reduction_is_waited_for_at_once(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "none")
    for unit in units:
        assert events[events.index(f"start reduce_scatter {unit}") + 1] == f"wait reduce_scatter {unit}"


def test_the_second_hop_starts_before_the_last_backward_has_ended(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "all", micro_steps=2)
    last_backward = len(events) - 1 - events[::-1].index(f"backward {units[0]}")
    assert events.index(f"start all_reduce {units[-1]}") < last_backward
    assert events.count(f"start all_reduce {units[-1]}") == 1


def threads_that_join(ctx: RankContext, preset: str) -> tuple[int, set[str]]:
    """Number and names of the threads that wait where only a communication thread may, in steps of two micro-steps."""
    names: list[str] = []
    join = _QueuedTask.join

    def noted(task: _QueuedTask) -> None:
        names.append(threading.current_thread().name)
        join(task)

    with mock.patch.object(_QueuedTask, "join", noted):
        events_of_a_step(ctx, "all", 2, preset)
    return len(names), set(names) & {threading.current_thread().name}


@pytest.mark.parametrize("preset", ["mics", "paro-nig", "zero2", "zero3", "zeropp-hpz"])
def test_the_host_never_waits_for_a_first_hop_behind_which_a_second_one_starts(ranks: RankPool, preset: str) -> None:
    for num_joins, of_host in ranks(4, threads_that_join, preset):
        assert not of_host
        assert bool(num_joins) == (preset in ("mics", "paro-nig")), "others have no second hop"


def ended_second_hops(ctx: RankContext, preset: str) -> list[int]:
    """Second hops that have ended while the host stood still in the backward, between two layers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sharded = shard(model, ShardConfig.preset(preset, topology=NODES), units=[nn.Linear])
    second_hops, num_ended = sharded._engine.reducer.second_hops, []

    def wait(_: torch.Tensor) -> None:
        until = time.monotonic() + 20
        chains = [*second_hops._in_flight.values()]
        while not all(work.is_completed() for chain in chains for work in chain.queued) and time.monotonic() < until:
            time.sleep(0.001)
        num_ended.append(sum(all(work.is_completed() for work in chain.queued) for chain in chains))

    hidden = torch.ones(2, 4)
    with sharded.micro_step(0, of=1):
        for layer in model:
            hidden = layer(hidden)
            hidden.register_hook(wait)
        hidden.sum().backward()
    return num_ended


@pytest.mark.parametrize("preset", ["mics", "paro-nig"])
def test_a_second_hop_follows_its_first_without_the_host(ranks: RankPool, preset: str) -> None:
    assert ranks(4, ended_second_hops, preset, ranks_per_node=2) == [[0, 1, 2, 3]] * 4


def test_a_second_hop_is_queued_with_its_first_and_waits_for_no_other_unit(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, "all", micro_steps=2)
    last = events[len(events) - events[::-1].index(f"start reduce_scatter {units[-1]}") - 1 :]
    for unit, below in pairwise(units[::-1]):
        assert before(last, f"start all_reduce {unit}", f"start reduce_scatter {below}"), unit
    first = events[: events.index(f"start reduce_scatter {units[0]}")]
    assert not [event for event in first if "all_reduce" in event], "only the last backward's"


def test_without_overlap_the_second_hop_waits_for_the_step(ranks: RankPool) -> None:
    units, events = rank_zero(ranks, {"gather", "reduce", "update"}, micro_steps=2)
    last_backward = len(events) - 1 - events[::-1].index(f"backward {units[0]}")
    assert events.index(f"start all_reduce {units[-1]}") > last_backward


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_every_started_collective_is_waited_for(ranks: RankPool, micro_steps: int) -> None:
    _, events = rank_zero(ranks, "all", micro_steps)
    started = sorted(event.removeprefix("start ") for event in events if event.startswith("start "))
    waited = sorted(event.removeprefix("wait ") for event in events if event.startswith("wait "))
    assert started == waited
