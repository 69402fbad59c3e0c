"""Which tests are in the fast tier, `make test`, and which only in `make test-all`?

A test marked `slow` is in the slow tier. A product of parameters marked `wide` is in both: the fast tier takes a
diagonal of it, which has every value of every parameter, and the slow tier the other combinations.
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


def outside_fast_tier(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Items of `wide` products that are not on the diagonal of their product."""
    products: dict[tuple[pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("wide"):
            products.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    return [item for product in products.values() for item in _off_diagonal(product)]


def _off_diagonal(product: Sequence[pytest.Item]) -> list[pytest.Item]:
    coordinates = [_coordinates(item) for item in product]
    axes = [list(dict.fromkeys(values)) for values in zip(*coordinates, strict=True)]
    if len(axes) < 2:
        raise pytest.UsageError(f"{product[0].nodeid} is marked wide, but is no product of two parametrizations")
    diagonal = {tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))}
    return [item for item, place in zip(product, coordinates, strict=True) if place not in diagonal]


def _coordinates(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """One entry a parametrization: the identities of its values, which all items of the product share."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is None:
        return ()
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    split = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    return tuple(tuple(id(callspec.params[name]) for name in each) for each in split)
