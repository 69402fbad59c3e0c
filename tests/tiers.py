"""Which tests are in the fast tier, `make test`, and which only in `make test-all`?

A test marked `slow` is in the slow tier. Of a test marked `wide`, as all of a module may be, only some cases are in a
tier: every other place of the diagonal of the product of its parametrizations, which has every value of each. Of a
test marked `wide(every=3)` it is every third case, and of one marked `wide(every=0)` none. All cases run with
`--every-case`, as the weekly workflow does. A test whose claim is about the whole product is not marked `wide`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

_INTERPRETERS = ("python", "torchrun", "accelerate", "fabric", "lightning", "mics")


def is_interpreter(command: object) -> bool:
    """Whether a command line, as `subprocess.Popen` takes it, starts Python."""
    words = command.split() if isinstance(command, str) else command
    return isinstance(words, Sequence) and bool(words) and Path(str(words[0])).name.startswith(_INTERPRETERS)


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items of tests marked `wide` that are in no tier."""
    tests: dict[tuple[pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("wide"):
            tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    found = []
    for cases in tests.values():
        every = cases[0].get_closest_marker("wide").kwargs.get("every")
        if every == 0:
            chosen: Sequence[pytest.Item] = ()
        else:
            chosen = cases[::every] if every is not None else _every_other_of_the_diagonal(cases)
        found += [case for case in cases if case not in chosen]
    return found


def _every_other_of_the_diagonal(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    places = [_coordinates(case) for case in cases]
    axes = [list(dict.fromkeys(values)) for values in zip(*places, strict=True)]
    if not axes:
        return cases
    chosen = [tuple(axis[i % len(axis)] for axis in axes) for i in range(0, max(map(len, axes)), 2)]
    return [case for case, place in zip(cases, places, strict=True) if place in chosen]


def _coordinates(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """One entry a parametrization: the identities of its values, which all items of the product share."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    return tuple(tuple(id(callspec.params[name]) for name in each) for each in split)
