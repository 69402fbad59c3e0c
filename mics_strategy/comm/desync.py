"""Were all ranks of a group asked for the same collectives, in the same order?

A rank that runs other units than its peers starts other collectives. Where the sizes agree the transport does not
notice, and a unit is filled with the parameters of another one. So each group keeps a trail, and one number per rank,
sent along with something that travels anyway, tells whether the trails of all groups agree.

Pure.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from mics_strategy.comm.bounded_store import BoundedStore
from mics_strategy.errors import LifecycleError

STEPS = "optimizer steps"  # name of the trail that counts them
_MODULUS = (1 << 18) - 5  # the balances of a thousand ranks fit into 32 bits


@dataclass(slots=True, kw_only=True)
class CollectiveFingerprint:
    """What one group was asked for, as this rank knows it.

    Attributes:
        ranks: Of the group.
        index: Which of them this is.
        count: Collectives so far.
        recent: What the last of them moved.
    """

    ranks: tuple[int, ...]
    index: int
    count: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=256))
    _hash: int = 0

    def update(self, what: str) -> None:
        """The group is asked to move `what`."""
        self.count += 1
        self.recent.append(what)
        self._hash = zlib.crc32(what.encode(), self._hash)

    @property
    def digest(self) -> int:
        """Adds up to 0 over the ranks of the group when their trails agree; else but for 1 case in 250,000 not."""
        own = self._hash % _MODULUS
        return own * (len(self.ranks) - 1) if self.index == 0 else -own

    def describe(self, place: int) -> str:
        """What the collective number `place` has moved."""
        start = self.count - len(self.recent)
        if place >= self.count:
            return "nothing"
        return f"`{self.recent[place - start]}`" if place >= start else "something long ago"


def first_mismatch(fingerprints: list[dict[str, CollectiveFingerprint]]) -> str:
    """Where two ranks of a group have parted, in words.

    Args:
        fingerprints: By rank, then by name.
    """
    counts = [of_rank[STEPS].count if STEPS in of_rank else 0 for of_rank in fingerprints]
    fewest, most = counts.index(min(counts)), counts.index(max(counts))
    if fewest != most:
        return (
            f"rank {fewest} has run {counts[fewest]} optimizer steps and rank {most} {counts[most]}. A rank without a "
            "loss, as of an empty batch, must run a backward, too: of a loss that is zero, as by `(outputs.sum() * "
            "0).backward()`"
        )
    for rank, own in enumerate(fingerprints):
        for name, trail in own.items():
            first = fingerprints[trail.ranks[0]][name]
            start = max(0, first.count - len(first.recent), trail.count - len(trail.recent))
            for place in range(start, max(first.count, trail.count)):
                if first.describe(place) != trail.describe(place):
                    return (
                        f"as transfer {place} of {name}, rank {first.ranks[0]} moved {first.describe(place)} and "
                        f"rank {rank} moved {trail.describe(place)}"
                    )
    return "they parted more transfers ago than are kept"


QueueKey = tuple[str, frozenset[int]]
STALL_GRACE_S = 2.5  # for the notes of ranks that have begun to wait later
_POLL_S = 0.1
_NUM_KEPT = 64  # transfers of one place that are remembered


@dataclass(frozen=True, slots=True)
class OpId:
    """A transfer that a lane was asked for: the how manieth among these ranks, what it moves, how much, among whom."""

    queue: str
    number: int
    label: str
    size: str
    ranks: frozenset[int]

    @property
    def queue_key(self) -> QueueKey:
        """Where it has its number. Ranks that share it count alike; of other transfers one may have more."""
        return self.queue, self.ranks

    def __str__(self) -> str:
        return f"the {self.label[0].lower()}{self.label[1:]}"

    def size_beside(self, other: OpId) -> str:
        """How much it moves, where it is not told from the other by what it moves."""
        return f" of {self.size}" if self.label == other.label else ""


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank waits for, how many transfers it was asked for so far, and how many backwards it has begun."""

    op: OpId
    counts: dict[QueueKey, int]
    num_backwards: int


class DesyncWatchdog:
    """The notes of one model's transfers.

    Args:
        name: Of the model, the same on all ranks.
        rank: Of this process.

    Attributes:
        num_backwards: That have begun on this rank.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._bounded = BoundedStore()
        self._store = self._bounded.store
        self._counts: Counter[QueueKey] = Counter()
        self._ops: defaultdict[QueueKey, deque[OpId]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self.num_backwards = 0
        self._reported: OpId | None = None
        self._silent: set[int] = set()  # ranks that did not wait for anything when the notes were read last

    def record(self, queue: str, label: str, size: str, ranks: frozenset[int]) -> OpId:
        """A lane is asked for a transfer."""
        asked = OpId(queue, self._counts[queue, ranks], label.split(" over ")[0], size, ranks)
        self._counts[asked.queue_key] += 1
        self._ops[asked.queue_key].append(asked)
        return asked

    def check(self, own: OpId) -> None:
        """Leave a note, and read those of the others.

        Args:
            own: What this rank waits for.

        Raises:
            LifecycleError: It will never come.
        """
        self._reported = own
        found = self._bounded.run_within(lambda: self._compare(own))
        if found:
            raise LifecycleError(found)

    def forget(self) -> None:
        """What this rank waited for has come."""
        if self._reported is not None:
            self._reported = None
            self._bounded.run_within(lambda: self._store.set(self._key(self._rank), ""))

    def _compare(self, own: OpId) -> str:
        self._publish_report(own)
        for rank in sorted(own.ranks - {self._rank}):
            note = self._report_of(rank)
            if note is None:
                continue
            other, mine = note.op, self._number(note.op.queue_key, note.op.number)
            is_deadlock = (
                self._rank in other.ranks
                and note.counts.get(own.queue_key, 0) <= own.number
                and self._counts[other.queue_key] <= other.number
            )
            if mine is not None and (mine.label, mine.size) != (other.label, other.size):
                self._store.set(self._key("parted"), self._difference(mine, rank, note))
            elif is_deadlock:
                self._store.set(self._key("parted"), self._difference(own, rank, note))
        self._silent = self._silent_now(own)
        return self._raise_desync()

    def _number(self, place: QueueKey, number: int) -> OpId | None:
        """What this rank was asked for as the transfer of that number; None where it was not, or long ago."""
        return next((asked for asked in self._ops[place] if asked.number == number), None)

    def _difference(self, own: OpId, rank: int, note: _Report) -> str:
        """For what this rank and another one wait in vain, and what to do."""
        own_waits, its_waits = (self._rank, own, self.num_backwards), (rank, note.op, note.num_backwards)
        first, second = sorted([own_waits, its_waits], key=lambda each: each[0])
        found = (
            f"Ranks have parted, and wait for each other in vain: rank {first[0]} for {first[1]}"
            f"{first[1].size_beside(second[1])} (transfer {first[1].number} of its lane), rank {second[0]} for "
            f"{second[1]}{second[1].size_beside(first[1])} (transfer {second[1].number}). "
        )
        if first[2] != second[2]:
            return (
                f"{found}Rank {first[0]} has begun {first[2]} backward passes, rank {second[0]} {second[2]}. A rank "
                "without a loss, as of an empty batch, must run the backward of its forward, too: of a loss that is "
                "zero, as by `(outputs.sum() * 0).backward()`."
            )
        return (
            f"{found}Let all ranks run the same units in the same order while parameters are sharded: no evaluation, "
            "`generate()` or other forward on some ranks only (`if rank == 0:`), and one seed for what chooses layers, "
            "as LayerDrop does. Where each rank's data chooses experts, make the layer around them a unit, and no "
            "expert. Or keep parameters whole with `params='none'`."
        )

    def _publish_report(self, own: OpId) -> None:
        counts = [(lane, sorted(ranks), count) for (lane, ranks), count in self._counts.items()]
        note = [own.queue, own.number, own.label, own.size, sorted(own.ranks), counts, self.num_backwards]
        self._store.set(self._key(self._rank), json.dumps(note))

    def _report_of(self, rank: int) -> _Report | None:
        """The note of a rank; None where it does not wait."""
        text = self._store.get(self._key(rank)) if self._store.check([self._key(rank)]) else b""
        if not text:
            return None
        lane, number, what, size, ranks, counts, num_backwards = json.loads(text)
        by_place = {(lane, frozenset(ranks)): count for lane, ranks, count in counts}
        return _Report(OpId(lane, number, what, size, frozenset(ranks)), by_place, num_backwards)

    def _raise_desync(self) -> str:
        return self._store.get(self._key("parted")).decode() if self._store.check([self._key("parted")]) else ""

    def explain(self) -> str:
        """Why a transfer has failed, in words; empty where nobody knows more than the transport.

        Cost:
            Some seconds where this rank has waited long: others may have begun to wait later.

        Raises:
            LifecycleError: Ranks have parted, as this or another one has found.
        """
        found = self._bounded.run_within(self._raise_desync)
        if found:
            raise LifecycleError(found)
        own = self._reported
        if own is None:
            return ""
        self._bounded.run_within(lambda: self._read_until_all_wait(own), within_s=STALL_GRACE_S)
        if self._bounded.is_silent:
            return f"No answer from the store of the job either, which {self._bounded.holder} holds. "
        names = " and ".join(f"rank {rank}" for rank in sorted(self._silent))
        return f"No answer from {names}. " if names else ""

    def _read_until_all_wait(self, own: OpId) -> None:
        deadline_s = time.monotonic() + STALL_GRACE_S
        while True:
            self._silent = self._silent_now(own)
            if not self._silent or time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _silent_now(self, own: OpId) -> set[int]:
        """Ranks for which this one waits, and those for which they wait, that wait for nothing themselves."""
        silent: set[int] = set()
        seen, ahead = {self._rank}, [own]
        while ahead:
            for rank in ahead.pop().ranks - seen:
                seen.add(rank)
                note = self._report_of(rank)
                if note is None:
                    silent.add(rank)
                else:
                    ahead.append(note.op)
        return silent

    def _key(self, of: int | str) -> str:
        return f"mics/waits/{self._name}/{of}"
