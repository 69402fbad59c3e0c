"""Ranges of a training step: what one rank does now, for a recording and for other profilers.

The code has its ranges where the work is, as with `record_function`: the engine in the functions of a step and around
optimizer steps, queues and control groups at their collectives. Nothing is measured until something listens: a
recording (`Sharded.profile`), or torch's profiler, which every forward looks for.

A compute row is a list of marks. Each says what begins; what began before has ended then. So the intervals between
marks are disjoint and cover the time, and nothing is the remainder of a sum. What belongs to no mark of the engine, no
wait and no optimizer step is idle time of its own.

On the CPU a mark is a time of the host, and the communication thread of a queue takes the times of its collectives. On
CUDA a mark is a timing event on the stream that is current; all are read after the last recorded step, so that no step
waits for the device. A wait is then the time between the events before and behind `wait_event`, which is 0 for a
collective that has ended before the stream needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from operator import attrgetter
from typing import Any

import torch

from mics_strategy.timeline import COMPUTE_ROW, Category, Interval, PartKey, Row

DATA = PartKey(category=Category.DATA, name="data")
LOSS = PartKey(category=Category.COMPUTE, name="loss")
AFTER_BACKWARD = PartKey(category=Category.IDLE, name="between backward and step")
OPTIMIZER = PartKey(category=Category.OPTIMIZER, name="step")
ENGINE = PartKey(category=Category.IDLE, name="engine")
_profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_enter_range: Callable[[str], Any] = torch.autograd._record_function_with_args_enter  # type: ignore[attr-defined]
_exit_range: Callable[[Any], None] = torch.autograd._record_function_with_args_exit  # type: ignore[attr-defined]
_LOOP = (DATA, LOSS, AFTER_BACKWARD)
NO_RANGE = nullcontext()
Stamp = Any  # of one clock: nanoseconds, or a torch.cuda.Event
OpenRange = tuple[Any, int | None]  # of torch's profiler, of NVTX; None where there is none


class HostClock:
    """Times of the host, for the CPU.

    Args:
        origin_ns: Wall time that counts as 0, the same on all ranks, nanoseconds.
    """

    def __init__(self, origin_ns: int) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns() - origin_ns
        self.stamp: Callable[[], Stamp] = time.perf_counter_ns

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Seconds of wall time since `origin_ns`, for stamps that lie in the past."""
        return [(stamp + self._offset_ns) * 1e-9 for stamp in stamps]


class DeviceClock:
    """Times of a GPU's streams.

    Args:
        device: The GPU.
        origin_ns: See `HostClock`.
    """

    def __init__(self, device: torch.device, origin_ns: int) -> None:
        self._device = device
        self._origin_ns = origin_ns
        self._first = self.stamp()

    def stamp(self) -> Stamp:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """See `HostClock.seconds`. The host waits for the device."""
        last = self.stamp()
        for event in (*stamps, last):
            event.synchronize()
        end_s = (time.time_ns() - self._origin_ns) * 1e-9
        offset_s = end_s - self._first.elapsed_time(last) * 1e-3
        return [offset_s + self._first.elapsed_time(event) * 1e-3 for event in stamps]


def _begin_range(key: PartKey, *, has_nvtx: bool) -> OpenRange | None:
    """Begin a named range for other profilers; None where none would show it.

    torch's profiler runs in some threads only. NVTX ranges are of the process, since autograd's thread ends what the
    main thread has begun.
    """
    is_traced = _profiler_enabled()
    if not (is_traced or has_nvtx):
        return None
    name = f"mics::wait {key}" if key.category is Category.WAIT else f"mics::{key}"
    torch_range = _enter_range(name) if is_traced else None
    return torch_range, torch.cuda.nvtx.range_start(name) if has_nvtx else None


def _end_range(begun: OpenRange | None) -> None:
    """End a range; any thread may, and profilers may have started or ended since."""
    torch_range, nvtx_range = begun or (None, None)
    if torch_range is not None:
        _exit_range(torch_range)
    if nvtx_range is not None:
        torch.cuda.nvtx.range_end(nvtx_range)


class ComputeRow:
    """The compute row of this rank while it is recorded.

    What it does now is a stack. Its bottom is the part of the training loop; forwards, hooks and waits are on top.

    Args:
        clock: Clock of the marks.
        has_nvtx: Whether there are NVTX ranges as well.
        shows_loop: Whether what the loop does between the engine's functions has ranges, which end anywhere in it.
    """

    def __init__(self, clock: HostClock | DeviceClock, *, has_nvtx: bool, shows_loop: bool) -> None:
        self._clock = clock
        self._has_nvtx = has_nvtx
        self._shows_loop = shows_loop
        self._open: list[tuple[PartKey, OpenRange | None]] = []
        self._stack = [DATA]
        self._stamps: list[Stamp] = []
        self._keys: list[PartKey] = []
        self._passes: dict[tuple[str, str], PartKey] = {}  # of units
        self._loop_start = 0  # first mark since the last forward, backward or step has ended
        self._num_whole = 0  # marks before the end of the last whole step
        self._is_in_closure = False
        self._is_closed = False

    def restart(self) -> None:
        """Forget all marks: a step ends here, and the first recorded one begins."""
        self._stack, self._stamps, self._keys, self._loop_start = [DATA], [], [], 0
        self._mark()

    def enter(self, key: PartKey) -> None:
        """Begin something that `leave` ends."""
        self._stack.append(key)
        self._mark()

    def leave(self) -> None:
        """End what has begun last; go on with what it interrupted."""
        del self._stack[max(1, len(self._stack) - 1) :]
        self._mark()

    @contextmanager
    def in_engine(self, then: PartKey | None = None) -> Iterator[None]:
        """A hook of the engine. `then` is the part of the training loop behind it, if another one begins."""
        self.enter(ENGINE)
        try:
            yield
            if then is not None:
                self._continue_with(then)
        finally:
            self.leave()

    @contextmanager
    def pre_forward(self, unit: str, *, is_recomputed: bool) -> Iterator[None]:
        """The hook before a unit's forward, which then begins.

        Before an outermost one, the loop has fetched data for it. After a forward without a backward, or between
        micro-steps, that shows only now.
        """
        if not is_recomputed and len(self._stack) == 1:
            self._rename((LOSS, AFTER_BACKWARD), DATA)
            self._stack = [DATA]
            self._mark()
        with self.in_engine():
            yield
            self._stack.insert(-1, self._pass_of("recompute" if is_recomputed else "forward", unit))

    @contextmanager
    def post_forward(self, *, is_recomputed: bool) -> Iterator[None]:
        """The hook after a forward, which has ended or raised."""
        with self.in_engine():
            if len(self._stack) == 3 and not is_recomputed:  # the part of the loop, an outermost forward, the engine
                self._continue_with(LOSS)
            del self._stack[max(1, len(self._stack) - 2) : -1]
            yield

    def pre_backward(self, unit: str) -> AbstractContextManager[None]:
        """The hook before a unit's backward, which then begins."""
        return self.in_engine(self._pass_of("backward", unit))

    def post_backward(self) -> AbstractContextManager[None]:
        """The hook at the end of a backward."""
        return self.in_engine(OPTIMIZER if self._is_in_closure else AFTER_BACKWARD)

    def on_grad(self, unit: str) -> AbstractContextManager[None]:
        """The hook of a gradient, which says what was computed since the last mark."""
        if len(self._stack) == 1 and self._keys and not self._is_closed:
            self._stack[0] = self._keys[-1] = self._pass_of("backward", unit)
        return self.in_engine()

    def begin_step(self, *, has_closure: bool) -> None:
        """An optimizer step begins; with its closure, which runs a forward and a backward first.

        After another one of the same step, the loop has fetched no data.
        """
        self._is_in_closure = has_closure
        if not has_closure:
            self._rename((DATA,), AFTER_BACKWARD)
            self._continue_with(OPTIMIZER)

    def end_optimizer(self) -> None:
        """An optimizer step has ended; the loop goes on."""
        self._is_in_closure = False
        self._continue_with(DATA)

    def end_step(self) -> None:
        """A whole step has ended: what is recorded up to here counts."""
        self._mark()
        self._num_whole = len(self._stamps) - 1

    def discard(self) -> None:
        """End the row without a result."""
        self._is_closed = True
        self._show([])

    def close(self) -> tuple[Interval, ...]:
        """End the row. Returns its intervals up to the last end of a step."""
        self.discard()
        times_s = list(accumulate(self._clock.seconds(self._stamps[: self._num_whole + 1]), max))
        return tuple(
            Interval(key=key, start_s=start_s, end_s=end_s)
            for key, (start_s, end_s) in zip(self._keys, pairwise(times_s), strict=False)
        )

    def _pass_of(self, name: str, unit: str) -> PartKey:
        key = self._passes.get((name, unit))
        if key is None:
            key = self._passes[name, unit] = PartKey(category=Category.COMPUTE, name=name, unit=unit)
        return key

    def _continue_with(self, key: PartKey) -> None:
        """Go on with another part of the training loop, when all that is on top has ended."""
        self._stack[0] = key
        is_bottom = len(self._stack) == 1
        if is_bottom:
            self._mark()
        self._loop_start = len(self._keys) - is_bottom

    def _rename(self, before: tuple[PartKey, ...], key: PartKey) -> None:
        for index in range(self._loop_start, len(self._keys)):
            if self._keys[index] in before:
                self._keys[index] = key

    def _mark(self) -> None:
        key = self._stack[-1]
        if self._is_closed or (self._keys and self._keys[-1] is key):
            return
        self._stamps.append(self._clock.stamp())
        self._keys.append(key)
        if self._open or self._has_nvtx or _profiler_enabled():
            is_hidden = self._stack[0] in _LOOP and (len(self._stack) > 1 or not self._shows_loop)
            self._show(self._stack[1:] if is_hidden else self._stack)

    def _show(self, keys: Sequence[PartKey]) -> None:
        """Let other profilers have these ranges, outermost first: they expect that ranges are nested."""
        num_kept = sum(1 for _ in takewhile(lambda pair: pair[0][0] is pair[1], zip(self._open, keys, strict=False)))
        while len(self._open) > num_kept:
            _end_range(self._open.pop()[1])
        self._open += [(key, _begin_range(key, has_nvtx=self._has_nvtx)) for key in keys[num_kept:]]


class RecordedCollective:
    """One collective of a recording: it is submitted, starts, is waited for, ends.

    Args:
        recorder: Recorder that receives it when it has ended.
        queue: Name of the queue, or "control".
        key: Identity of the collective.
        sent_bytes: Bytes that this rank sends.

    Attributes:
        submitted: Stamp of the submission.
        started: Stamp of the start, which is the submission where there is no queue.
        ended: Stamp of the end; None before it.
    """

    def __init__(self, recorder: Recorder, queue: str, key: PartKey, sent_bytes: int) -> None:
        self.queue, self.key, self.sent_bytes = queue, key, sent_bytes
        self.submitted = self.started = recorder.clock.stamp()
        self.ended: Stamp | None = None
        self._recorder = recorder
        self._range: OpenRange | None = None

    def start(self) -> None:
        """The queue starts it, in any thread."""
        self.started = self._recorder.clock.stamp()
        self._range = _begin_range(self.key, has_nvtx=self._recorder.has_nvtx)

    def end(self) -> None:
        """It has ended, in any thread."""
        _end_range(self._range)
        self.ended = self._recorder.clock.stamp()
        self._recorder.ended.append(self)

    def begin_wait(self) -> None:
        """The compute row waits for it."""
        self._recorder.compute.enter(replace(self.key, category=Category.WAIT))

    def end_wait(self) -> None:
        """The wait is over; that of a control group ends with it."""
        self._recorder.compute.leave()
        if self.ended is None:
            self.end()

    def interval(self, times_s: Iterator[float]) -> Interval:
        """It as an interval.

        Args:
            times_s: Seconds of its three stamps.
        """
        submitted_s, start_s, end_s = accumulate((next(times_s), next(times_s), next(times_s)), max)
        return Interval(
            key=self.key, start_s=start_s, end_s=end_s, queued_s=start_s - submitted_s, sent_bytes=self.sent_bytes
        )


class Recorder:
    """Records one rank's steps.

    Args:
        clock: Clock of all stamps.
        on_step: Called at the end of every whole step; None to forget the step then, as nobody reads its times.
        has_nvtx: Whether there are NVTX ranges as well.

    Attributes:
        compute: Compute row.
        ended: Collectives that have ended.
        is_timed: Whether somebody reads the times.
    """

    def __init__(
        self, clock: HostClock | DeviceClock, on_step: Callable[[], None] | None = None, *, has_nvtx: bool = False
    ) -> None:
        self.clock = clock
        self.has_nvtx = has_nvtx
        self.is_timed = on_step is not None
        self.compute = ComputeRow(clock, has_nvtx=has_nvtx, shows_loop=self.is_timed)
        self.ended: list[RecordedCollective] = []
        self._on_step = on_step or self.restart

    def collective(self, queue: str, name: str, unit: str, axis: str, sent_bytes: int) -> RecordedCollective:
        """A collective that is submitted now; see `RecordedCollective`."""
        key = PartKey(category=Category.COLLECTIVE, name=name, unit=unit, axis=axis)
        return RecordedCollective(self, queue, key, sent_bytes)

    def end_optimizer(self, *, is_first: bool) -> None:
        """An optimizer has stepped: the first one ends the step, those that share it follow."""
        self.compute.end_optimizer()
        if is_first:
            self._on_step()

    def restart(self) -> None:
        """Forget everything: the first recorded step begins."""
        self.ended.clear()
        self.compute.restart()

    def close(self, rank: int) -> tuple[Row, ...]:
        """End the recording after a whole step. Returns the rows of this rank.

        Rows of queues hold what was submitted and has ended in the recorded steps.
        """
        intervals = self.compute.close()
        ended = list(self.ended)
        stamps = [stamp for own in ended for stamp in (own.submitted, own.started, own.ended)]
        times_s = iter(self.clock.seconds(stamps))
        rows: dict[str, list[Interval]] = {}
        for own in ended:
            interval = own.interval(times_s)
            if interval.submitted_s >= intervals[0].start_s and interval.end_s <= intervals[-1].end_s:
                rows.setdefault(own.queue, []).append(interval)
        queues = (
            Row(rank=rank, resource=queue, intervals=tuple(sorted(found, key=attrgetter("start_s"))))
            for queue, found in sorted(rows.items())
        )
        return (Row(rank=rank, resource=COMPUTE_ROW, intervals=intervals), *queues)


class Ranges:
    """The ranges in the code of one model's step. Without a recorder each costs a question.

    Attributes:
        recorder: Recorder of a profile, or for torch's profiler alone; None while nothing listens.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def begin(self, recorder: Recorder) -> None:
        """Begin to record."""
        self.end()
        self.recorder = recorder

    def end(self) -> None:
        """End what is recorded."""
        if self.recorder is not None:
            self.recorder.compute.discard()
        self.recorder = None

    def pre_forward(self, unit: str, *, is_recomputed: bool) -> AbstractContextManager[None]:
        """See `ComputeRow.pre_forward`. Here torch's profiler is looked for: it begins and ends between steps."""
        if not is_recomputed and (self.recorder is not None or _profiler_enabled()):
            self._follow_profiler()
        recorder = self.recorder
        return NO_RANGE if recorder is None else recorder.compute.pre_forward(unit, is_recomputed=is_recomputed)

    def _follow_profiler(self) -> None:
        if self.recorder is None:
            self.begin(Recorder(HostClock(0)))
        elif not (self.recorder.is_timed or _profiler_enabled()):
            self.end()

    def post_forward(self, *, is_recomputed: bool) -> AbstractContextManager[None]:
        """See `ComputeRow.post_forward`."""
        recorder = self.recorder
        return NO_RANGE if recorder is None else recorder.compute.post_forward(is_recomputed=is_recomputed)

    def pre_backward(self, unit: str) -> AbstractContextManager[None]:
        """See `ComputeRow.pre_backward`."""
        return NO_RANGE if self.recorder is None else self.recorder.compute.pre_backward(unit)

    def post_backward(self) -> AbstractContextManager[None]:
        """See `ComputeRow.post_backward`."""
        return NO_RANGE if self.recorder is None else self.recorder.compute.post_backward()

    def in_engine(self) -> AbstractContextManager[None]:
        """See `ComputeRow.in_engine`."""
        return NO_RANGE if self.recorder is None else self.recorder.compute.in_engine()
