"""Which ranks share a node, which node has a copy of what another node holds alone.

Ranks share a node where they see the same folder of snapshots. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job.

    Attributes:
        node_of: Number of the node of each rank. Nodes are numbered in the order of their first ranks.
    """

    node_of: tuple[int, ...]

    @classmethod
    def of(cls, folders: Iterable[object]) -> Nodes:
        """Number the nodes.

        Args:
            folders: Identity of each rank's folder.
        """
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(folder, len(numbers)) for folder in folders))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len({*self.node_of})

    def ranks(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, other in enumerate(self.node_of) if other == node]

    def peers(self, rank: int) -> list[int]:
        """The ranks of a rank's node, its own included."""
        return self.ranks(self.node_of[rank])

    def is_leader(self, rank: int) -> bool:
        """Whether a rank is the first of its node, which lists and removes folders there."""
        return self.peers(rank)[0] == rank

    def buddy_of(self, rank: int) -> int | None:
        """The rank of the next node that keeps what only this rank's node holds; None with one node."""
        if self.num_nodes == 1:
            return None
        peers = self.peers(rank)
        others = self.ranks((self.node_of[rank] + 1) % self.num_nodes)
        return others[peers.index(rank) % len(others)]

    def wards_of(self, rank: int) -> list[int]:
        """The ranks whose buddy a rank is."""
        return [other for other in range(len(self.node_of)) if self.buddy_of(other) == rank]

    def local(self, ranks: Sequence[int], rank: int) -> list[int]:
        """Those of some ranks that share a rank's node, in ascending order."""
        return sorted(other for other in ranks if self.node_of[other] == self.node_of[rank])
