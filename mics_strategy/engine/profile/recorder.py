"""Marks on the compute row of one rank in recorded steps, and its collectives.

A compute row is a list of marks. Each says what begins; what began before has ended then. So the intervals between
marks are disjoint and cover the time, and nothing is the remainder of a sum. Hooks of the engine, waits and optimizer
steps set marks; what belongs to none of them is idle time of its own.

On the CPU a mark is a time of the host, and the communication thread of a queue takes the times of its collectives. On
CUDA a mark is a timing event on the stream that is current; all are read after the last recorded step, so that no step
waits for the device. A wait is then the time between the events before and behind `wait_event`, which is 0 for a
collective that has ended before the stream needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

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
Stamp = Any  # of one clock: nanoseconds, or a torch.cuda.Event
OpenRange = tuple[Any, int | None]  # of torch's profiler, of NVTX; None where there is none


class RecordingClock(Protocol):
    """Times of marks, read after the last one."""

    def stamp(self) -> Stamp:
        """The time now, of what this thread or its current stream has done."""

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Seconds of wall time since `origin_ns`, for stamps that lie in the past."""


class HostClock:
    """Times of the host, for the CPU.

    Args:
        origin_ns: Wall time that counts as 0, the same on all ranks, nanoseconds.
    """

    def __init__(self, origin_ns: int) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns() - origin_ns
        self.stamp = time.perf_counter_ns

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """See `RecordingClock.seconds`."""
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

    def stamp(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """See `RecordingClock.seconds`. The host waits for the device."""
        last = self.stamp()
        for event in (*stamps, last):
            event.synchronize()
        end_s = (time.time_ns() - self._origin_ns) * 1e-9
        offset_s = end_s - self._first.elapsed_time(last) * 1e-3
        return [offset_s + self._first.elapsed_time(event) * 1e-3 for event in stamps]


class Ranges:
    """Named ranges for other profilers: of torch's, and NVTX ranges of a GPU.

    While no profiler of torch runs in a thread, a range costs a question there. NVTX ranges are of the process, since
    autograd's thread ends what the main thread has begun.

    Args:
        is_cuda: Whether the model is on a GPU.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda

    def begin(self, key: PartKey) -> OpenRange | None:
        """Begin the range of some work. Returns it; None where nothing would show it."""
        is_traced = _profiler_enabled()
        if not (is_traced or self._is_cuda):
            return None
        name = f"mics::wait {key}" if key.category is Category.WAIT else f"mics::{key}"
        torch_range = _enter_range(name) if is_traced else None
        nvtx_range = torch.cuda.nvtx.range_start(name) if self._is_cuda else None
        return torch_range, nvtx_range

    def end(self, begun: OpenRange | None) -> None:
        """End a range; any thread may, and profilers may have started or ended since."""
        if begun is None:
            return
        torch_range, nvtx_range = begun
        if torch_range is not None:
            _exit_range(torch_range)
        if nvtx_range is not None:
            torch.cuda.nvtx.range_end(nvtx_range)


class ComputeRow:
    """The compute row of this rank while it is recorded.

    What it does now is a stack. Its bottom is the part of the training loop; forwards, hooks and waits are on top.

    Args:
        clock: Clock of the marks.
        ranges: Ranges for other profilers.
    """

    def __init__(self, clock: RecordingClock, ranges: Ranges) -> None:
        self._clock = clock
        self._ranges = ranges
        self._range: OpenRange | None = None
        self._stack = [DATA]
        self._stamps: list[Stamp] = []
        self._keys: list[PartKey] = []
        self._loop_start = 0  # first mark since the last forward, backward or step has ended
        self._num_whole = 0  # marks before the end of the last whole step
        self._is_closed = False

    def restart(self) -> None:
        """Forget all marks: a step ends here, and the first recorded one begins."""
        self._stack, self._stamps, self._keys, self._loop_start = [DATA], [], [], 0
        self._mark()

    def enter(self, key: PartKey) -> None:
        """Begin something that `leave` ends."""
        self._stack.append(key)
        self._mark()

    def leave(self, count: int = 1) -> None:
        """End what has begun last; go on with what it interrupted."""
        del self._stack[max(1, len(self._stack) - count) :]
        self._mark()

    def become(self, key: PartKey) -> None:
        """Go on with something else in the place of what has begun last."""
        self._stack[-1] = key
        self._mark()

    @contextmanager
    def inside(self, key: PartKey) -> Iterator[None]:
        """Something that lasts as long as the context."""
        self.enter(key)
        try:
            yield
        finally:
            self.leave()

    @property
    def depth(self) -> int:
        """Entries on top of the part of the training loop."""
        return len(self._stack) - 1

    @property
    def part(self) -> PartKey:
        """The part of the training loop."""
        return self._stack[0]

    def continue_with(self, key: PartKey) -> None:
        """Go on with another part of the training loop, when all that is on top has ended."""
        self._stack[0] = key
        if self.depth == 0:
            self._mark()
        self._loop_start = len(self._keys) - (self.depth == 0)

    def begin_forward(self) -> None:
        """An outermost forward begins: the loop has fetched data for it.

        After a forward without a backward, or between micro-steps, that shows only now.
        """
        self._stack = [DATA]
        self._rename((LOSS, AFTER_BACKWARD), DATA)
        self._mark()

    def begin_step(self) -> None:
        """An optimizer step begins. After another one of the same step, the loop has fetched no data."""
        self._rename((DATA,), AFTER_BACKWARD)
        self.continue_with(OPTIMIZER)

    def _rename(self, before: tuple[PartKey, ...], key: PartKey) -> None:
        for index in range(self._loop_start, len(self._keys)):
            if self._keys[index] in before:
                self._keys[index] = key

    def attribute(self, key: PartKey) -> None:
        """Say what was computed since the last mark, where that shows only now."""
        if self.depth == 0 and self._keys and not self._is_closed:
            self._stack[0] = self._keys[-1] = key

    def end_step(self) -> None:
        """A whole step has ended: what is recorded up to here counts."""
        self._mark()
        self._num_whole = len(self._stamps) - 1

    def discard(self) -> None:
        """End the row without a result."""
        self._ranges.end(self._range)
        self._is_closed, self._range = True, None

    def close(self) -> tuple[Interval, ...]:
        """End the row. Returns its intervals up to the last end of a step."""
        self.discard()
        times_s = list(accumulate(self._clock.seconds(self._stamps[: self._num_whole + 1]), max))
        return tuple(
            Interval(key=key, start_s=start_s, end_s=end_s)
            for key, (start_s, end_s) in zip(self._keys, pairwise(times_s), strict=False)
        )

    def _mark(self) -> None:
        key = self._stack[-1]
        if self._is_closed or (self._keys and self._keys[-1] is key):
            return
        self._ranges.end(self._range)
        self._stamps.append(self._clock.stamp())
        self._keys.append(key)
        self._range = self._ranges.begin(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCollective:
    """One collective that has ended; stamps of the recorder's clock."""

    queue: str
    key: PartKey
    submitted: Stamp
    started: Stamp
    ended: Stamp
    sent_bytes: int


class Recorder:
    """Records one rank's steps.

    Args:
        clock: Clock of all stamps.
        ranges: Ranges for other profilers.

    Attributes:
        compute: Compute row.
        submitted: Collectives that were submitted to side streams by chains that are being launched, innermost last.
    """

    def __init__(self, clock: RecordingClock, ranges: Ranges) -> None:
        self.clock = clock
        self.ranges = ranges
        self.compute = ComputeRow(clock, ranges)
        self.submitted: list[list[PartKey]] = []
        self._collectives: list[RecordedCollective] = []

    def add(self, collective: RecordedCollective) -> None:
        """Add a collective that has ended, from any thread."""
        self._collectives.append(collective)

    @contextmanager
    def waiting(self, collective: PartKey) -> Iterator[None]:
        """A wait for a collective; on a side stream nothing is exposed."""
        if self.submitted:
            yield
            return
        key = PartKey(category=Category.WAIT, name=collective.name, unit=collective.unit, axis=collective.axis)
        with self.compute.inside(key):
            yield

    def restart(self) -> None:
        """Forget everything: the first recorded step begins."""
        self._collectives.clear()
        self.compute.restart()

    def close(self, rank: int) -> tuple[Row, ...]:
        """End the recording after a whole step. Returns the rows of this rank.

        Rows of queues hold what was submitted and has ended in the recorded steps.
        """
        intervals = self.compute.close()
        first_s, last_s = intervals[0].start_s, intervals[-1].end_s
        collectives = list(self._collectives)
        stamps = [stamp for ended in collectives for stamp in (ended.submitted, ended.started, ended.ended)]
        times_s = iter(self.clock.seconds(stamps))
        rows: dict[str, list[Interval]] = {}
        for ended in collectives:
            submitted_s, start_s, end_s = accumulate((next(times_s), next(times_s), next(times_s)), max)
            interval = Interval(
                key=ended.key,
                start_s=start_s,
                end_s=end_s,
                queued_s=start_s - submitted_s,
                sent_bytes=ended.sent_bytes,
            )
            if submitted_s >= first_s and end_s <= last_s:
                rows.setdefault(ended.queue, []).append(interval)
        return (
            Row(rank=rank, resource=COMPUTE_ROW, intervals=intervals),
            *(
                Row(rank=rank, resource=queue, intervals=tuple(sorted(found, key=lambda interval: interval.start_s)))
                for queue, found in sorted(rows.items())
            ),
        )
