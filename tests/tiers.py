"""Which tests are in the fast tier, `make test`, and which only in `make test-all`?

A test marked `slow` is in the slow tier, and one marked `weekly` in none. Of the cases of a test that runs on ranks, or
is marked `wide`, only some are in a tier: every other place of the diagonal of the product of its parametrizations. The
diagonal has every value of each; of two, one test runs the first and another the second. A list of eight values or more
runs whole. Of a test marked `wide(every=3)` it is every third case. All cases run with `--every-case`, as the weekly
workflow does.
"""

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

_MANY = 8  # values of a parametrization from which each is a case of its own, such as an optimizer, and no preset
_INTERPRETERS = ("python", "torchrun", "accelerate", "fabric", "lightning", "mics")


def is_interpreter(command: object) -> bool:
    """Whether a command line, as `subprocess.Popen` takes it, starts Python."""
    words = command.split() if isinstance(command, str) else command
    return isinstance(words, Sequence) and bool(words) and Path(str(words[0])).name.startswith(_INTERPRETERS)


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items that are in no tier."""
    tests: dict[tuple[pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if _is_wide(item) or item.get_closest_marker("weekly"):
            tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    found = []
    for (_, name), cases in tests.items():
        mark = cases[0].get_closest_marker("wide")
        every = None if mark is None else mark.kwargs.get("every")
        chosen = cases[::every] if every is not None else _every_other_of_the_diagonal(cases, name)
        found += [case for case in cases if case not in chosen or case.get_closest_marker("weekly")]
    return found


def _is_wide(item: pytest.Item) -> bool:
    """Whether only some cases of its test run. Cases that share a job cost little, and all run unless marked."""
    uses_pool = "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in _params(item)
    return bool(item.get_closest_marker("wide")) or (uses_pool and not item.get_closest_marker("one_job"))


def _params(item: pytest.Item) -> dict[str, Any]:
    """Values of its parametrizations by name, of which one may be `ranks` and no pool."""
    callspec: Any = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def _every_other_of_the_diagonal(cases: Sequence[pytest.Item], name: str) -> Sequence[pytest.Item]:
    places = [_coordinates(case) for case in cases]
    axes = [list(dict.fromkeys(values)) for values in zip(*places, strict=True)]
    if not axes:
        return cases
    longest = max(map(len, axes))
    stride = 1 if longest >= _MANY or (len(axes) > 1 and longest == 2) else 2
    first = zlib.crc32(name.encode()) % stride if longest % 2 == 0 else 0
    steps = [range(first, longest, stride) if len(axis) == longest else range(len(axis)) for axis in axes]
    chosen = [
        tuple(axis[step[place % len(step)]] for axis, step in zip(axes, steps, strict=True))
        for place in range(max(map(len, steps)))
    ]
    return [case for case, place in zip(cases, places, strict=True) if place in chosen]


def _coordinates(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """One entry a parametrization: the identities of its values, which all items of the product share."""
    params = _params(item)
    if not params:
        return ()
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    return tuple(tuple(id(params[name]) for name in each) for each in split)
