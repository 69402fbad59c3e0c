"""Progress of the training: a bar on a terminal, plain lines elsewhere."""

import atexit
from typing import Protocol

from .data.progress import is_terminal


class TrainingProgress(Protocol):
    """Shows how far a run is, and its log."""

    def advance(self, step: int) -> None:
        """Show that `step` optimizer steps are taken."""
        ...

    def log(self, step: int, line: str) -> None:
        """Show the numbers of a step."""
        ...

    def end(self) -> None:
        """Leave the terminal as it was."""
        ...


class NoTrainingProgress:
    """Shows nothing: every rank but the first."""

    def advance(self, step: int) -> None:
        """Count."""

    def log(self, step: int, line: str) -> None:
        """Show."""

    def end(self) -> None:
        """End."""


class Lines:
    """One line on stdout per logged step.

    Args:
        max_steps: Optimizer steps of the run.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps

    def advance(self, step: int) -> None:
        """Count."""

    def log(self, step: int, line: str) -> None:
        """Print the numbers of a step."""
        print(f"step {step:>{len(str(self.max_steps))}}/{self.max_steps} | {line}", flush=True)

    def end(self) -> None:
        """End."""


class Bar:
    """A bar of rich below the lines.

    Args:
        max_steps: Optimizer steps of the run.
    """

    def __init__(self, max_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as RemainingColumn

        elapsed, remaining = TimeElapsedColumn(), RemainingColumn()
        self._lines = Lines(max_steps)
        self._bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), elapsed, TextColumn("<"), remaining)
        self._task = self._bar.add_task("", total=max_steps)

    def advance(self, step: int) -> None:
        """Move the bar."""
        if not self._bar.live.is_started:
            atexit.register(self._bar.stop)  # gives the cursor back where the run fails
            self._bar.start()
        self._bar.update(self._task, completed=step)

    def log(self, step: int, line: str) -> None:
        """Print the numbers of a step; rich keeps the bar below what is printed."""
        self._lines.log(step, line)

    def end(self) -> None:
        """Stop drawing; the bar remains."""
        atexit.unregister(self._bar.stop)
        self._bar.stop()


def training_progress(max_steps: int) -> TrainingProgress:
    """Return a bar where a person watches, and lines elsewhere."""
    return Bar(max_steps) if is_terminal() else Lines(max_steps)
