"""Are accesses ordered by streams, events and the host, and by nothing else?"""

import pytest

from tests.cuda_harness.happens_before import HOST, Orders, Range


class Two:
    """Two streams, and one allocation of the first."""

    def __init__(self) -> None:
        self.orders = Orders()
        self.first, self.second = self.orders.stream("first"), self.orders.stream("second")
        self.memory = self.orders.allocate(self.first)

    def write(self, stream: int, start: int = 0, end: int = 8) -> None:
        self._launch(stream, (start, end), True, "write")

    def read(self, stream: int, start: int = 0, end: int = 8) -> None:
        self._launch(stream, (start, end), False, "read")

    def _launch(self, stream: int, range_: Range, is_write: bool, what: str) -> None:
        self.orders.launch(stream, [(self.memory, range_, is_write)], what)

    def wait(self, waiting: int, waited_for: int) -> None:
        self.orders.wait(waiting, self.orders.record(waited_for))

    @property
    def is_racy(self) -> bool:
        return bool(self.orders.violations)


@pytest.mark.parametrize(("first", "second"), [("write", "read"), ("read", "write"), ("write", "write")])
@pytest.mark.parametrize("waits", [False, True])
def test_two_streams_race_unless_one_waits(first: str, second: str, waits: bool) -> None:
    two = Two()
    getattr(two, first)(two.first)
    if waits:
        two.wait(two.second, two.first)
    getattr(two, second)(two.second)
    assert two.is_racy is not waits


def test_reads_do_not_race() -> None:
    two = Two()
    two.read(two.first)
    two.read(two.second)
    assert not two.is_racy


def test_other_bytes_do_not_race() -> None:
    two = Two()
    two.write(two.first, 0, 4)
    two.write(two.second, 4, 8)
    assert not two.is_racy
    two.read(two.second, 3, 5)
    assert two.is_racy


def test_an_event_orders_what_was_before_it_only() -> None:
    two = Two()
    event = two.orders.record(two.first)
    two.write(two.first)
    two.orders.wait(two.second, event)
    two.read(two.second)
    assert two.is_racy


def test_waiting_goes_through_a_third_stream() -> None:
    two = Two()
    third = two.orders.stream("third")
    two.write(two.first)
    two.wait(third, two.first)
    two.wait(two.second, third)
    two.read(two.second)
    assert not two.is_racy


def test_what_the_host_has_waited_for_is_before_all_that_it_launches() -> None:
    two = Two()
    two.write(two.first)
    two.wait(HOST, two.first)
    two.read(two.second)
    assert not two.is_racy


def test_the_host_writes_too_early_into_what_a_stream_still_reads() -> None:
    two = Two()
    two.write(HOST)
    two.read(two.first)
    assert not two.is_racy
    two.write(HOST)
    assert two.is_racy


def test_a_read_that_is_long_past_for_one_stream_is_remembered_for_another() -> None:
    two = Two()
    two.read(two.first)
    two.write(two.first)
    two.read(two.first)
    two.wait(two.second, two.first)
    two.read(two.first, 0, 1)
    two.write(two.second)
    assert two.is_racy


@pytest.mark.parametrize("waits", [False, True])
def test_memory_is_not_used_again_while_another_stream_uses_it(waits: bool) -> None:
    two = Two()
    two.write(two.first)
    two.wait(two.second, two.first)
    two.read(two.second)
    two.orders.free(two.memory)
    assert not two.is_racy
    if waits:
        two.wait(two.first, two.second)
    two.orders.allocate(two.first)
    assert two.is_racy is not waits


def test_freed_memory_stays_with_its_stream() -> None:
    two = Two()
    two.read(two.second)
    two.orders.free(two.memory)
    two.orders.allocate(two.second)
    assert not two.is_racy


def test_a_report_names_both_sides() -> None:
    two = Two()
    two.write(two.first)
    two.read(two.second)
    assert two.orders.violations == [
        "race: nothing orders the write by write on first before the read by read on second"
    ]
