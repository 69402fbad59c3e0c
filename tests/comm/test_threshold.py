"""Is the threshold the one that the timings speak for?"""

import pytest

from mics_strategy.comm.route import NEVER
from mics_strategy.tuning.threshold import (
    FLAT,
    HIERARCHICAL,
    POINT_TO_POINT_SIZES_BYTES,
    RUNS,
    SIZES_BYTES,
    SizeTiming,
    is_next_affordable,
    threshold_bytes,
)


def timings(two_stages_win: str) -> list[SizeTiming]:
    """Of sizes 1000, 2000, ...: + where two stages are faster, - where they are slower, = where it is not plain."""
    winner = {"+": HIERARCHICAL, "-": FLAT, "=": ""}
    return [SizeTiming(1000 * (place + 1), 1e-3, 1e-3, winner[mark]) for place, mark in enumerate(two_stages_win)]


@pytest.mark.parametrize(
    ("two_stages_win", "expected"),
    [
        ("++++", 0),  # always
        ("====", 0),
        ("-+++", 2000),
        ("--=+", 3000),
        ("+-++", 0),  # they cross twice: by chance, as latency counts for less the larger the size
        ("-+-+", 2000),
        ("---+", 4000),
        ("----", 4001),  # never where it was measured; beyond that, two stages
        ("+++-", 0),
        ("+", 0),
        ("-", 1001),
        ("", 0),
    ],
)
def test_two_stages_begin_where_the_direct_way_is_no_longer_plainly_faster(two_stages_win: str, expected: int) -> None:
    assert threshold_bytes(timings(two_stages_win), flat_in_doubt=False) == expected


@pytest.mark.parametrize(
    ("two_stages_win", "expected"),
    [
        ("++++", 1000),
        ("====", NEVER),
        ("-+++", 2000),
        ("--=+", 4000),
        ("+-++", 3000),
        ("+++=", NEVER),  # larger tensors than these are as the largest of them
        ("+++-", NEVER),
        ("", NEVER),
    ],
)
def test_where_a_ring_sends_as_little_two_stages_have_to_be_plainly_faster(two_stages_win: str, expected: int) -> None:
    assert threshold_bytes(timings(two_stages_win), flat_in_doubt=True) == expected


def test_the_first_size_is_always_measured() -> None:
    assert is_next_affordable([], 1)


@pytest.mark.parametrize("num_in_a_row", [1, 4])
def test_latency_does_not_stop_the_sizes_from_growing(num_in_a_row: int) -> None:
    """4 sizes of 2 * 6 runs of 8 ms are 0.384 s; 5 would be too many."""
    one_s = 8e-3 / num_in_a_row
    slow = [SizeTiming(size_bytes, one_s, one_s, "") for size_bytes in POINT_TO_POINT_SIZES_BYTES]
    affordable = [is_next_affordable(slow[:count], num_in_a_row) for count in range(1, 6)]
    assert affordable == [True, True, True, False, False]


@pytest.mark.parametrize(("node_bytes_per_s", "largest_mib"), [(400e9, 256), (50e9, 256), (12.5e9, 64)])
def test_nccl_is_measured_up_to_sizes_that_its_links_carry_in_time(node_bytes_per_s: float, largest_mib: int) -> None:
    """A ring over 2 nodes of 8 GPUs with 450 GB/s inside, where stages take the time of both links after each other."""
    timings = list[SizeTiming]()
    for full_bytes in SIZES_BYTES:
        if is_next_affordable(timings, 4):
            between_s, inside_s = full_bytes / 2 / node_bytes_per_s, full_bytes * 7 / 8 / 450e9
            flat_s, hierarchical_s = 60e-6 + max(2 * between_s, inside_s), 90e-6 + between_s + inside_s
            timings.append(SizeTiming(full_bytes, flat_s, hierarchical_s, ""))
    assert 4 * RUNS * sum(timing.flat_s + timing.hierarchical_s for timing in timings) < 0.4
    assert timings[-1].full_bytes == largest_mib * 2**20


@pytest.mark.parametrize("which", ["flat_s", "hierarchical_s"])
def test_sizes_stop_growing_before_the_slower_way_takes_long(which: str) -> None:
    """From 1 to 3 ms, the next would take 3 + 4 * 2 ms; from 5 to 14 ms, 14 + 4 * 9 ms, 6 times."""

    def both(*milliseconds: int) -> list[SizeTiming]:
        fast = {"flat_s": 1e-3, "hierarchical_s": 1e-3, "winner": ""}
        return [SizeTiming(1024, **(fast | {which: 1e-3 * number})) for number in milliseconds]

    assert is_next_affordable(both(1, 3), 1)
    assert not is_next_affordable(both(5, 14), 1)


@pytest.mark.parametrize("rate_mbit", [10, 100, 1000, 10_000])
@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_a_gather_and_a_sum_are_measured_within_a_second(per_node: int, rate_mbit: int) -> None:
    """On 2 nodes: directly, each rank of a node sends its share to each rank of the other."""
    bytes_per_s, latency_s, timings = 1e6 * rate_mbit / 8, 1e-3, list[SizeTiming]()
    for full_bytes in POINT_TO_POINT_SIZES_BYTES:
        if is_next_affordable(timings, 1):
            flat_s = per_node / 2 * full_bytes / bytes_per_s + latency_s
            hierarchical_s = full_bytes / 2 / bytes_per_s + 3 * latency_s
            timings.append(
                SizeTiming(full_bytes, flat_s, hierarchical_s, FLAT if flat_s < hierarchical_s else HIERARCHICAL)
            )
    assert 2 * RUNS * sum(timing.flat_s + timing.hierarchical_s for timing in timings) < 1.0
    assert timings[-1].hierarchical_s < timings[-1].flat_s or len(timings) == len(
        POINT_TO_POINT_SIZES_BYTES
    )  # it saw them cross
