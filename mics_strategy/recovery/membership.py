"""Which processes of a job live, and what they agree on when one is lost, or when others join.

A process has one number for good: its first rank, or the next that no process had (see `joining`). The default groups
that the job makes, one after the other, are its *generations*, from 0. Those of a block that waits to join are below 0.
Everything goes through the job's store, where no process waits for a dead one:

    beat/<number>              grows while the process lives; and the attempts that it has committed
    failed/<generation>        set by whoever notices a failure; all others then end their collectives
    arrived/<generation>/<number>   committed attempts of a process that has ended its collectives, and whether it ends
                               the generation for newcomers
    members/<generation>       who goes on, and which attempts count: set once, by whoever first knows of every process
                               that it has arrived or is gone

A process is gone when its connection ends (see `peer_sockets`), or when its heart has not beaten for some seconds. One
that lives after all finds itself outside of the members, and raises.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from mics_strategy.comm.resources import cancel_collectives
from mics_strategy.errors import CommunicationError, ConfigError
from mics_strategy.recovery.generation_store import GenerationStore
from mics_strategy.recovery.joining import Applications
from mics_strategy.recovery.peer_sockets import PeerSockets
from mics_strategy.recovery.survivors import remaining

T = TypeVar("T")
BEAT_S = 0.2  # between two heartbeats
_POLL_S = 0.02
_GRACE_S = 0.5  # for a thread whose collectives have failed
NO_STATES = -1  # committed attempts of a newcomer that has no states yet
_open: weakref.WeakSet[Membership] = weakref.WeakSet()  # in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the processes that are left have agreed on.

    Attributes:
        members: Numbers of the processes that go on, in the order of their ranks.
        lost: Numbers of those that are gone.
        newcomers: Members without states.
        invited: Numbers of the newcomers that are members from now on, by the index of their application.
        commits: Attempts that count.
    """

    members: list[int]
    lost: list[int]
    newcomers: list[int]
    invited: dict[str, list[int]]
    commits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPolicy:
    """How a job loses processes.

    Attributes:
        block: Ranks that stay, leave or join together.
        lost_after_s: Silence after which a process counts as lost, seconds.
        timeout: Time in which all processes notice a failure, or count as lost. Collectives have the same.
        full_size: Ranks with which a job began that begins its training again when it loses some; 0 for one that
            goes on in place.
    """

    block: int
    lost_after_s: float
    timeout: timedelta
    full_size: int = 0

    @property
    def caller(self) -> str:
        """What a user has called, for messages."""
        return "restart_on_loss" if self.full_size else "Recovery"


def check_lost_after(lost_after_s: float) -> None:
    """Check a silence after which a process counts as lost, seconds.

    Raises:
        ConfigError: A living process is silent as long now and then.
    """
    if not lost_after_s >= 5 * BEAT_S:
        raise ConfigError(f"`lost_after_s={lost_after_s}`: a heart beats every {BEAT_S} s. Use 1.0 or more.")


def is_member(*, in_place: bool = False) -> bool:
    """Whether this process is a member of a job that goes on without the processes that it loses.

    Args:
        in_place: Whether only jobs count that do so in the middle of their training.
    """
    return any(not (in_place and membership.policy.full_size) for membership in _open)


def raise_if_failed() -> None:
    """Raise where the job of this process ends its collectives, of which a rank that is left alone has none.

    Raises:
        CommunicationError: A rank was lost, or a node waits to join.
    """
    if any(membership.has_failed for membership in _open):
        raise CommunicationError("The job goes on with other ranks.")


class Membership:
    """The processes of a job, as one of them knows them. A thread sends heartbeats, and watches the other processes.

    Args:
        number: Number of this process.
        members: Numbers of the members of the first generation.
        generation: Number of that generation.
        store: Store of the job.
        sockets: Connections of this process.
        policy: How the job loses processes.

    Attributes:
        number: Number of this process.
        members: Numbers of the processes of this generation, in the order of their ranks.
        generation: Number of the generation.
        commits: Attempts that this process has committed; `NO_STATES` for a newcomer without states.
        policy: See `Args`.
        store: Store of the process groups of this generation, once it has begun.
        has_failed: Whether a collective of this generation has failed on any process, or all have ended.
        applications: Applications to join, which the first member answers.
        launched_with: Store of the first groups, which torch drops with them; its server may be in this process.
    """

    def __init__(
        self,
        number: int,
        members: Sequence[int],
        generation: int,
        store: Any,
        sockets: PeerSockets,
        policy: LossPolicy,
    ) -> None:
        self.number = number
        self.members = list(members)
        self.generation = generation
        self.commits = NO_STATES if generation < 0 else 0
        self.policy = policy
        self.has_failed = False
        self.store: GenerationStore | None = None
        self.launched_with: Any = None
        self.applications = Applications(store)
        self._store = store
        self._sockets = sockets
        self._silent: set[int] = set()  # in this generation: one that arrives in the next one was only busy
        self._failing = threading.Lock()
        self._ending = threading.Event()
        _open.add(self)
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="mics heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_first(self) -> bool:
        """Whether this process is the first member, which answers applications."""
        return self.members[0] == self.number and self.generation >= 0

    def close(self) -> None:
        """End the heartbeats: this process leaves the job, or is done."""
        self._ending.set()
        if self.store is not None:
            self.store.outlive_job()
        self._thread.join()
        self._sockets.close()
        _open.discard(self)

    def announce_end(self) -> None:
        """Let others know that the job ends: those who wait to join, and members who would train on."""
        with suppress(dist.DistError):  # of a store that is gone, which says the same
            self._store.set("ended", "")

    @property
    def has_ended(self) -> bool:
        """Whether a member has ended the training."""
        return bool(self._store.check(["ended"]))

    def end_together(self) -> None:
        """Wait until all members have reached the end of the training, which counts then as an attempt of all.

        Raises:
            CommunicationError: A process was lost before. The next agreement says whether the attempt counts.
        """
        keys = {number: f"end/{self.generation}/{number}" for number in self.members}
        self._store.set(keys[self.number], "")
        while not self._store.check([*keys.values()]):
            if self.lacks_members:
                raise CommunicationError("A rank was lost while others waited for the end of the training.")
            time.sleep(_POLL_S)
        self.commits += 1
        self._beat(-1)  # now: this process may leave before its next heartbeat
        self._store.set(f"seen/{self.generation}/{self.number}", "")
        deadline_s = time.monotonic() + self.policy.lost_after_s
        while self.number == 0 and time.monotonic() < deadline_s:  # it may hold the store, from which others read
            if all(n in self._gone or self._store.check([f"seen/{self.generation}/{n}"]) for n in self.members):
                break
            time.sleep(_POLL_S)

    def begin(self, members: Sequence[int], generation: int) -> None:
        """Begin a generation, with these members."""
        with self._failing:
            self.members = list(members)
            self.generation = generation
            self.has_failed = False
            self._silent = set()
        if self.is_first:
            self._store.set("running", json.dumps(self.members))
        store, longest = PrefixStore(f"groups/{generation}", self._store), self.policy.timeout
        self.store = GenerationStore(store, lambda: self.lacks_members or self.generation != generation, longest)

    def fail(self, generation: int) -> None:
        """End the collectives of a generation, on all processes. A second call does nothing."""
        with self._failing:
            if generation == self.generation and not self.has_failed:
                self.has_failed = True
                with suppress(dist.DistError):  # of a store that is gone, as `agree` says
                    self._store.set(f"failed/{generation}", "")
                cancel_collectives()

    def end_generation(self) -> None:
        """Let nobody cancel collectives of this generation any more: none is in flight, and groups are destroyed."""
        with self._failing:
            self.has_failed = True

    def fails_soon(self) -> bool:
        """Whether a collective has failed, or does within two heartbeats, which a death takes to be noticed."""
        deadline_s = time.monotonic() + 2 * BEAT_S
        while not self.has_failed and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return self.has_failed

    @property
    def has_seen_death(self) -> bool:
        """Whether a process has died to which this one was connected."""
        return bool(self._sockets.died)

    @property
    def has_lost_members(self) -> bool:
        """Whether a member of this generation has died or is silent, and has not left by itself."""
        return not (self._sockets.died | self._silent).isdisjoint(self.members)

    @property
    def lacks_members(self) -> bool:
        """Whether process groups of this generation cannot be made: a member has died, or left by itself."""
        return self.has_failed or not self._gone.isdisjoint(self.members)

    @property
    def _gone(self) -> set[int]:
        return self._sockets.gone | self._silent

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

    def agree(self, *, for_newcomers: bool = False) -> Agreement:
        """Agree on who goes on. All collectives of this process have ended.

        Args:
            for_newcomers: Whether this process ends the generation for invited newcomers, not for a failure. They
                become members if all processes do.

        Raises:
            CommunicationError: This process was taken for lost, or the store is gone.

        Cost:
            The time until each other process has noticed the failure, or was silent for `lost_after_s`.
        """
        try:
            agreement = self._agree(for_newcomers)
        except dist.DistError as error:
            raise CommunicationError(
                f"A rank was lost, and so was the store of the job, without which the others cannot agree ({error}). "
                "Start the job again from its newest checkpoint. The launcher of torchrun keeps the store apart from "
                "the ranks; in a script that starts its ranks itself, rank 0 has it."
            ) from error
        self.end_generation()
        return agreement

    def _agree(self, for_newcomers: bool) -> Agreement:
        key, arrival = f"members/{self.generation}", json.dumps([self.commits, for_newcomers])
        self._store.set(self._arrival(self.number), arrival)
        silence, deadline_s = Silence(self._store), time.monotonic() + self.policy.timeout.total_seconds()
        while not self._store.check([key]):
            arrived = {
                number: json.loads(self._store.get(self._arrival(number)))
                for number in self.members
                if self._store.check([self._arrival(number)])
            }
            missing = [number for number in self.members if number not in arrived]
            silences_s = {number: silence.of(number) for number in missing}  # of all: each look is remembered
            is_late, longest_s = time.monotonic() > deadline_s, self.policy.lost_after_s
            if is_late or all(n in self._gone or silences_s[n] > longest_s for n in missing):
                beats = [silence.commits_of(number) for number in missing]
                self._store.compare_set(key, "", json.dumps(asdict(self._conclude(arrived, beats))))
                break
            time.sleep(_POLL_S)
        agreement = self.agreement_behind(self.generation)
        if self.number in agreement.lost:
            raise CommunicationError(
                f"Process {self.number} was silent for more than {self.policy.lost_after_s} s, or in no collective for "
                f"{self.policy.timeout.total_seconds():.0f} s when the others had noticed a failure, and they have "
                "gone on without it. If it was only busy, raise `lost_after_s`, or the timeout of the default group."
            )
        return agreement

    def _conclude(self, arrived: dict[int, tuple[int, bool]], beats: list[int]) -> Agreement:
        """The agreement of the processes that have arrived, as the first that knows of all concludes.

        Args:
            arrived: Committed attempts, and whether it ends the generation for newcomers, of each that has arrived.
            beats: Committed attempts in the last heartbeats of the others.
        """
        lost, block = [number for number in self.members if number not in arrived], self.policy.block
        members = remaining(self.members, lost, block)
        complete = remaining(members, [number for number in members if arrived[number][0] == NO_STATES], block)
        invited: dict[str, list[int]] = {}
        if not lost and all(for_newcomers for _, for_newcomers in arrived.values()):
            invited = json.loads(self._store.get(f"invited/{self.generation}"))
        members = sorted([*members, *(number for numbers in invited.values() for number in numbers)])
        return Agreement(
            members=members,
            lost=lost,
            newcomers=[number for number in members if number not in complete],
            invited=invited,
            commits=max([*(commits for commits, _ in arrived.values()), *beats]),
        )

    def agreement_behind(self, generation: int) -> Agreement:
        """The agreement that has ended a generation, which exists."""
        return Agreement(**json.loads(self._store.get(f"members/{generation}")))

    def _arrival(self, number: int) -> str:
        return f"arrived/{self.generation}/{number}"

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self.number}", f"{count} {self.commits}")

    def _watch(self) -> None:
        count, silence, watched, has_store = 0, Silence(self._store), self.generation, True
        while not self._ending.is_set():
            count += 1
            self._sockets.poll(BEAT_S)
            with self._failing:
                generation, members = self.generation, self.members
            if watched != generation:
                watched, silence = generation, Silence(self._store)
            is_failing = not self._sockets.died.isdisjoint(members)
            if has_store:
                try:
                    self._beat(count)
                    is_failing = (
                        is_failing
                        or self._store.check([f"failed/{generation}"])
                        or self._misses_neighbor(members, silence)
                    )
                    if self.is_first:
                        self.applications.poll()
                        lacks_ranks = len(members) < self.policy.full_size
                        is_failing = is_failing or (lacks_ranks and bool(self.applications.waiting))
                except dist.DistError:  # the process that held the store has ended: connections still show deaths
                    has_store = False
            if is_failing:
                self.fail(generation)

    def _misses_neighbor(self, members: Sequence[int], silence: Silence) -> bool:
        """Whether the next process that has not left is silent. If several are, the one before them notices."""
        start = members.index(self.number) + 1
        following = next(n for n in (*members[start:], *members[:start]) if n not in self._gone)
        if following == self.number or silence.of(following) <= self.policy.lost_after_s:
            return False
        with self._failing:
            if members is self.members:  # else the next generation has begun
                self._silent.add(following)
        return True


class Silence:
    """How long processes have been silent, as observed from now on.

    Args:
        store: Store with the heartbeats.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[int, tuple[bytes, float]] = {}

    def of(self, number: int) -> float:
        """Seconds since the last new heartbeat that was observed."""
        key, now_s = f"beat/{number}", time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""  # of one that died before its first
        last, since_s = self._last.get(number, (b"", now_s))
        if beat != last:
            since_s = now_s
        self._last[number] = beat, since_s
        return now_s - since_s

    def commits_of(self, number: int) -> int:
        """Committed attempts in the last heartbeat."""
        beat, _ = self._last[number]
        return int(beat.split()[1]) if beat else 0
