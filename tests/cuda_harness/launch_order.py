"""Can the collectives of all ranks wait for one another in a circle? Pure: knows no torch.

A collective ends when all its ranks have started it. On each rank it starts after those that its stream waits for. A
circle of such waits over all ranks is a deadlock on every run, whatever the times: NCCL's kernels never give way.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

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


def most_at_once(launches: Sequence[Launch]) -> int:
    """The most collectives of one rank of which nothing orders any two: so many may be on the device at once.

    By Dilworth's theorem these are as many as the chains that hold all collectives, that is all but those which a
    largest matching puts behind another one.
    """
    before: dict[Node, set[Node]] = {}
    for launch in launches:
        before[launch.node] = set(launch.behind).union(*(before[node] for node in launch.behind))
    next_of: dict[Node, Node] = {}  # in its chain

    def is_put_behind(node: Node, tried: set[Node]) -> bool:
        for other in before[node] - tried:
            tried.add(other)
            if other not in next_of or is_put_behind(next_of[other], tried):
                next_of[other] = node
                return True
        return False

    return len(before) - sum(is_put_behind(node, set()) for node in before)


def find_stall(by_rank: Sequence[Sequence[Launch]], num_slots: int, random: Random) -> list[str]:
    """Start collectives in a random order; those that hold all slots of ranks where nothing goes on any more.

    Empty where all collectives end. Each rank has room for so many: a kernel that has started keeps its slot until all
    its ranks have started it. Which of those that are ready starts first is up to the device.

    Args:
        by_rank: Launches of each rank, in the order of its host.
        num_slots: Collectives that fit on one device at once.
        random: Decides what starts.
    """
    queues: list[dict[Group, deque[Launch]]] = [{} for _ in by_rank]
    for of_rank, launches in zip(queues, by_rank, strict=True):
        for launch in launches:
            of_rank.setdefault(launch.node[0], deque()).append(launch)
    resident: list[dict[Node, str]] = [{} for _ in by_rank]
    ended: set[Node] = set()
    while any(queue for of_rank in queues for queue in of_rank.values()) or any(resident):
        ready = [
            (rank, queue)
            for rank, of_rank in enumerate(queues)
            for queue in of_rank.values()
            if queue and len(resident[rank]) < num_slots and ended.issuperset(queue[0].behind)
        ]
        if not ready:
            return [f"{label}, {_words(node)}" for started in resident for node, label in started.items()]
        rank, queue = random.choice(ready)
        launch = queue.popleft()
        node, ranks = launch.node, launch.node[0][1]
        resident[rank][node] = launch.label
        if all(node in resident[other] for other in ranks):
            ended.add(node)
            for other in ranks:
                del resident[other][node]
    return []


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
