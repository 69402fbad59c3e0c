"""Which cases of a wide product are in which tier?"""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import left_out


def cases(axes: Sequence[Sequence[Any]], name: str = "test", *marked: str, **options: int) -> list[Any]:
    """Items of one test marked `wide(**options)` with a parametrization for each of `axes`; or marked otherwise."""
    marks = [pytest.mark.parametrize(f"axis{number}", axis).mark for number, axis in enumerate(axes)]
    return [
        SimpleNamespace(
            name=str(values),
            originalname=name,
            parent=None,
            values=values,
            callspec=SimpleNamespace(params={f"axis{number}": value for number, value in enumerate(values)}),
            iter_markers=lambda name: marks,
            fixturenames=["ranks"] if marked else [],
            get_closest_marker=lambda name: SimpleNamespace(kwargs=options) if name in (marked or ("wide",)) else None,
        )
        for values in product(*axes)
    ]


def values_of(items: Sequence[Any]) -> set[tuple[str, ...]]:
    return {item.values for item in items}


def run(items: Sequence[Any]) -> set[tuple[str, ...]]:
    return values_of(items) - values_of(left_out(items))


def test_of_a_product_every_other_place_of_the_diagonal_is_run() -> None:
    assert run(cases(["abcde", "xyz"])) == {("a", "x"), ("c", "y"), ("e", "z")}


def test_of_a_product_of_pairs_all_of_the_diagonal_is_run() -> None:
    assert run(cases(["ab", "xy", "pq"])) == {("a", "x", "p"), ("b", "y", "q")}


def test_a_short_parametrization_is_run_with_each_of_its_values() -> None:
    assert {short for _, short in run(cases(["abcdef", "xy"]))} == {*"xy"}


def test_of_a_long_parametrization_that_is_not_the_first_every_other_value_is_run() -> None:
    assert run(cases(["xy", "abcde"])) == {("x", "a"), ("y", "c"), ("x", "e")}


def test_of_a_list_of_eight_each_value_is_run() -> None:
    assert run(cases(["xyz", "abcdefgh"])) == {*zip("xyzxyzxy", "abcdefgh", strict=True)}


def test_of_two_cases_one_test_runs_the_first_and_another_the_second() -> None:
    found = [run(cases(["ab"], f"test_{number}")) for number in range(20)]
    assert {("a",)} in found
    assert {("b",)} in found
    assert all(len(cases_of_one) == 1 for cases_of_one in found)


def test_of_a_test_on_ranks_every_other_case_is_run_unless_they_share_a_job() -> None:
    assert run(cases(["abc"], "test", "")) == {("a",), ("c",)}
    assert run(cases(["abc"], "test", "one_job")) == {("a",), ("b",), ("c",)}
    assert run(cases(["abc"], "test", "one_job", "wide")) == {("a",), ("c",)}


def test_of_a_list_every_third_case_is_run() -> None:
    assert run(cases(["abcdef"], every=3)) == {("a",), ("d",)}


def test_of_one_parametrization_every_other_case_is_run() -> None:
    assert run(cases(["abc"])) == {("a",), ("c",)}


def test_of_a_weekly_test_no_case_is_run() -> None:
    assert run(cases(["abc"], "test", "weekly")) == set()
    assert run(cases(["abc"], "test", "weekly", "one_job")) == set()


def test_of_a_test_that_is_given_numbers_of_ranks_all_cases_are_run() -> None:
    items = cases(["abc"], "test", "")
    for item in items:
        item.callspec.params["ranks"] = 2
    assert run(items) == {("a",), ("b",), ("c",)}
