"""Consensus of ranks: checks that raise on all ranks or on none, and a rendezvous.

No collective blocks the rendezvous.
"""

from __future__ import annotations

import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mics_strategy import errors
from mics_strategy.comm.desync import BoundedStore
from mics_strategy.comm.transport import backend_of
from mics_strategy.comm.work import DEVICE_ERRORS

T = TypeVar("T")
S = TypeVar("S")
_LONG_S = 2.0  # after which missing ranks are named
_PAUSE_S = 0.02  # between two looks at the store
_num_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def gather_objects(value: T, caller: str = "", group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, in rank order.

    Args:
        value: Object that can be pickled.
        caller: Name of the function for which it is gathered, the same on all ranks; by default, that which calls.
        group: Ranks that take part, whose order counts; all of the job by default.

    Raises:
        CommunicationError: A rank died, did not take part in time, or gathers for another function.
    """
    if dist.get_world_size() == 1:
        return [value]
    caller = caller or sys._getframe(1).f_code.co_qualname
    values: list[tuple[str, T]] = [(caller, value)] * dist.get_world_size(group)
    bounded, start_s = BoundedStore(), time.monotonic()
    is_gloo = group is None and backend_of(dist.group.WORLD, "cpu") == "gloo"
    number = _num_calls[dist.group.WORLD] = _num_calls.get(dist.group.WORLD, 0) + (group is None)
    if is_gloo:
        bounded.store.set(_key(dist.get_rank()), str(number))
    try:
        dist.all_gather_object(values, (caller, value), group)
    except (errors.MiCSError, *DEVICE_ERRORS):  # the first of a value that cannot be pickled
        raise
    except RuntimeError as error:
        is_late = is_gloo and time.monotonic() - start_s > _LONG_S
        missing = bounded.run_within(lambda: _missing_ranks(bounded.store, number)) if is_late else None
        silent = f"No answer from rank {', '.join(map(str, missing))}. " if missing else ""
        raise errors.CommunicationError(
            f"An object for {caller} could not be gathered from all {len(values)} ranks: {error}. {silent}"
            "A rank died, or runs other code. Look for the first error of the other ranks."
        ) from error
    callers = [other for other, _ in values]
    if len({*callers}) > 1:
        found = ", ".join(f"`{other}` on rank {rank}" for rank, other in enumerate(callers))
        raise errors.CommunicationError(
            f"Ranks are in different functions, each of which needs all ranks: {found}. Call them on every rank, in "
            "one order."
        )
    return [other for _, other in values]


def broadcast_from_rank_0(value: T) -> T:
    """Return rank 0's value. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _key(rank: int) -> str:
    return f"mics/agreements/{rank}"


def _missing_ranks(store: Any, number: int) -> list[int]:
    """Ranks that have not entered the gather of that number."""
    keys = {rank: _key(rank) for rank in range(dist.get_world_size())}
    return [rank for rank, key in keys.items() if not store.check([key]) or int(store.get(key)) < number]


def run_on_all_ranks(action: Callable[[], T], foreign: type[errors.MiCSError] | None = None) -> T:
    """Run a local function, and raise on all ranks if it raises on any.

    A rank that raises alone leaves the others waiting in their next collective.

    Args:
        action: Function to run. It uses no collective.
        foreign: Class in which the other ranks raise an exception of `action` that is no `MiCSError`. None where it
            raises no such exception but of a defect.

    Raises:
        MiCSError: The first failing rank's error, of the same class, with the ranks that raised one.
        Exception: The exception of this rank that is no `MiCSError`.
    """
    return run_and_gather(lambda: (action(), None), foreign, _name(action))[0]


def run_on_files(action: Callable[[], T]) -> T:
    """Read or write files; if it fails on one rank, raise on all. Collective.

    Raises:
        CheckpointError: A rank failed; the error names it.
    """

    def attempt() -> T:
        try:
            return action()
        except errors.MiCSError:
            raise
        except (OSError, RuntimeError, pickle.PickleError) as error:
            raise errors.CheckpointError(str(error)) from error

    return run_on_all_ranks(attempt)


def run_and_gather(
    action: Callable[[], tuple[T, S]], foreign: type[errors.MiCSError] | None = None, caller: str = ""
) -> tuple[T, list[S]]:
    """Run a local function as `run_on_all_ranks`, and gather part of its result.

    Args:
        action: Function to run. It returns a result for this rank, and an object for all ranks.
        foreign: See `run_on_all_ranks`.
        caller: See `gather_objects`; by default, that which defines `action`.

    Returns:
        The result for this rank, and the objects of all ranks in rank order.

    Raises:
        MiCSError: The first failing rank's error, of the same class, with the ranks that raised one.
        Exception: The exception of this rank that is no `MiCSError`.
    """
    result: tuple[T, S] | None = None
    failure: tuple[str, str] | None = None
    local_error: Exception | None = None
    try:
        result = action()
    except errors.MiCSError as error:
        local_error, failure = error, (type(error).__name__, str(error))
    except Exception as error:
        if foreign is None:
            raise
        local_error, failure = error, (foreign.__name__, f"{type(error).__name__}: {error}")
    gathered = gather_objects((failure, None if result is None else result[1]), caller or _name(action))
    if local_error is not None and not isinstance(local_error, errors.MiCSError):
        raise local_error
    failing = [rank for rank, (other, _) in enumerate(gathered) if other is not None]
    if not failing and result is not None:
        return result[0], cast("list[S]", [shared for _, shared in gathered])
    name, message = gathered[failing[0]][0] or ("MiCSError", "")
    where = "" if len(failing) == len(gathered) else f" (found on rank {', '.join(map(str, failing))})"
    raise getattr(errors, name)(message + where) from local_error


def _name(action: Callable[[], object]) -> str:
    """Name of the function that defines an action."""
    return getattr(action, "__qualname__", type(action).__name__).partition(".<locals>")[0]


class Rendezvous:
    """A wait for all ranks through the job's store.

    No unfinished collective blocks the store.

    Args:
        name: Name in the store, the same on all ranks and unique in the job.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_calls = 0

    def missing_ranks(self, timeout_s: float, check_absent: Callable[[list[int]], None] = lambda _: None) -> list[int]:
        """Wait until all ranks have called this method equally often.

        Returns the ranks that have not in time.

        Args:
            timeout_s: Longest wait for the last rank, seconds.
            check_absent: Called now and then with the ranks that are missing. It raises if they will not come.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return []
        store, number = dist.distributed_c10d._get_default_store(), self._num_calls
        self._num_calls += 1
        keys = [f"mics_strategy/{self._name}/{number}/{other}" for other in range(world_size)]
        store.set(keys[rank], "")
        now_s = time.monotonic()
        deadline_s, check_s = now_s + timeout_s, now_s + _LONG_S
        while not store.check(keys):  # a blocking wait would keep the store from other threads
            now_s = time.monotonic()
            if now_s > min(deadline_s, check_s):
                missing = [other for other, key in enumerate(keys) if not store.check([key])]
                if now_s > deadline_s:
                    return missing
                check_absent(missing)
                check_s = now_s + _LONG_S
            time.sleep(_PAUSE_S)
        if number:
            store.delete_key(f"mics_strategy/{self._name}/{number - 1}/{rank}")  # all ranks have seen it
        return []


def check_equal(by_rank: Sequence[dict[str, str]]) -> None:
    """Check that values are equal on all ranks.

    Args:
        by_rank: Values of each rank, as text, by the name that an error shows.

    Raises:
        ConfigError: Two ranks differ. The error names the value and both ranks.
    """
    for name, value in by_rank[0].items():
        for rank, other in enumerate(by_rank):
            if other.get(name) != value:
                raise errors.ConfigError(
                    f"`{name}` differs between ranks: {value} on rank 0, {other.get(name)} on rank {rank}. "
                    "Give every rank the same script and the same configuration."
                )


def check_same_keys_across_ranks(label: str, names: Iterable[str]) -> None:
    """Check that all ranks have the same names. Collective.

    Raises:
        ConfigError: On every rank, with up to three of the names that some rank lacks.
    """
    by_rank = [set(rank_names) for rank_names in gather_objects(sorted(names))]
    missing = sorted(set().union(*by_rank) - by_rank[0].intersection(*by_rank))
    if missing:
        ranks = [rank for rank, rank_names in enumerate(by_rank) if not rank_names.issuperset(missing)]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise errors.ConfigError(
            f"{label} differ between ranks: {', '.join(missing[:3])}{more} not on rank {', '.join(map(str, ranks))}. "
            "Pass the same names on every rank."
        )
