"""Torch can use the store of a generation as any other one, and waits for no process that is lost."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mics_strategy.recovery.generation_store import GenerationStore


def store_of(*, lacks_members: bool = False, timeout_s: float = 5.0) -> GenerationStore:
    return GenerationStore(dist.HashStore(), lambda: lacks_members, timedelta(seconds=timeout_s))


def test_torch_calls_all_that_it_needs() -> None:
    inner = store_of()
    store = dist.PrefixStore("job", inner)  # calls `inner` from C++
    store.set("key", "value")
    assert [store.check([key]) for key in ("key", "other")] == [True, False]
    assert store.get("key") == b"value"
    assert store.add("count", 2) == 2
    assert store.compare_set("once", "", "first") == b"first"
    assert store.compare_set("once", "", "second") == b"first"
    store.wait(["key", "once"], timedelta(seconds=1))
    store.delete_key("key")
    assert not store.check(["key"])
    threading.Timer(0.05, lambda: inner.set("job/late", "come")).start()
    assert store.get("late") == b"come"


def test_nobody_waits_for_a_process_that_is_lost() -> None:
    inner = store_of(lacks_members=True, timeout_s=60.0)
    with pytest.raises(RuntimeError, match="A process was lost before it set"):
        dist.PrefixStore("job", inner).get("key")


def test_a_wait_ends_after_its_time() -> None:
    inner = store_of(timeout_s=0.05)
    with pytest.raises(dist.DistStoreError, match="No process has set"):
        inner.get("key")
