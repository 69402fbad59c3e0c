"""Does a rank wait for something that will never come?

Ranks that were asked for different transfers wait for each other in vain. A rank that has waited for some seconds leaves
a note of what it waits for in the store of the job and reads the notes of the others; where two wait for different
things in the same place of the same lane, both know, long before the timeout of the process group.
"""

from __future__ import annotations

import torch.distributed as dist

from mics_strategy.errors import LifecycleError


class Watch:
    """The notes of one lane.

    Args:
        lane: Its name.
        rank: Of this process.
        world_size: Of the job.
    """

    def __init__(self, lane: str, rank: int, world_size: int) -> None:
        self._lane = lane
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._store = dist.distributed_c10d._get_default_store()
        self._left: str | None = None

    def look(self, number: int, what: str) -> None:
        """Leave a note, and read those of the others.

        Args:
            number: Of the transfer, in the order in which the lane was asked.
            what: It moves.

        Raises:
            LifecycleError: Another rank waits, as that number, for something else.
        """
        what = what.split(" over ")[0]
        if self._left != (note := f"{number} {what}"):
            self._store.set(self._key(self._rank), note)
            self._left = note
        for other in self._others:
            if not self._store.check([self._key(other)]):
                continue
            its_number, _, its_what = self._store.get(self._key(other)).decode().partition(" ")
            if int(its_number) == number and its_what != what:
                raise LifecycleError(
                    f"As transfer {number} of its {self._lane} lane, rank {self._rank} waits for the {what.lower()} and "
                    f"rank {other} for the {its_what.lower()}: they will never come. Let all ranks run the same units "
                    "in the same order while parameters are sharded (seed what chooses them, as LayerDrop does, "
                    "alike), or keep parameters whole with `params='none'`."
                )

    def _key(self, rank: int) -> str:
        return f"mics/waits/{self._lane}/{rank}"
