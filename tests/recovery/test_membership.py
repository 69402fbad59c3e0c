"""What processes know of one another: who was only busy, and whether a training has ended."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mics_strategy import CommunicationError
from mics_strategy.recovery.membership import LossPolicy, Membership, Silence
from mics_strategy.recovery.peer_sockets import PeerSockets


def memberships(count: int) -> list[Membership]:
    """Those of a job of one process each, in this process."""
    store, members = dist.HashStore(), [*range(count)]
    sockets = [PeerSockets(number, None) for number in members]
    addresses = {number: own.address for number, own in enumerate(sockets)}
    policy = LossPolicy(block=1, lost_after_s=2.0, timeout=timedelta(seconds=60))
    found = []
    for number, own in enumerate(sockets):
        own.connect(addresses, "job")
        found.append(Membership(number, members, 0, store, own, policy))
    return found


def test_a_training_has_ended_for_all_where_one_process_has_seen_that_all_reached_the_end() -> None:
    """The first one ends; the second notices that the third has died, before it looks at the end."""
    first, second, third = memberships(3)
    ending = threading.Thread(target=third.end_together)
    ending.start()
    second._store.set("end/0/1", "")
    first.end_together()
    assert second._store.get("beat/0").endswith(b" 1")  # now, and not with the next heartbeat
    ending.join()
    first.close()
    third.close()
    second.fail(0)
    assert second.agree().commits == 1
    second.close()


def test_a_training_has_not_ended_where_one_process_has_not_reached_the_end() -> None:
    first, second = memberships(2)
    second.close()
    with pytest.raises(CommunicationError, match="waited for the end of the training"):
        first.end_together()
    first.fail(0)
    agreement = first.agree()
    assert (agreement.commits, agreement.lost, agreement.members) == (0, [1], [0])
    first.close()


def test_the_first_process_which_may_hold_the_store_leaves_as_the_last_one() -> None:
    first, second = memberships(2)
    second._store.set("end/0/1", "")
    ending = threading.Thread(target=first.end_together)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    second.end_together()
    ending.join(10.0)
    assert not ending.is_alive()
    first.close()
    second.close()


def test_a_process_that_died_before_its_first_heartbeat_is_silent() -> None:
    silence = Silence(dist.HashStore())  # a `get` would wait
    silence.of(7)
    time.sleep(0.05)
    assert silence.of(7) >= 0.05
    assert silence.commits_of(7) == 0


def test_a_process_that_was_silent_counts_in_the_next_generation() -> None:
    store = dist.HashStore()
    store.set("beat/1", "0 0")
    policy = LossPolicy(block=1, lost_after_s=0.3, timeout=timedelta(seconds=5))
    membership = Membership(0, [0, 1], 0, store, PeerSockets(0, None), policy)
    deadline_s = time.monotonic() + 20.0
    while not membership.has_failed and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert membership.lacks_members, "process 1 is silent"
    membership.begin([0, 1], 1)
    assert not membership.lacks_members
    membership.close()
