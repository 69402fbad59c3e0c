"""Is the floor the critical path?"""

import pytest

from benchmarks.floor import floor_s, own_floor_s, second_hop_bytes


@pytest.mark.parametrize(("nodes", "expected"), [(1, 0.0), (2, 100.0), (4, 150.0)])
def test_a_node_sends_what_a_ring_sends(nodes: int, expected: float) -> None:
    assert second_hop_bytes(100, nodes) == expected


def test_a_short_second_hop_hides_behind_the_last_micro_step() -> None:
    assert floor_s(micro_step_s=2.0, num_micro_steps=4, hop_bytes=10, link_bytes_per_s=10) == 8.0


def test_a_long_second_hop_hides_the_last_micro_step() -> None:
    assert floor_s(micro_step_s=2.0, num_micro_steps=4, hop_bytes=50, link_bytes_per_s=10) == 3 * 2.0 + 5.0


def test_without_accumulation_only_the_longer_one_counts() -> None:
    assert floor_s(micro_step_s=2.0, num_micro_steps=1, hop_bytes=50, link_bytes_per_s=10) == 5.0


@pytest.mark.parametrize(
    ("sent_bytes", "last_bytes", "expected"),
    [(50, 50, 3 * 2.0 + 5.0), (120, 50, 12.0), (30, 0, 8.0)],
    ids=["all at the end", "the link is busy throughout", "all hidden"],
)
def test_the_own_floor_takes_the_bytes_of_the_plan(sent_bytes: float, last_bytes: float, expected: float) -> None:
    found = own_floor_s(
        micro_step_s=2.0, num_micro_steps=4, sent_bytes=sent_bytes, last_bytes=last_bytes, link_bytes_per_s=10
    )
    assert found == expected
