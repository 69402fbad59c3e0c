"""A sharded model without references is freed, with its memory and process groups."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch

from mics_strategy import ShardConfig, Topology
from tests import models
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankPool


def is_freed_after_training(ctx: RankContext, preset: str) -> bool:
    training = start(
        ctx, Run(case=models.transformer, config=ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)))
    )
    for step in range(2):
        training.backward(step)
        training.sharded.clip_grad_norm_(1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
    watched = [weakref.ref(training.sharded), weakref.ref(training.sharded.internals.units[1])]
    del training
    gc.collect()
    return all(reference() is None for reference in watched)


def test_a_model_is_freed_with_its_last_reference(ranks: RankPool) -> None:
    for preset in ("mics", "zero3", "ddp", "paro-iig"):
        assert ranks(4, is_freed_after_training, preset) == [True] * 4, preset


def threads_after_a_job(ctx: RankContext, expected: list[int]) -> int:
    """Job: threads of this process, as soon as they are not more than expected; gloo's end a while after a group."""
    for thread in threading.enumerate():
        if thread.name == "watch of calls":  # lives for a while after the last call
            thread.join()
    deadline = time.monotonic() + 20.0
    while (count := len(os.listdir("/proc/self/task"))) > expected[ctx.rank] and time.monotonic() < deadline:
        time.sleep(0.1)
    return count


def train_once(ctx: RankContext) -> None:
    is_freed_after_training(ctx, "mics")
    torch.nn.utils.get_total_norm([torch.ones(2)])


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="a cache of torch before 2.13 keeps meshes and cannot be emptied"
)
def test_jobs_leave_no_threads_of_process_groups(ranks: RankPool) -> None:
    ranks(4, train_once)
    before = ranks(4, threads_after_a_job, [1000] * 4)
    for _ in range(3):
        ranks(4, train_once)
    after = ranks(4, threads_after_a_job, before)
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
