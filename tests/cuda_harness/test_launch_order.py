"""Is a circle of waiting collectives found, and nothing else?"""

from random import Random

from tests.cuda_harness.launch_order import (
    Group,
    Launch,
    Node,
    find_circle,
    find_mismatch,
    find_stall,
    most_at_once,
)

SUM, ACROSS = "sum", "across"


class Rank:
    """Launches of one rank, each behind the last one of its stream."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._last: dict[str, Node] = {}
        self._counts: dict[Group, int] = {}

    def launch(self, stream: str, group: Group, label: str) -> None:
        self._counts[group] = self._counts.get(group, 0) + 1
        node = group, self._counts[group]
        behind = (self._last[stream],) if stream in self._last else ()
        self._last[stream] = node
        self.launches.append(Launch(node, label, behind))


def job(second_stream: str) -> list[list[Launch]]:
    """Two nodes of two ranks. Ranks 0 and 3 start the second hop before the next sum, ranks 1 and 2 behind it."""
    ranks = [Rank() for _ in range(4)]
    for number, rank in enumerate(ranks):
        node, across = (SUM, (0, 1) if number < 2 else (2, 3)), (ACROSS, (number % 2, number % 2 + 2))
        rank.launch("reduce", node, "layer 2")
        if number in (0, 3):
            rank.launch(second_stream, across, "layer 2")
            rank.launch("reduce", node, "layer 1")
        else:
            rank.launch("reduce", node, "layer 1")
            rank.launch(second_stream, across, "layer 2")
    return [rank.launches for rank in ranks]


def test_one_stream_in_two_orders_is_a_deadlock() -> None:
    circle = find_circle(job("reduce"))
    assert len(circle) == 4
    assert "layer 2, number 1 of across over ranks [0, 2]" in circle


def test_streams_of_their_own_are_none() -> None:
    assert find_circle(job("second hop")) == []


def test_with_launches_that_block_they_are_one() -> None:
    assert len(find_circle(job("second hop"), blocking=True)) == 4


def test_ranks_in_one_order_are_none_even_then() -> None:
    launches = job("reduce")[1]
    assert find_circle([launches, launches], blocking=True) == []


def test_another_collective_of_the_same_number_is_a_mismatch() -> None:
    one, other = Rank(), Rank()
    one.launch("s", (SUM, (0, 1)), "8 elements")
    other.launch("s", (SUM, (0, 1)), "9 elements")
    assert find_mismatch([one.launches, one.launches]) == ""
    assert "rank 0 launched `8 elements`, rank 1 `9 elements`" in find_mismatch([one.launches, other.launches])


def test_one_that_a_rank_lacks_is_a_mismatch() -> None:
    one = Rank()
    one.launch("s", (SUM, (0, 1)), "8 elements")
    assert "launches by rank {0: 1}" in find_mismatch([one.launches, []])


def side_by_side(num_streams: int) -> list[list[Launch]]:
    """Four ranks with two sums on each of so many streams."""
    ranks = [Rank() for _ in range(4)]
    for rank in ranks:
        for stream in 2 * [f"stream {index}" for index in range(num_streams)]:
            rank.launch(stream, (stream, (0, 1, 2, 3)), "layer")
    return [rank.launches for rank in ranks]


def stalls(launches: list[list[Launch]], num_slots: int) -> bool:
    return any(find_stall(launches, num_slots, Random(seed)) for seed in range(200))


def test_as_many_collectives_are_on_the_device_at_once_as_streams_have_them() -> None:
    assert [most_at_once(side_by_side(count)[0]) for count in (1, 3, 4)] == [1, 3, 4]
    assert most_at_once(job("reduce")[0]) == 1
    assert most_at_once(job("second hop")[0]) == 2


def test_ranks_stall_where_fewer_collectives_have_room_than_are_ready() -> None:
    """Each of four ranks may have started another three of four collectives."""
    assert stalls(side_by_side(4), 3)
    assert not stalls(side_by_side(4), 4)
    assert not stalls(side_by_side(1), 1)


def test_a_stall_names_what_holds_the_device() -> None:
    found = next(filter(None, (find_stall(side_by_side(2), 1, Random(seed)) for seed in range(200))))
    assert len(found) == 4
    assert {line.partition(" over ")[0] for line in found} == {f"layer, number 1 of stream {i}" for i in range(2)}
