"""Which processes of a job live, and what they agree on when one is lost.

A process has one number for good: its first rank. The default groups that the job makes, one after the other, are its
*generations*, from 0. Everything goes through the job's store, where no process waits for a dead one:

    beat/<number>              grows while the process lives; and the attempts that it has committed
    failed/<generation>        set by whoever notices a failure; all others then end their collectives
    arrived/<generation>/<number>   committed attempts of a process that has ended its collectives
    members/<generation>       who goes on, and which attempts count: set once, by whoever first knows of every process
                               that it has arrived or is gone

A process is gone when its connection ends (see `peer_sockets`), or when its heart has not beaten for some seconds. One
that lives after all finds itself outside of the members, and raises.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from typing_extensions import override

from mics_strategy.comm.desync import BoundedStore
from mics_strategy.comm.resources import cancel_collectives
from mics_strategy.errors import CommunicationError
from mics_strategy.recovery.peer_sockets import Address, PeerSockets

T = TypeVar("T")
BEAT_S = 0.2  # between two heartbeats
_POLL_S = 0.02
_GRACE_S = 0.5  # for a thread whose collectives have failed
_STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the processes that are left have agreed on.

    Attributes:
        members: Their numbers, in the order of their ranks.
        lost: Numbers of the processes that are gone.
        commits: Attempts that count.
    """

    members: list[int]
    lost: list[int]
    commits: int


class Membership:
    """The processes of a job, as one of them knows them. A thread sends heartbeats, and watches the other processes.

    Args:
        number: Number of this process.
        job: Name of the job in the store, the same on all processes, unique and secret; host and port of each process,
            by its number.
        sockets: Connections of this process, not yet connected.
        lost_after_s: Silence after which a process counts as lost, seconds.
        timeout: Time in which all processes notice a failure, or count as lost. Collectives have the same.

    Attributes:
        number: Number of this process.
        members: Numbers of the processes of this generation, in the order of their ranks.
        generation: Number of the generation.
        commits: Attempts that this process has committed.
        timeout: See `Args`.
        store: Store of the process groups of this generation, once it has begun.
        has_failed: Whether a collective of this generation has failed on any process.
    """

    def __init__(
        self,
        number: int,
        job: tuple[str, Sequence[Address]],
        sockets: PeerSockets,
        lost_after_s: float,
        timeout: timedelta,
    ) -> None:
        name, addresses = job
        self.number = number
        self.members = list(range(len(addresses)))
        self.generation = 0
        self.commits = 0
        self.has_failed = False
        self.store: GenerationStore | None = None  # held here: torch keeps only the part of it that is in C++
        self._lost_after_s = lost_after_s
        self.timeout = timeout
        self._store: Any = PrefixStore(f"mics/recovery/{name}", own_client(BoundedStore().store))
        self._sockets = sockets
        sockets.connect(addresses, name)
        self._failing = threading.Lock()
        self._ending = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="mics heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeats: this process leaves the job, or is done."""
        self._ending.set()
        self._thread.join()
        self._sockets.close()

    def begin(self, members: Sequence[int]) -> None:
        """Begin the next generation, with these members."""
        with self._failing:
            self.members = list(members)
            self.generation += 1
            self.has_failed = False
        self.store = GenerationStore(PrefixStore(f"groups/{self.generation}", self._store), self)

    def fail(self, generation: int) -> None:
        """End the collectives of a generation, on all processes. A second call does nothing."""
        with self._failing:
            if generation == self.generation and not self.has_failed:
                self.has_failed = True
                with suppress(dist.DistError):  # of a store that is gone, as `agree` says
                    self._store.set(f"failed/{generation}", "")
                cancel_collectives()

    def fails_soon(self) -> bool:
        """Whether a collective has failed, or does within two heartbeats, which a death takes to be noticed."""
        deadline_s = time.monotonic() + 2 * BEAT_S
        while not self.has_failed and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return self.has_failed

    @property
    def lacks_members(self) -> bool:
        """Whether process groups of this generation cannot be made: a member has died, or left by itself."""
        return self.has_failed or not self._sockets.gone.isdisjoint(self.members)

    def run_until_failure(self, make: Callable[[], T]) -> T:
        """Make process groups, in a thread: gloo tries to connect to a process that has died until its timeout.

        A thread that still tries is left alone.

        Raises:
            CommunicationError: A process was lost meanwhile.
        """
        made: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                made.append(make())
            except Exception as error:
                errors.append(error)  # raised below

        thread = threading.Thread(target=run, name="mics groups", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_GRACE_S if self.lacks_members else _POLL_S)
            if self.lacks_members:
                break
        if errors:
            raise errors[0]
        if self.lacks_members or not made:
            raise CommunicationError("A rank was lost while the others made process groups.")
        return made[0]

    def agree(self) -> Agreement:
        """Agree on who goes on. All collectives of this process have ended.

        Raises:
            CommunicationError: This process was taken for lost, or the store is gone.

        Cost:
            The time until each other process has noticed the failure, or was silent for `lost_after_s`.
        """
        try:
            return self._agree()
        except dist.DistError as error:
            raise CommunicationError(
                f"A rank was lost, and so was the store of the job, without which the others cannot agree ({error}). "
                "Start the job again from its newest checkpoint. The launcher of torchrun keeps the store apart from "
                "the ranks; in a script that starts its ranks itself, rank 0 has it."
            ) from error

    def _agree(self) -> Agreement:
        key = f"members/{self.generation}"
        self._store.set(f"arrived/{self.generation}/{self.number}", str(self.commits))
        silence, deadline_s = _Silence(self._store), time.monotonic() + self.timeout.total_seconds()
        while not self._store.check([key]):
            arrived = {
                number: int(self._store.get(self._arrival(number)))
                for number in self.members
                if self._store.check([self._arrival(number)])
            }
            missing = [number for number in self.members if number not in arrived]
            silences_s = {number: silence.of(number) for number in missing}  # of all: each look is remembered
            is_late = time.monotonic() > deadline_s
            if is_late or all(n in self._sockets.gone or silences_s[n] > self._lost_after_s for n in missing):
                commits = max([*arrived.values(), *(silence.commits_of(number) for number in missing)])
                self._store.compare_set(key, "", json.dumps([sorted(arrived), commits]))
                break
            time.sleep(_POLL_S)
        numbers, commits = json.loads(self._store.get(key))
        if self.number not in numbers:
            raise CommunicationError(
                f"Process {self.number} was silent for more than {self._lost_after_s} s, and the others have gone on "
                "without it. Raise `lost_after_s` if it was only busy."
            )
        members = [number for number in self.members if number in numbers]
        return Agreement(members, [number for number in self.members if number not in numbers], commits)

    def _arrival(self, number: int) -> str:
        return f"arrived/{self.generation}/{number}"

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self.number}", f"{count} {self.commits}")

    def _watch(self) -> None:
        count, watched = 0, -1
        while not self._ending.is_set():
            count += 1
            self._sockets.poll(BEAT_S)
            with self._failing:
                generation, members = self.generation, self.members
            try:
                self._beat(count)
                if watched != generation:
                    watched, silence = generation, _Silence(self._store)
                if (
                    not self._sockets.died.isdisjoint(members)
                    or self._store.check([f"failed/{generation}"])
                    or self._misses_neighbor(members, silence)
                ):
                    self.fail(generation)
            except dist.DistError:  # the process that held the store has ended; who needs it says so
                return

    def _misses_neighbor(self, members: Sequence[int], silence: _Silence) -> bool:
        """Whether the next process that has not left is silent. If several are, the one before them notices."""
        start = members.index(self.number) + 1
        following = next(n for n in (*members[start:], *members[:start]) if n not in self._sockets.gone)
        if following == self.number or silence.of(following) <= self._lost_after_s:
            return False
        self._sockets.gone.add(following)
        return True


class GenerationStore(Store):
    """A store in which nobody waits for the keys of a process that is lost.

    Args:
        store: Store with the keys.
        membership: Processes that set them.
    """

    def __init__(self, store: Store, membership: Membership) -> None:
        super().__init__()
        self._inner: Any = store
        self._membership = membership
        self._generation = membership.generation
        self._longest = membership.timeout

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: A process was lost, or it took too long.
        """
        deadline_s = time.monotonic() + (timeout or self._longest).total_seconds()
        while not self._inner.check(keys):
            if self._membership.lacks_members and self._membership.generation == self._generation:
                raise dist.DistStoreError(f"A process was lost before it set {keys}.")
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"No process has set {keys} in time.")
            time.sleep(_POLL_S / 10)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._inner.get(key))

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, value)

    @override
    def add(self, key: str, value: int) -> int:
        return int(self._inner.add(key, value))

    @override
    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    @override
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return bytes(self._inner.compare_set(key, expected_value, desired_value))

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    deleteKey = delete_key  # by which torch's C++ finds it


class _Silence:
    """How long processes have been silent, as observed from now on.

    Args:
        store: Store with the heartbeats.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[int, tuple[bytes, float]] = {}

    def of(self, number: int) -> float:
        """Seconds since the last new heartbeat that was observed."""
        beat, now_s = self._store.get(f"beat/{number}"), time.monotonic()
        last, since_s = self._last.get(number, (b"", now_s))
        if beat != last:
            since_s = now_s
        self._last[number] = beat, since_s
        return now_s - since_s

    def commits_of(self, number: int) -> int:
        """Committed attempts in the last heartbeat."""
        return int(self._last[number][0].split()[1])


def own_client(store: Any) -> Any:
    """A client of the same store that no other thread blocks, as one that waits for a key does."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, timedelta(seconds=_STORE_TIMEOUT_S), False)
    return store
