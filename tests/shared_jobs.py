"""One job for many cases: the parametrized cases of a test marked `one_job` share jobs of the pool.

Its first case to run collects the calls of all selected cases, by calling the test with a recorder that ends it at
the call, and sends those of equal world size to the pool as one job. A batch in which a case fails is thrown away: its
cases run in jobs of their own then, so that a failure is the failure of its case. So do cases that take other fixtures
than `ranks`, and second calls of a case.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.ranks import TIMEOUT_S, RankContext, RankError, RankPool
from tests.seeds import seed_generators

MAX_CASES = 8  # of one job: a batch that hangs costs one time limit of a test


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the pool.

    Attributes:
        world_size: Number of ranks.
        fn: Job, a module-level function.
        args: Arguments of the job.
        options: Keyword arguments of the pool.
    """

    world_size: int
    fn: Callable[..., Any]
    args: tuple[object, ...]
    options: dict[str, Any]

    def fits(self, other: "Call") -> bool:
        """Whether both can be in one job."""
        return (self.world_size, self.options) == (other.world_size, other.options)


class Recorded(BaseException):
    """Ends a test at its call of the pool, which it holds."""

    def __init__(self, call: Call) -> None:
        self.call = call


class Batches:
    """Results of the cases of one test function, of which some may have run before they are asked for."""

    def __init__(self, pool: RankPool, items: Iterable[pytest.Item]) -> None:
        self._pool = pool
        self._waiting = {item.nodeid: item for item in items}
        self._results: dict[str, list[Any]] = {}

    def take(self, item: pytest.Item, call: Call) -> list[Any] | None:
        """Results of an item's call; None where it has none."""
        if item.nodeid in self._waiting:
            batch = self._next_batch(item, call)
            for nodeid in batch:
                del self._waiting[nodeid]  # before the job: a case that hangs is not tried with others again
            try:
                self._results |= _run(self._pool, batch)
            except RankError:
                return None
        return self._results.pop(item.nodeid, None)

    def _next_batch(self, item: pytest.Item, call: Call) -> dict[str, Call]:
        """The item's call, with those of other items that fit."""
        batch = {item.nodeid: call}
        for nodeid, other in self._waiting.items():
            if nodeid != item.nodeid and len(batch) < MAX_CASES:
                recorded = _record(other)
                if recorded and recorded.fits(call):
                    batch[nodeid] = recorded
        return batch


class SharedJobs:
    """What a case calls in place of the pool."""

    def __init__(self, pool: RankPool, batches: Batches, item: pytest.Item) -> None:
        self._pool = pool
        self._batches = batches
        self._item = item

    def __call__(self, world_size: int, fn: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
        """As `RankPool.__call__`."""
        results = self._batches.take(self._item, Call(world_size, fn, args, options))
        return self._pool(world_size, fn, *args, **options) if results is None else results


def _run(pool: RankPool, batch: dict[str, Call]) -> dict[str, list[Any]]:
    first, *_ = calls = list(batch.values())
    limit_s = min(TIMEOUT_S, len(calls) * first.options.get("timeout_s", TIMEOUT_S))
    options = first.options | {"timeout_s": limit_s}
    by_rank = pool(first.world_size, run_each, [(call.fn, call.args) for call in calls], **options)
    return {nodeid: list(results) for nodeid, results in zip(batch, zip(*by_rank, strict=True), strict=True)}


def run_each(ctx: RankContext, calls: list[tuple[Callable[..., Any], tuple[object, ...]]]) -> list[Any]:
    """Job: the calls one after the other, each from the same seeds."""
    results = []
    for fn, args in calls:
        seed_generators()
        results.append(fn(ctx, *args))
    return results


def _record(item: pytest.Item) -> Call | None:
    """The first call that a test makes of the pool; None where it makes none."""

    def record(world_size: int, fn: Callable[..., Any], *args: object, **options: Any) -> None:
        raise Recorded(Call(world_size, fn, args, options))

    function: Any = item
    try:
        function.obj(ranks=record, **function.callspec.params)
    except Recorded as recorded:
        return recorded.call
    except Exception:  # the case itself will fail in the same way
        return None
    return None


def siblings(item: pytest.Item) -> Iterator[pytest.Item]:
    """Selected cases of the same test function."""
    function: Any = item
    for other in item.session.items:
        if other.parent is item.parent and getattr(other, "originalname", None) == function.originalname:
            yield other
