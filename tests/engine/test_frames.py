"""A collective is at most eleven of our frames away from the hook that starts it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.transport import BackendTransport, GlooTransport
from tests.cuda_harness.runs import config_of, declared, run
from tests.ranks import RankContext, RankPool

MAX_FRAMES = 11  # FSDP2 (torch 2.13) has 5 to the wire; two stages, codecs, queues and lazy second hops cost the rest
WIRE = (  # the methods in comm/transport.py that call torch.distributed
    *("reduce_scatter", "all_reduce", "send", "recv"),
    *("all_gather_coalesced", "reduce_scatter_coalesced"),
)
HOOKS = ("hooks.py:", "step.py:", "queue.py:_run_queue")  # where a step, or the thread of a queue, begins


@contextmanager
def stacks_to_the_wire() -> Iterator[list[list[str]]]:
    """Our frames at every call of the transport, innermost first.

    Also at every submission to a thread.

    Comprehensions are no frames from Python 3.12 on and are left out.
    """
    stacks: list[list[str]] = []

    def stack_of(innermost: FrameType) -> list[str]:
        stack: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None:
            folder, _, file = frame.f_code.co_filename.rpartition("/")
            if "/mics_strategy" not in folder and "torch/_functorch" not in folder and file != "contextlib.py":
                break
            if "/mics_strategy" in folder and frame.f_code.co_name != "<listcomp>":
                stack.append(f"{file}:{frame.f_code.co_name}")
            frame = frame.f_back
        return stack

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        file = code.co_filename.rpartition("comm/")[2]
        names = {"transport.py": WIRE, "queue.py": ("submit",)}.get(file, ())
        starts = (file, code.co_qualname) == ("work.py", "Launch.wait")  # starts what it waits for
        if event == "call" and (starts or code.co_name in names):
            stack = stack_of(frame)
            if any(entry.startswith(HOOKS) for entry in stack):
                stacks.append(stack)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield stacks
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_the_counted_methods_exist() -> None:
    classes = (GlooTransport, BackendTransport)
    assert all(any(callable(getattr(kind, name, None)) for kind in classes) for name in WIRE)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "zero3", "zeropp-hpz", "zero1", "ddp", "paro-iig"])
def test_on_a_gpu_every_collective_is_near_its_hook(preset: str) -> None:
    with stacks_to_the_wire() as stacks:
        run(config_of(preset), declared)
    kinds = {stack[0] for stack in stacks}
    assert "work.py:wait" in kinds
    assert kinds & {"transport.py:reduce_scatter", "transport.py:all_reduce"}
    deepest = max(stacks, key=len)
    assert len(deepest) <= MAX_FRAMES, deepest


def stacks_on_gloo(ctx: RankContext, preset: str) -> list[list[str]]:
    with stacks_to_the_wire() as stacks:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), hierarchical=True)
        shard(model, config, units=[nn.Linear])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return stacks


@pytest.mark.parametrize("preset", ["mics", "zero3", "zero1"])
def test_on_gloo_hook_and_thread_are_near_the_wire(ranks: RankPool, preset: str) -> None:
    for stacks in ranks(4, stacks_on_gloo, preset, ranks_per_node=2):
        in_thread = [stack for stack in stacks if stack[-1] == "queue.py:_run_queue"]
        in_hooks = [stack for stack in stacks if stack[-1].startswith(("hooks.py:", "step.py:"))]
        assert in_thread
        assert in_hooks
        deepest = max(stacks, key=len)
        assert len(deepest) <= MAX_FRAMES, deepest
