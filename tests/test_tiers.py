"""Which cases of a wide product are in which tier?"""

from collections.abc import Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import outside_fast_tier


def cases(axes: Sequence[Sequence[Any]], **options: int) -> list[Any]:
    """Items of one test marked `wide(**options)` with a parametrization for each of `axes`."""
    marks = [pytest.mark.parametrize(f"axis{number}", axis).mark for number, axis in enumerate(axes)]
    return [
        SimpleNamespace(
            name=str(values),
            originalname="test",
            parent=None,
            values=values,
            callspec=SimpleNamespace(params={f"axis{number}": value for number, value in enumerate(values)}),
            iter_markers=lambda name: marks,
            get_closest_marker=lambda name: SimpleNamespace(kwargs=options),
        )
        for values in product(*axes)
    ]


def values_of(items: Sequence[Any]) -> set[tuple[str, ...]]:
    return {item.values for item in items}


def test_of_a_product_the_tiers_share_a_diagonal() -> None:
    items = cases(["abcd", "xyz"])
    slow, left_out = outside_fast_tier(items)
    fast = values_of(items) - values_of(slow) - values_of(left_out)
    assert fast == {("a", "x"), ("c", "z")}
    assert values_of(slow) == {("b", "y"), ("d", "x")}
    assert len(left_out) == 8


def test_of_three_parametrizations_all_pairs_are_run() -> None:
    axes = ["abc", "xy", "123"]
    items = cases(axes)
    run = values_of(items) - values_of(outside_fast_tier(items).left_out)
    for first, second in combinations(range(3), 2):
        assert {(case[first], case[second]) for case in run} == {*product(axes[first], axes[second])}
    assert len(run) <= 10  # of 18; no fewer than 9 could do


def test_of_every_third_value_the_others_are_all_slow() -> None:
    items = cases(["abcdef"], every=3)
    slow, left_out = outside_fast_tier(items)
    assert values_of(slow) == {("b",), ("c",), ("e",), ("f",)}
    assert left_out == []


def test_no_value_is_left_out_where_an_axis_is_as_long_as_the_step() -> None:
    axes = ["abcd", "xyz"]
    items = cases(axes, every=3)  # the fast tier has x only, and the cases behind it y
    run = values_of(items) - values_of(outside_fast_tier(items).left_out)
    assert [{case[number] for case in run} for number in range(2)] == [set("abcd"), set("xyz")]
    assert len(run) < len(items)


def test_one_parametrization_stays_in_the_fast_tier() -> None:
    assert outside_fast_tier(cases(["abc"])) == ([], [])
