"""Do all ranks see the same?"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from mics_strategy import errors
from mics_strategy.comm.bounded_store import BoundedStore
from mics_strategy.comm.transport import moves

T = TypeVar("T")
_LONG_S = 2.0  # after which ranks that are not there are named
_num_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def gather_objects(value: T) -> list[T]:
    """Every rank's `value`, in rank order.

    Raises:
        CommunicationError: A rank died or did not take part in time.
    """
    if dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    number = _num_calls[dist.group.WORLD] = _num_calls.get(dist.group.WORLD, 0) + 1
    asked, start_s, is_gloo = BoundedStore(), time.monotonic(), moves(dist.group.WORLD, "cpu") == "gloo"
    if is_gloo:
        asked.store.set(_key(dist.get_rank()), str(number))
    try:
        dist.all_gather_object(values, value)
    except errors.MiCSError:  # of a value that refuses to be pickled
        raise
    except RuntimeError as error:
        is_late = is_gloo and time.monotonic() - start_s > _LONG_S
        missing = asked.run_within(lambda: _missing_ranks(asked.store, number)) if is_late else None
        found = f"No answer from rank {', '.join(map(str, missing))}. " if missing else ""
        raise errors.CommunicationError(
            f"What all ranks must agree on could not be gathered from all {len(values)} of them: {error}. {found}"
            "A rank died or is somewhere else; look for the first error of the other ranks."
        ) from error
    return values


def _key(rank: int) -> str:
    return f"mics/agreements/{rank}"


def _missing_ranks(store: Any, number: int) -> list[int]:
    """Ranks that have not come to the gather of that number."""
    keys = {rank: _key(rank) for rank in range(dist.get_world_size())}
    return [rank for rank, key in keys.items() if not store.check([key]) or int(store.get(key)) < number]


def run_on_all_ranks(check: Callable[[], T]) -> T:
    """Run a local check; if it raises on any rank, raise on all of them.

    A rank that raises alone leaves the others waiting in their next collective.

    Raises:
        MiCSError: The first rank's error, of the same class, naming the ranks that found it.
    """
    result: T | None = None
    failure: tuple[str, str] | None = None
    own: errors.MiCSError | None = None
    try:
        result = check()
    except errors.MiCSError as error:
        own, failure = error, (type(error).__name__, str(error))
    failures = gather_objects(failure)
    found = [rank for rank, other in enumerate(failures) if other is not None]
    if not found:
        return result  # type: ignore[return-value]
    name, message = failures[found[0]] or ("MiCSError", "")
    where = "" if len(found) == len(failures) else f" (found on rank {', '.join(map(str, found))})"
    raise getattr(errors, name)(message + where) from own


def check_equal_across_ranks(values: dict[str, str]) -> None:
    """Refuse a job whose ranks disagree.

    Args:
        values: What must be equal, by a name that the error can show.

    Raises:
        ConfigError: On every rank, naming the value and the two ranks that differ.
    """
    everyone = gather_objects(values)
    for name, value in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other.get(name) != value:
                raise errors.ConfigError(
                    f"`{name}` differs between ranks: {value} on rank 0, {other.get(name)} on rank {rank}. "
                    "Give every rank the same script and the same configuration."
                )


def check_same_keys_across_ranks(label: str, names: Iterable[str]) -> None:
    """Refuse a job whose ranks do not have the same names.

    Raises:
        ConfigError: On every rank, with up to three of the names that some rank lacks.
    """
    everyone = [set(found) for found in gather_objects(sorted(names))]
    lacking = sorted(set().union(*everyone) - everyone[0].intersection(*everyone))
    if lacking:
        ranks = [rank for rank, found in enumerate(everyone) if not found.issuperset(lacking)]
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise errors.ConfigError(
            f"{label} differ between ranks: {', '.join(lacking[:3])}{more} not on rank {', '.join(map(str, ranks))}. "
            "Pass the same names on every rank."
        )
