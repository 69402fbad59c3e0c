"""Which tests are in the fast tier, `make test`, and which only in `make test-all`?

A test marked `slow` is in the slow tier. A test marked `wide`, as all of a module may be, is in both if it has several
parametrizations: the fast tier takes a diagonal of their product, which has every value of every parameter, and the
slow tier the other combinations. Of a test marked `wide(every=3)` the fast tier takes every third case.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_INTERPRETERS = ("python", "torchrun", "accelerate", "fabric", "lightning", "mics")


def is_interpreter(command: object) -> bool:
    """Whether a command line, as `subprocess.Popen` takes it, starts Python."""
    words = command.split() if isinstance(command, str) else command
    return isinstance(words, Sequence) and bool(words) and Path(str(words[0])).name.startswith(_INTERPRETERS)


def outside_fast_tier(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Items of tests marked `wide` that are not in the fast tier."""
    tests: dict[tuple[pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("wide"):
            tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    return [item for cases in tests.values() for item in _left_out(cases)]


def _left_out(cases: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    every = cases[0].get_closest_marker("wide").kwargs.get("every")
    if every is not None:
        yield from (case for number, case in enumerate(cases) if number % every)
        return
    coordinates = [_coordinates(case) for case in cases]
    axes = [list(dict.fromkeys(values)) for values in zip(*coordinates, strict=True)]
    if len(axes) > 1:
        diagonal = {tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))}
        yield from (case for case, place in zip(cases, coordinates, strict=True) if place not in diagonal)


def _coordinates(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """One entry a parametrization: the identities of its values, which all items of the product share."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    return tuple(tuple(id(callspec.params[name]) for name in each) for each in split)
