"""Is the threshold the one that the timings speak for?"""

import pytest

from mics_strategy.collectives.crossover import SIZES_BYTES, Timing, is_next_too_long, threshold_bytes


def timings(two_stages_win: str) -> list[Timing]:
    """Of sizes 1000, 2000, ...: with + where two stages are faster, - where they are slower, = where neither is."""
    direct_s = {"+": 2e-3, "-": 0.5e-3, "=": 1e-3}
    return [Timing(1000 * (place + 1), direct_s[mark], 1e-3) for place, mark in enumerate(two_stages_win)]


@pytest.mark.parametrize(
    ("two_stages_win", "expected"),
    [
        ("++++", 0),  # always
        ("====", 0),
        ("-+++", 2000),
        ("--=+", 3000),
        ("+-++", 3000),  # they cross twice: what counts is that no larger size speaks against it
        ("-+-+", 4000),
        ("---+", 4000),
        ("----", 4001),  # never where it was measured; beyond that, two stages
        ("+++-", 4001),
        ("+", 0),
        ("-", 1001),
        ("", 0),
    ],
)
def test_two_stages_begin_where_no_larger_size_speaks_against_them(two_stages_win: str, expected: int) -> None:
    assert threshold_bytes(timings(two_stages_win)) == expected


def test_sizes_stop_growing_before_a_run_takes_long() -> None:
    assert not is_next_too_long(Timing(1024, 0.012, 0.001))
    assert is_next_too_long(Timing(1024, 0.013, 0.001))
    assert is_next_too_long(Timing(1024, 0.001, 0.013))


@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_a_calibration_takes_about_a_second_on_links_of_100_mbit(per_node: int) -> None:
    """Of a gather and a sum on 2 nodes: directly, each rank of a node sends its share to each rank of the other."""
    bytes_per_s, latency_s, total_s = 100e6 / 8, 1e-3, 0.0
    for full_bytes in SIZES_BYTES:
        direct_s = per_node / 2 * full_bytes / bytes_per_s + latency_s
        two_stages_s = full_bytes / 2 / bytes_per_s + 3 * latency_s
        total_s += 2 * 6 * (direct_s + two_stages_s)
        if is_next_too_long(Timing(full_bytes, direct_s, two_stages_s)):
            break
    assert total_s < 1.2
