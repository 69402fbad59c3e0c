"""Does a rank wait for something that will never come?

Ranks that were asked for different transfers wait for each other in vain. A rank that has waited for some seconds
leaves a note in the store of the job, of what it waits for and what it was asked for so far, and reads the notes of the
ranks that it waits for. Two that wait for different things in the same place, or each for something that the other has
not been asked for, can never go on. Both say so, long before the timeout of the process group; a rank whose connections
break meanwhile says it, too.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist

from mics_strategy.errors import LifecycleError

Place = tuple[str, frozenset[int]]


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
    """The notes of one model's lanes.

    Args:
        name: Of the model, the same on all ranks.
        rank: Of this process.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._store = dist.distributed_c10d._get_default_store()
        self._counts: Counter[Place] = Counter()

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
        try:
            self._compare(own)
        except dist.DistError:
            return
        self.look_back()

    def _compare(self, own: Asked) -> None:
        counts = [(lane, sorted(ranks), count) for (lane, ranks), count in self._counts.items()]
        note = [own.lane, own.number, own.what, own.size, sorted(own.ranks), counts]
        self._store.set(self._key(self._rank), json.dumps(note))
        for rank in sorted(own.ranks - {self._rank}):
            if not self._store.check([self._key(rank)]):
                continue
            lane, number, what, size, ranks, counts = json.loads(self._store.get(self._key(rank)))
            other = Asked(lane, number, what, size, frozenset(ranks))
            its_counts = {(lane, frozenset(ranks)): count for lane, ranks, count in counts}
            is_another = (own.place, own.number) == (other.place, number) and (own.what, own.size) != (what, size)
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
                    "Let all ranks run the same units in the same order while parameters are sharded: no evaluation, "
                    "`generate()` or other forward on some ranks only (`if rank == 0:`), and one seed for what chooses "
                    "layers, as LayerDrop does. Or keep parameters whole with `params='none'`.",
                )

    def look_back(self) -> None:
        """Say what another rank has found.

        Raises:
            LifecycleError: Ranks have parted.
        """
        try:
            found = self._store.get(self._key("parted")) if self._store.check([self._key("parted")]) else None
        except dist.DistError:  # the rank that held the store has left; nobody knows more
            return
        if found is not None:
            raise LifecycleError(found.decode())

    def _key(self, of: int | str) -> str:
        return f"mics/waits/{self._name}/{of}"
