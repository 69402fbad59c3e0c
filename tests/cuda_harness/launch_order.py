"""Can the collectives of all ranks wait for one another in a circle? Pure: knows no torch.

A collective ends when all its ranks have started it. On each rank it starts after those that its stream waits for. A
circle of such waits over all ranks is a deadlock on every run, whatever the times: NCCL's kernels never give way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Group = tuple[str, tuple[int, ...]]  # name, ranks in order
Node = tuple[Group, int]  # the n-th collective of a communicator


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective as one rank launched it.

    Attributes:
        node: The same on all ranks that take part.
        label: Operator and size, the same on all ranks that take part.
        behind: Collectives that must have ended on this rank before this one starts.
    """

    node: Node
    label: str
    behind: tuple[Node, ...]


def find_mismatch(by_rank: Sequence[Sequence[Launch]]) -> str:
    """What ranks of one communicator launched differently, in words; empty where nothing is."""
    first_launches: dict[Node, tuple[int, str]] = {}
    counts: dict[Group, dict[int, int]] = {}
    for rank, launches in enumerate(by_rank):
        for launch in launches:
            other, label = first_launches.setdefault(launch.node, (rank, launch.label))
            if label != launch.label:
                return f"{_words(launch.node)}: rank {other} launched `{label}`, rank {rank} `{launch.label}`"
            counts_by_rank = counts.setdefault(launch.node[0], {})
            counts_by_rank[rank] = counts_by_rank.get(rank, 0) + 1
    for group, counts_by_rank in counts.items():
        if len({counts_by_rank.get(rank, 0) for rank in group[1]}) > 1:
            return f"{group[0]} of ranks {list(group[1])}: launches by rank {counts_by_rank}"
    return ""


def find_circle(by_rank: Sequence[Sequence[Launch]], *, blocking: bool = False) -> list[str]:
    """The collectives of a deadlock, each waiting for the one before it; empty where there is none.

    Args:
        by_rank: What each rank launched, in the order of its host.
        blocking: Whether a launch returns only when its kernel has ended, as under CUDA_LAUNCH_BLOCKING=1.
    """
    following: dict[Node, set[Node]] = {}
    names: dict[Node, str] = {}
    for launches in by_rank:
        before: Node | None = None
        for launch in launches:
            names[launch.node] = launch.label
            for node in (*launch.behind, *([before] if blocking and before is not None else [])):
                following.setdefault(node, set()).add(launch.node)
            before = launch.node
    return [f"{names[node]}, {_words(node)}" for node in _circle(following)]


def _circle(following: dict[Node, set[Node]]) -> list[Node]:
    is_done: dict[Node, bool] = {}
    for root in following:
        if root in is_done:
            continue
        path, rest = [root], [iter(following[root])]
        is_done[root] = False
        while path:
            node = next(rest[-1], None)
            if node is None:
                is_done[path.pop()] = True
                rest.pop()
            elif node not in is_done:
                is_done[node] = False
                path.append(node)
                rest.append(iter(following.get(node, ())))
            elif not is_done[node]:
                return path[path.index(node) :]
    return []


def _words(node: Node) -> str:
    (name, ranks), number = node
    return f"number {number} of {name} over ranks {list(ranks)}"
