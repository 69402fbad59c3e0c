"""A process that was only busy is no longer lost when it has arrived with the others."""

import time
from datetime import timedelta

import torch.distributed as dist

from mics_strategy.recovery.membership import LossPolicy, Membership
from mics_strategy.recovery.peer_sockets import PeerSockets


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
