"""What may run at the same time?

A `Chain` is a sequence of collectives of which each needs the one before (update, then gather). All are asked for at
once, in this order: on the CPU a lane's thread works them off while Python computes, on CUDA they are put on a side
stream, ordered by events, and the host never blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from mics_strategy.comm.work import Work

Op = Callable[[], Work | None]
P = ParamSpec("P")
R = TypeVar("R")


class OpChain:
    """Collectives one after the other.

    Args:
        stages: Each starts a collective, or does local work and returns None.
        finish: Local work after the last.
        stream: Where a CUDA chain runs; None on the CPU.
    """

    def __init__(
        self, stages: list[Op], finish: Callable[[], None] | None = None, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._handles: list[Work] = []
        self._finish = finish
        self._device = stream.device if stream is not None else None
        self._done: torch.cuda.Event | None = None
        self._ordered: set[torch.cuda.Stream] = set()  # streams that have waited for the event
        self._keepalive: list[torch.Tensor] = []  # what the device still reads when the host has gone on
        self.is_done = False
        if stream is None:
            self._start(stages)
        else:
            self._run_on(stream, stages)

    def _start(self, stages: list[Op]) -> None:
        for stage in stages:
            handle = stage()
            if handle is None:
                continue
            self._keepalive += handle.keepalive
            if handle.is_queued:
                self._handles.append(handle)
            else:
                handle.wait()

    def _drain(self) -> None:
        handles, self._handles = self._handles, []
        finish, self._finish = self._finish, None
        for handle in handles:
            handle.wait()
        if finish is not None:
            finish()

    def _run_on(self, stream: torch.cuda.Stream, stages: list[Op]) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._start(stages)
            self._drain()
            self._done = torch.cuda.Event()
            self._done.record(stream)

    @property
    def has_completed(self) -> bool:
        """Whether `wait` would not block, as far as ranks may act on it.

        Never on CUDA: what is launched on a stream, ranks launch in one order, whatever has arrived where.
        """
        return self._done is None and all(handle.has_completed for handle in self._handles)

    def wait(self) -> None:
        """Make all results valid on the current stream of the chain's device; on the CPU, now.

        Calling it again does nothing, except on CUDA where another stream is current than before.
        """
        if self._done is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream not in self._ordered:
                stream.wait_event(self._done)
                self._ordered.add(stream)
            self.is_done = True
        elif not self.is_done:
            self.is_done = True
            self._drain()
        self._keepalive.clear()  # memory that is used anew now is written behind the event


class Streams:
    """Starts chains where they may overlap with compute.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._gather = torch.cuda.Stream(device) if is_cuda else None
        self._reduce = torch.cuda.Stream(device, priority=-1) if is_cuda else None
        self._second_hop = torch.cuda.Stream(device) if is_cuda else None

    def gather(self, *stages: Op) -> OpChain:
        """Start a chain that brings parameters."""
        return OpChain(list(stages), stream=self._gather)

    def reduce(self, *stages: Op, finish: Callable[[], None] | None = None) -> OpChain:
        """Start a chain that takes gradients away, on a stream of higher priority: no gather delays it."""
        return OpChain(list(stages), finish, self._reduce)

    def second_hop(self, *stages: Op, finish: Callable[[], None]) -> OpChain:
        """Start the second hop of a gradient, on a stream of its own: ranks may start first hops meanwhile.

        On one stream for both hops, ranks that order them differently would wait for one another forever.
        """
        return OpChain(list(stages), finish, self._second_hop)


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """What `function` does with the engine's tensors is no part of what `torch.func` transforms."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return outside
