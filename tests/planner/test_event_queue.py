"""Do streams, waits and shared links take the times of their closed forms?"""

import pytest

from mics_strategy.planner.event_queue import ALONE, DEVICE, Slowdown, Task, run


def times(*tasks: Task, slowdown: float = 1.0) -> list[tuple[float, float]]:
    found = run(tasks, slowdown)
    return [(pytest.approx(start), pytest.approx(end)) for start, end in zip(found.start_s, found.end_s, strict=True)]


def test_a_stream_runs_its_tasks_in_order() -> None:
    tasks = [Task("a", ALONE, 2.0, ()), Task("a", ALONE, 1.0, ()), Task("b", ALONE, 5.0, ())]
    assert times(*tasks) == [(0, 2), (2, 3), (0, 5)]


def test_a_stream_does_not_overtake_its_waiting_head() -> None:
    tasks = [Task("a", ALONE, 4.0, ()), Task("b", ALONE, 1.0, (0,)), Task("b", ALONE, 1.0, ())]
    assert times(*tasks) == [(0, 4), (4, 5), (5, 6)]


def test_two_tasks_share_a_link() -> None:
    """Both get half until the shorter ends at 2, when the longer has had 1 of its 3 seconds."""
    tasks = [Task("a", "link", 1.0, ()), Task("b", "link", 3.0, ())]
    assert times(*tasks) == [(0, 2), (0, 4)]


def test_a_late_task_slows_the_first_one() -> None:
    """The first has 2 of 3 seconds left when the second starts at 1; each second then takes two."""
    tasks = [Task("c", ALONE, 1.0, ()), Task("a", "link", 3.0, ()), Task("b", "link", 1.0, (0,))]
    assert times(*tasks) == [(0, 1), (0, 4), (1, 3)]


def test_links_do_not_slow_each_other() -> None:
    assert times(Task("a", "fast", 1.0, ()), Task("b", "slow", 1.0, ())) == [(0, 1), (0, 1)]


def test_the_device_is_slower_while_a_link_is_busy() -> None:
    """For 2 seconds half as fast, so that 1 of 3 seconds is done; then 2 more."""
    tasks = [Task("compute", DEVICE, 3.0, ()), Task("a", "link", 2.0, ())]
    assert times(*tasks, slowdown=2.0) == [(0, 4), (0, 2)]


def test_the_stated_slowdown_counts_once_and_measured_ones_add_up() -> None:
    """Both links are busy for 3 seconds: the device takes 2 times as long, 1 + 1 + 2 times, or 1 + 1 + 1 times."""
    tasks = [Task("compute", DEVICE, 2.0, ()), *(Task(name, name, 3.0, ()) for name in ("fast", "slow"))]
    measured = {"fast": Slowdown(device=2.0), "slow": Slowdown(device=3.0)}
    ends = [run(tasks, 2.0, links).end_s[0] for links in ({}, measured, {"fast": measured["fast"]})]
    assert ends == pytest.approx([3 + 2 - 3 / 2, 3 + 2 - 3 / 4, 3 + 2 - 3 / 3])


def test_a_task_waits_for_all_before_it() -> None:
    tasks = [Task("a", ALONE, 1.0, ()), Task("b", ALONE, 2.0, ()), Task("c", ALONE, 1.0, (0, 1))]
    assert times(*tasks)[2] == (2, 3)


def test_tasks_of_no_length_end_where_they_start() -> None:
    tasks = [Task("a", "link", 0.0, ()), Task("b", ALONE, 0.0, (0,)), Task("a", "link", 1.0, (1,))]
    assert times(*tasks) == [(0, 0), (0, 0), (0, 1)]
