"""Which tests are in the fast tier, `make test`, and which only in `make test-all`?

A test marked `slow` is in the slow tier. A test marked `wide`, as all of a module may be, is in both if it has
several parametrizations. The two share a diagonal of their product, which has every value of every parameter: the
fast tier takes every other place of it, and the slow tier those between. Of three parametrizations or more the slow
tier also takes as few cases as bring together any two values of any two of them. A test whose claim is about the
whole product is not marked `wide`. Of a test marked `wide(every=3)` the fast tier takes every third case, and the
slow tier the ones behind them. Every value of every parameter is in one of the two.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_INTERPRETERS = ("python", "torchrun", "accelerate", "fabric", "lightning", "mics")


def is_interpreter(command: object) -> bool:
    """Whether a command line, as `subprocess.Popen` takes it, starts Python."""
    words = command.split() if isinstance(command, str) else command
    return isinstance(words, Sequence) and bool(words) and Path(str(words[0])).name.startswith(_INTERPRETERS)


class Tiers(NamedTuple):
    """Items of tests marked `wide` that are not in the fast tier."""

    slow: list[pytest.Item]
    left_out: list[pytest.Item]


def outside_fast_tier(items: Iterable[pytest.Item]) -> Tiers:
    """The items of the slow tier, and those that are in none."""
    tests: dict[tuple[pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("wide"):
            tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    tiers = Tiers([], [])
    for cases in tests.values():
        every = cases[0].get_closest_marker("wide").kwargs.get("every")
        if every is not None:
            _divide_list(cases, every, tiers)
        else:
            _divide_product(cases, tiers)
    return tiers


def _divide_list(cases: Sequence[pytest.Item], every: int, tiers: Tiers) -> None:
    """The case behind each fast one is slow, and what brings a value of an argument that no case before had."""
    numbered = [(number % every, case, _arguments(case)) for number, case in enumerate(cases)]
    run = {value for turn, _, values in numbered if turn < 2 for value in values}
    for turn, case, values in numbered:
        if turn == 1 or (turn and not values <= run):
            tiers.slow.append(case)
            run |= values
        elif turn:
            tiers.left_out.append(case)


def _divide_product(cases: Sequence[pytest.Item], tiers: Tiers) -> None:
    coordinates = [_coordinates(case) for case in cases]
    axes = [list(dict.fromkeys(values)) for values in zip(*coordinates, strict=True)]
    if len(axes) < 2:
        return
    numbers = [tuple(axis.index(value) for axis, value in zip(axes, place, strict=True)) for place in coordinates]
    diagonal = _diagonal(axes)
    fast, chosen = diagonal[::2], diagonal[1::2]
    if len(axes) > 2:
        chosen += _completing_pairs(numbers, diagonal)
    for case, place in zip(cases, numbers, strict=True):
        if place not in fast:
            (tiers.slow if place in chosen else tiers.left_out).append(case)


def _diagonal(axes: Sequence[Sequence[object]]) -> list[tuple[int, ...]]:
    """Places with every value of every axis."""
    lengths = [len(axis) for axis in axes]
    return [tuple(i % length for length in lengths) for i in range(max(lengths))]


def _completing_pairs(places: Sequence[tuple[int, ...]], given: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Few places that have, with the given ones, each pair of values of two axes; the best next one at a time."""
    missing = {pair for place in places for pair in _pairs(place)}
    missing.difference_update(*map(_pairs, given))
    chosen = []
    while missing:
        best = max(places, key=lambda place: len(missing & _pairs(place)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(place: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(place), 2))


def _arguments(item: pytest.Item) -> set[tuple[str, int]]:
    """Names and identities of the values of a case."""
    callspec: Any = getattr(item, "callspec", None)
    return {(name, id(value)) for name, value in callspec.params.items()} if callspec else set()


def _coordinates(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """One entry a parametrization: the identities of its values, which all items of the product share."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    return tuple(tuple(id(callspec.params[name]) for name in each) for each in split)
