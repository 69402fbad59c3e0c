"""Side streams: chains of collectives that overlap with compute.

An `OpChain` is a sequence of ops of which each needs the one before, for example a param sync and the all-gather
behind it. All are submitted at once, in order. On CUDA they run on a side stream, ordered by events, and the host does
not wait for them. On the CPU the threads of `comm/queue.py` run their collectives, one thread for each kind, while
Python computes; what follows a collective runs where it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from mics_strategy.comm.ranges import RecordedCollective
from mics_strategy.comm.work import QueuedWork, Work
from mics_strategy.scopes import Scopes

Op = Callable[[], Work | None]
_NOTHING = nullcontext()

# [Note: Who waits for what on CUDA]
#
#     current stream   forward 0 ......... | forward 1 ......... | forward 2
#                        |launch             ^ wait
#                        v wait_stream       | event
#     all_gather         [gather 1 copy-in, NCCL, copy-out]--+ [gather 2 ...
#
# 1. A chain starts behind everything on the current stream (`wait_stream`), because it may overwrite a slot that
#    kernels there still read, and behind the other streams that have used the slot (`Slot.users`). So a gather must be
#    launched before the forward under which it shall run, and its slot must be free then: `Engine._free_to_prefetch`.
#    A second hop starts behind the first hops instead.
# 2. Whoever needs the result waits for the chain's event, on its own stream: the host goes on. It might free gradients
#    that a chain still reads, so the chain keeps them alive until somebody has waited (`_keepalive`); all other memory
#    is permanent. The one wait of the host in a step is for the small all-reduce of the step before (`RankAgreement`).
# 3. Nothing asks what has completed: a rank that acted on it would launch in another order than its peers, and NCCL
#    would wait for ever.
# 4. With codecs, the part of a chain before its first collective runs on the encoding stream, which waits for the
#    streams of 1. alone. The rest waits for it, and for what is on the side stream already.


class OpChain:
    """Ops submitted to one stream, in flight until `wait`.

    Args:
        finish: Local work after the last op; None for none.
        is_hidden: Whether its own waits are on a side stream, where they hold up no computation.

    Attributes:
        streams: The stream of CUDA on which it runs.
        queued: Tasks of communication threads that run its collectives.
        users: Streams that have waited for the event.
        is_done: Whether a caller has waited.
    """

    def __init__(self, finish: Callable[[], None] | None = None, *, is_hidden: bool = False) -> None:
        self._works: list[Work] = []
        self._is_hidden = is_hidden
        self._recorded: RecordedCollective | None = None  # the last one; who waits for the chain waits for it
        self._finish = finish
        self._done: torch.cuda.Event | None = None
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.queued: list[QueuedWork] = []
        self.users: set[torch.cuda.Stream] = set()
        self._keepalive: list[torch.Tensor] = []  # tensors that the device may still read after the host has gone on
        self.is_done = False

    def add(self, work: Work | None) -> None:
        """Append the work of an op; unless a thread runs it, wait for it."""
        if work is None:
            return
        self._keepalive += work.keepalive
        if self._is_hidden and work.recorded is not None:
            self._recorded, work.recorded = work.recorded, None
        if work.queued is not None:
            self._works.append(work)
            self.queued.append(work.queued)
        else:
            work.wait()

    def record(self, stream: torch.cuda.Stream) -> None:
        """Finish on `stream`, the current one; record the event for other streams."""
        self._complete()
        self.streams = (stream,)
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> None:
        """Make all results valid on the current stream of the device; on the CPU, now.

        A second call does nothing, except on CUDA where another stream is current than before.
        """
        if self._done is not None:
            if self._recorded is not None:
                self._recorded.begin_wait()
            stream = torch.cuda.current_stream(self.streams[0].device)
            if stream not in self.users:
                stream.wait_event(self._done)
                self.users.add(stream)
            self.is_done = True
            if self._recorded is not None:
                self._recorded.end_wait()
        elif not self.is_done:
            self.is_done = True
            self._complete()
        self._keepalive.clear()  # a new user of that memory writes behind the event

    def _complete(self) -> None:
        works, self._works = self._works, []
        finish, self._finish = self._finish, None
        for work in works:
            work.wait()
        if finish is not None:
            finish()


class OpStream:
    """A side stream for one kind of collective; on the CPU it submits to the queue of that kind.

    What a chain does before its first collective is sent may run on a stream of its own: then one chain is encoded
    while the one before it is on the wire.

    Args:
        device: Device of the model.
        priority: CUDA priority; lower numbers run first.
        encodes_ahead: Whether there is such a stream.
    """

    def __init__(self, device: torch.device, priority: int = 0, *, encodes_ahead: bool = False) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=priority) if is_cuda else None
        self._encoding = torch.cuda.Stream(device, priority=priority) if is_cuda and encodes_ahead else None

    def launch(
        self,
        ops: Iterable[Op],
        finish: Callable[[], None] | None = None,
        *,
        behind: Iterable[torch.cuda.Stream] = (),
        and_current: bool = True,
    ) -> OpChain:
        """Submit a chain behind the present work of the current stream.

        Args:
            ops: Each starts a collective, or does local work and returns None.
            finish: Local work after the last op.
            behind: Other streams of CUDA whose present work comes first as well.
            and_current: Whether that of the current stream does.
        """
        stream, remaining = self._stream, iter(ops)
        chain = OpChain(finish, is_hidden=stream is not None)
        if stream is None:
            for op in remaining:
                chain.add(op())
            return chain
        first = self._encoding or stream
        for before in {*behind, torch.cuda.current_stream(stream.device)} if and_current else behind:
            first.wait_stream(before)
        started: Work | None = None
        if self._encoding is not None:
            with torch.cuda.stream(self._encoding):
                started = next((work for op in remaining if (work := op()) is not None), None)
            stream.wait_stream(self._encoding)
        with torch.cuda.stream(stream):
            chain.add(started)
            for op in remaining:
                chain.add(op())
            chain.record(stream)
        return chain


class Streams:
    """The side streams of one model.

    First and second hops have streams of their own: ranks may start the first hop of one unit and the second hop of
    another in different orders, and on one stream such ranks would wait for each other forever.

    Args:
        device: Device of the model.
        scopes: Scopes and codecs of the model.

    Attributes:
        all_gather: Stream of parameters. Its copies and NCCL's kernels go before those of the computation, which
            waits for them soon.
        reduce_scatter: Stream of first hops, of the same priority.
        second_hop: Stream of second hops, for which nothing waits before the step.
    """

    def __init__(self, device: torch.device, scopes: Scopes) -> None:
        self.all_gather = OpStream(device, priority=-1, encodes_ahead=scopes.has_quantized_params)
        self.reduce_scatter = OpStream(device, priority=-1, encodes_ahead=scopes.is_quantized("grad_reduce_scatter"))
        self.second_hop = OpStream(
            device, encodes_ahead=scopes.is_quantized("second_hop_reduce_scatter", "second_hop_all_reduce")
        )


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream of a device; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def order_behind(streams: Iterable[torch.cuda.Stream], tensors: Iterable[torch.Tensor]) -> None:
    """Let the current stream read tensors that other streams have written.

    The allocator keeps their memory until the current stream has read them.
    """
    tensors = list(tensors)
    for stream in streams:
        current = torch.cuda.current_stream(stream.device)
        if current != stream:
            current.wait_stream(stream)
            for tensor in tensors:
                tensor.record_stream(current)


def outside_transforms() -> AbstractContextManager[object]:
    """A context in which `torch.func` does not transform the engine's own tensors."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    return temporarily_clear_interpreter_stack()
