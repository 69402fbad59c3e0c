"""Which tests are in the fast tier, `make test`, and which only in `make test-all`?

A test marked `slow` is in the slow tier. A test marked `wide`, as all of a module may be, is in both if it has several
parametrizations: the fast tier takes a diagonal of their product, which has every value of every parameter, and the
slow tier every second one of the other combinations, as a checkerboard does. With three parametrizations, two values
of any two of them are together in a case. A test whose claim is about the whole product is not marked `wide`. Of a test
marked `wide(every=3)` the fast tier takes every third case, and the slow tier the others.
"""

from collections.abc import Iterable, Sequence
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
            tiers.slow.extend(case for number, case in enumerate(cases) if number % every)
        else:
            _divide_product(cases, tiers)
    return tiers


def _divide_product(cases: Sequence[pytest.Item], tiers: Tiers) -> None:
    coordinates = [_coordinates(case) for case in cases]
    axes = [list(dict.fromkeys(values)) for values in zip(*coordinates, strict=True)]
    if len(axes) < 2:
        return
    diagonal = {tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))}
    for case, place in zip(cases, coordinates, strict=True):
        if place not in diagonal:
            is_dark = sum(axis.index(value) for axis, value in zip(axes, place, strict=True)) % 2
            (tiers.slow if is_dark else tiers.left_out).append(case)


def _coordinates(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """One entry a parametrization: the identities of its values, which all items of the product share."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    return tuple(tuple(id(callspec.params[name]) for name in each) for each in split)
