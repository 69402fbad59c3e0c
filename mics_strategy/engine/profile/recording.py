"""The recording of a few steps of one model, from its start to its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mics_strategy.comm.consensus import check_equal, gather_objects, run_and_gather, run_on_all_ranks
from mics_strategy.comm.ranges import DeviceClock, HostClock, Recorder
from mics_strategy.engine.internals import Internals
from mics_strategy.engine.profile.result import (
    MAX_GATHERED,
    ProfileResult,
    check_trace_path,
    make_trace_folder,
    rank_steps,
)
from mics_strategy.errors import ConfigError, LifecycleError
from mics_strategy.timeline import Row


class Profile:
    """A recording of the next optimizer steps of one model.

    It ends by itself with the last of the steps, or with `stop`. Whenever `begin` was called, it records whole steps:
    from the end of one optimizer step to the end of the next. The first one may begin at once if no forward of it has
    run.

    Args:
        model: Model to record.
        num_steps: Steps to record.
        origin_ns: Wall time that counts as 0, the same on all ranks, nanoseconds.
        gather: Function that makes the result that all ranks share of this rank's rows and the number of steps.

    Attributes:
        is_recording: Whether it waits for its first step or records.
    """

    def __init__(
        self,
        model: Internals,
        num_steps: int,
        origin_ns: int,
        gather: Callable[[tuple[Row, ...], int], ProfileResult],
    ) -> None:
        self._model = model
        self._num_steps = num_steps
        self._gather = gather
        is_cuda = model.groups.device.type == "cuda"
        clock = DeviceClock(model.groups.device, origin_ns) if is_cuda else HostClock(origin_ns)
        self._recorder = Recorder(clock, self._end_step, has_nvtx=is_cuda)
        self._ranges = model.engine.ranges
        self._num_recorded = -1  # of a step that has begun before the recording
        self._result: ProfileResult | None = None
        self.is_recording = False

    def begin(self) -> None:
        """Begin to record. Not collective."""
        self._ranges.begin(self._recorder)
        self.is_recording = True
        if self._model.target.is_step_over:
            self._begin_first_step()

    @property
    def is_replaced(self) -> bool:
        """Whether another recording has begun since, so that this one never ends."""
        return self.is_recording and self._ranges.recorder is not self._recorder

    @property
    def steps_left(self) -> int:
        """Steps that are still to be recorded; 0 after the recording has ended."""
        return self._num_steps - max(0, self._num_recorded) if self.is_recording else 0

    @property
    def result(self) -> ProfileResult:
        """The recorded steps of all ranks.

        Raises:
            LifecycleError: They have not all run, or the recording was cancelled.
        """
        if self._result is not None:
            return self._result
        if self.is_recording:
            raise LifecycleError(
                f"The profile has no result yet: {self.steps_left} of {self._num_steps} steps are left. Read it after "
                "them, or call `stop()` on every rank for the steps so far."
            )
        raise LifecycleError("The profile was cancelled and has no result. Call `sharded.profile()` again.")

    def stop(self) -> ProfileResult:
        """End the recording after the last whole step so far. Collective.

        A second call returns the same result.

        Raises:
            LifecycleError: No step was recorded. The recording has ended all the same.
        """
        if self.is_recording and self._num_recorded < 1:
            self.cancel()
            raise LifecycleError(
                f"No step ended since `sharded.profile(steps={self._num_steps})`, so there is no result. Stop after "
                "the first optimizer step."
            )
        if self.is_recording:
            self._finish()
        return self.result

    def cancel(self) -> None:
        """End the recording without a result, as after an error. Not collective."""
        self._ranges.end()
        self.is_recording = False

    def _begin_first_step(self) -> None:
        self._num_recorded = 0
        self._recorder.restart()

    def _end_step(self) -> None:
        if self._num_recorded < 0:
            self._begin_first_step()
            return
        self._num_recorded += 1
        self._recorder.compute.end_step()
        if self._num_recorded == self._num_steps:
            self._finish()

    def _finish(self) -> None:
        """End the recording, and let all ranks know the result. Collective."""
        self._ranges.end()
        self.is_recording = False
        self._result = self._gather(self._recorder.close(self._model.groups.rank), self._num_recorded)


def gather_result(rows: tuple[Row, ...], num_steps: int, path: Path | None) -> ProfileResult:
    """The result that all ranks share, of each rank's rows, which rank 0 prints and writes. Collective.

    Args:
        rows: Rows of this rank.
        num_steps: Steps that they cover.
        path: File that receives the trace; None for none.

    Cost:
        One gather of all rows, at most `MAX_GATHERED` intervals in total.
    """
    num_intervals = sum(gather_objects(sum(len(row.intervals) for row in rows)))
    own = rank_steps(rows, num_steps, keeps_rows=num_intervals <= MAX_GATHERED)
    result = ProfileResult(rank=own.rank, num_steps=num_steps, own_rows=rows, ranks=tuple(gather_objects(own)))
    if own.rank == 0:
        print(result.summary(), flush=True)
    if path is not None:
        run_on_all_ranks(lambda: result.write_trace(path), ConfigError)
    return result


def begin_profile(model: Internals, present: Profile | None, steps: int, path: str | Path | None) -> Profile:
    """Begin to record the next steps of a model. Collective.

    Args:
        model: Model to record.
        present: Last profile of the model.
        steps: Steps to record.
        path: File that receives the trace; None for none.

    Raises:
        ConfigError: `steps` is no positive number, differs between ranks, or the trace cannot be written.
        LifecycleError: The model is being recorded.
    """

    def check() -> tuple[Path | None, tuple[dict[str, str], int]]:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigError(f"`profile(steps={steps!r})` records nothing. Use a whole number from 1 on.")
        if present is not None and present.is_recording:
            raise LifecycleError(
                f"The model is being profiled: {present.steps_left} steps are left. Wait for them, or call `stop()` "
                "on that profile first."
            )
        file = None if path is None else check_trace_path(path)
        if file is not None and model.groups.rank == 0:  # which usually writes for all
            make_trace_folder(file)
        return file, ({"steps": str(steps)}, time.time_ns())

    file, by_rank = run_and_gather(check)
    check_equal([arguments for arguments, _ in by_rank])
    profile = Profile(model, steps, by_rank[0][1], lambda rows, num_steps: gather_result(rows, num_steps, file))
    profile.begin()
    return profile
