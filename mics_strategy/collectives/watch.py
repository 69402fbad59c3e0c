"""Does a rank wait for something that will never come?

Ranks that were asked for different transfers wait for each other in vain. A rank that has waited for some seconds
leaves a note in the store of the job, of what it waits for and what it was asked for so far, and reads the notes of the
ranks that it waits for. Two that wait for different things in the same place, or each for something that the other has
not been asked for, can never go on. Both say so, long before the timeout of the process group; a rank whose connections
break meanwhile says it, too. When the timeout is over, ranks without a note are those that do not answer.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass

from mics_strategy.collectives.bounded_store import BoundedStore
from mics_strategy.errors import LifecycleError

Place = tuple[str, frozenset[int]]
GRACE_S = 2.5  # for the notes of ranks that have begun to wait later
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """A transfer that a lane was asked for: the how manieth among these ranks, what it moves, how much, among whom."""

    lane: str
    number: int
    what: str
    size: str
    ranks: frozenset[int]

    @property
    def place(self) -> Place:
        """Where it has its number. Ranks that share it count alike; of other transfers one may have more."""
        return self.lane, self.ranks

    def __str__(self) -> str:
        return f"the {self.what[0].lower()}{self.what[1:]}"

    def size_beside(self, other: Asked) -> str:
        """How much it moves, where it is not told from the other by what it moves."""
        return f" of {self.size}" if self.what == other.what else ""


class Watch:
    """The notes of one model's transfers.

    Args:
        name: Of the model, the same on all ranks.
        rank: Of this process.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._bounded = BoundedStore()
        self._store = self._bounded.store
        self._counts: Counter[Place] = Counter()
        self._noted: Asked | None = None
        self._silent: set[int] = set()  # ranks that did not wait for anything when the notes were read last

    def ask(self, lane: str, what: str, size: str, ranks: frozenset[int]) -> Asked:
        """A lane is asked for a transfer."""
        asked = Asked(lane, self._counts[lane, ranks], what.split(" over ")[0], size, ranks)
        self._counts[asked.place] += 1
        return asked

    def look(self, own: Asked) -> None:
        """Leave a note, and read those of the others.

        Args:
            own: What this rank waits for.

        Raises:
            LifecycleError: It will never come.
        """
        self._noted = own
        found = self._bounded.ask(lambda: self._compare(own))
        if found:
            raise LifecycleError(found)

    def forget(self) -> None:
        """What this rank waited for has come."""
        if self._noted is not None:
            self._noted = None
            self._bounded.ask(lambda: self._store.set(self._key(self._rank), ""))

    def _compare(self, own: Asked) -> str:
        self._leave_note(own)
        for rank in sorted(own.ranks - {self._rank}):
            note = self._note_of(rank)
            if note is None:
                continue
            other, its_counts = note
            is_same_place = (own.place, own.number) == (other.place, other.number)
            is_another = is_same_place and (own.what, own.size) != (other.what, other.size)
            is_deadlock = (
                self._rank in other.ranks
                and its_counts.get(own.place, 0) <= own.number
                and self._counts[other.place] <= other.number
            )
            if is_another or is_deadlock:
                first, second = sorted([(self._rank, own), (rank, other)], key=lambda pair: pair[0])
                self._store.set(
                    self._key("parted"),
                    f"Ranks have parted, and wait for each other in vain: rank {first[0]} for {first[1]}"
                    f"{first[1].size_beside(second[1])} (transfer {first[1].number} of its lane), rank {second[0]} for "
                    f"{second[1]}{second[1].size_beside(first[1])} (transfer {second[1].number}). "
                    "Let all ranks run the same units in the same order while parameters are sharded (seed what "
                    "chooses them, as LayerDrop does, alike), or keep parameters whole with `params='none'`.",
                )
        self._silent = self._silent_now(own)
        return self._parted()

    def _leave_note(self, own: Asked) -> None:
        counts = [(lane, sorted(ranks), count) for (lane, ranks), count in self._counts.items()]
        note = [own.lane, own.number, own.what, own.size, sorted(own.ranks), counts]
        self._store.set(self._key(self._rank), json.dumps(note))

    def _note_of(self, rank: int) -> tuple[Asked, dict[Place, int]] | None:
        """What a rank waits for and what it was asked for so far; None where it does not wait."""
        text = self._store.get(self._key(rank)) if self._store.check([self._key(rank)]) else b""
        if not text:
            return None
        lane, number, what, size, ranks, counts = json.loads(text)
        return Asked(lane, number, what, size, frozenset(ranks)), {
            (lane, frozenset(ranks)): count for lane, ranks, count in counts
        }

    def _parted(self) -> str:
        return self._store.get(self._key("parted")).decode() if self._store.check([self._key("parted")]) else ""

    def explain(self) -> str:
        """Why a transfer has failed, in words; empty where nobody knows more than the transport.

        Cost:
            Some seconds where this rank has waited long: others may have begun to wait later.

        Raises:
            LifecycleError: Ranks have parted, as this or another one has found.
        """
        found = self._bounded.ask(self._parted)
        if found:
            raise LifecycleError(found)
        own = self._noted
        if own is None:
            return ""
        self._bounded.ask(lambda: self._read_until_all_wait(own), within_s=GRACE_S)
        if self._bounded.is_silent:
            return f"No answer from the store of the job either, which {self._bounded.holder} holds. "
        names = " and ".join(f"rank {rank}" for rank in sorted(self._silent))
        return f"No answer from {names}. " if names else ""

    def _read_until_all_wait(self, own: Asked) -> None:
        deadline_s = time.monotonic() + GRACE_S
        while True:
            self._silent = self._silent_now(own)
            if not self._silent or time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _silent_now(self, own: Asked) -> set[int]:
        """Ranks for which this one waits, and those for which they wait, that wait for nothing themselves."""
        silent: set[int] = set()
        seen, ahead = {self._rank}, [own]
        while ahead:
            for rank in ahead.pop().ranks - seen:
                seen.add(rank)
                note = self._note_of(rank)
                if note is None:
                    silent.add(rank)
                else:
                    ahead.append(note[0])
        return silent

    def _key(self, of: int | str) -> str:
        return f"mics/waits/{self._name}/{of}"
