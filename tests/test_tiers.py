"""Which cases of a wide product are in which tier?"""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import left_out


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


def test_of_a_product_every_other_place_of_the_diagonal_is_run() -> None:
    items = cases(["abcd", "xyz"])
    assert values_of(items) - values_of(left_out(items)) == {("a", "x"), ("c", "z")}


def test_of_a_list_every_third_case_is_run() -> None:
    items = cases(["abcdef"], every=3)
    assert values_of(items) - values_of(left_out(items)) == {("a",), ("d",)}


def test_of_one_parametrization_every_other_case_is_run() -> None:
    items = cases(["abc"])
    assert values_of(items) - values_of(left_out(items)) == {("a",), ("c",)}


def test_of_a_test_whose_cases_are_for_the_weekly_run_none_is_run() -> None:
    items = cases(["abc"], every=0)
    assert left_out(items) == items
