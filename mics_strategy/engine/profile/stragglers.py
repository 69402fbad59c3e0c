"""Ranks that stay slower than the others, named while a training runs."""

from __future__ import annotations

import socket
from typing import Any

from torch.optim import Optimizer

from mics_strategy.comm.consensus import check_equal, gather_objects, run_and_gather
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.profile.recording import Profile
from mics_strategy.engine.profile.result import ProfileResult, SlowRank, compare_with_median, rank_steps
from mics_strategy.errors import ConfigError
from mics_strategy.timeline import Row


class StragglerWatch:
    """Names ranks that stay slower than the others. Collective.

    All ranks wait for the slowest one, so their steps are equally long. The watch records *windows* of a few steps, as
    `Sharded.profile` does, and compares how long each rank is busy, outside of waits. A rank that is slow in several
    windows in a row is printed by rank 0, with its host and the part of the step that takes longer on it; once, until
    it has kept up in a window.

    Args:
        sharded: Model.
        optimizer: Its optimizer; of several, any one that steps in every step.
        slower_by: Factor of the median rank's busy time from which on a rank is slow, more than 1. In a job of two
            ranks that median is the mean of both.
        in_a_row: Windows in a row in which a rank has to be slow.
        steps: Optimizer steps of a window.
        every: Optimizer steps from one window to the next, more than `steps`.

    Attributes:
        slow: Slow ranks, with times and reasons of the last window; equal on all ranks.

    Raises:
        ConfigError: A number is out of its range, or differs between ranks.

    Cost:
        In a window, about a microsecond for each mark, and a gather of a few kilobytes. On a GPU the host waits for
        its stream once behind a window.
    """

    def __init__(
        self,
        sharded: Sharded,
        optimizer: Optimizer,
        *,
        slower_by: float = 1.2,
        in_a_row: int = 3,
        steps: int = 3,
        every: int = 100,
    ) -> None:
        numbers = {"slower_by": slower_by, "in_a_row": in_a_row, "steps": steps, "every": every}
        _, by_rank = run_and_gather(lambda: (None, _checked(numbers)))
        check_equal(by_rank)
        self.slow: list[SlowRank] = []
        self._sharded = sharded
        self._slower_by, self._in_a_row, self._steps, self._every = slower_by, in_a_row, steps, every
        self._window: Profile | None = None
        self._windows_slow: list[int] = []  # by rank, windows in a row in which it was slow
        self._hook = optimizer.register_step_post_hook(self._begin_when_due)

    def close(self) -> None:
        """End the watch. Call it on all ranks after the same step."""
        self._hook.remove()
        if self._window is not None and self._window.is_recording and not self._window.is_replaced:
            self._window.cancel()

    def _begin_when_due(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model, window = self._sharded.internals, self._window
        recorder = model.engine.ranges.recorder
        if model.target.steps_done % self._every or (recorder is not None and recorder.is_timed):
            return  # a profile that the script has begun goes first
        if window is None or not window.is_recording or window.is_replaced:
            self._window = Profile(model, self._steps, 0, self._compare)
            self._window.begin()

    def _compare(self, rows: tuple[Row, ...], num_steps: int) -> ProfileResult:
        """Compare the ranks of a window. Collective."""
        own = rank_steps(rows, num_steps, keeps_rows=False)
        hosts, ranks = zip(*gather_objects((socket.gethostname(), own)), strict=True)
        if len(self._windows_slow) != len(ranks):  # at first, and when ranks have left or joined
            self._windows_slow = [0] * len(ranks)
        result = ProfileResult(rank=own.rank, num_steps=num_steps, own_rows=rows, ranks=ranks)
        self.slow = []
        for steps, host in zip(ranks, hosts, strict=True):
            slow = compare_with_median(steps, ranks)
            is_slow = slow.busy_s > self._slower_by * slow.median_busy_s
            self._windows_slow[slow.rank] = self._windows_slow[slow.rank] + 1 if is_slow else 0
            if self._windows_slow[slow.rank] >= self._in_a_row:
                self.slow.append(slow)
            if self._windows_slow[slow.rank] == self._in_a_row and own.rank == 0:
                step = self._sharded.steps_done
                print(f"`StragglerWatch`: step {step}: rank {slow.rank} on {host} stays slow: {slow}", flush=True)
        return result


def _checked(numbers: dict[str, float]) -> dict[str, str]:
    factor, in_a_row, steps, every = numbers.values()
    problem = ""
    if not factor > 1:
        problem = f"`slower_by={factor}` is no factor of a slower rank. Use more than 1, such as 1.2"
    elif min(in_a_row, steps) < 1:
        problem = f"`in_a_row={in_a_row}` and `steps={steps}` are counts. Use 1 or more"
    elif every <= steps:
        problem = f"`every={every}` begins a window before the last one of {steps} steps has ended. Use more"
    if problem:
        raise ConfigError(f"{problem}.")
    return {name: str(number) for name, number in numbers.items()}
