"""Progress of a preparation: a bar on a terminal, plain lines in a file."""

import sys
import time
from types import TracebackType
from typing import Protocol

_BETWEEN_LINES_S = 30.0


class Progress(Protocol):
    """Shows how many of a known number of pieces are done."""

    def begin(self, title: str, total: int) -> None:
        """Start to count from 0 under a title."""
        ...

    def advance(self, num_bytes: int = 0) -> None:
        """Count one more piece, and the bytes of text in it."""
        ...


class NoProgress:
    """Shows nothing."""

    def begin(self, title: str, total: int) -> None:
        """Start."""

    def advance(self, num_bytes: int = 0) -> None:
        """Count."""


class PlainProgress:
    """Lines on stdout: the first and last piece, and one every 30 s between them."""

    def __init__(self) -> None:
        self._title, self._total, self._done, self._bytes = "", 0, 0, 0
        self._begun_s = self._printed_s = 0.0

    def begin(self, title: str, total: int) -> None:
        """Start to count from 0 under a title."""
        self._title, self._total, self._done, self._bytes = title, total, 0, 0
        self._begun_s = self._printed_s = time.monotonic()
        print(f"{title}: {total} to do", flush=True)

    def advance(self, num_bytes: int = 0) -> None:
        """Count one more piece, and the bytes of text in it."""
        now = time.monotonic()
        self._done, self._bytes = self._done + 1, self._bytes + num_bytes
        if self._done in (1, self._total) or now - self._printed_s >= _BETWEEN_LINES_S:
            self._printed_s = now
            elapsed_s = max(now - self._begun_s, 1e-9)
            left_s = elapsed_s / self._done * (self._total - self._done)
            print(
                f"{self._title}: {self._done}/{self._total}, {self._bytes / elapsed_s / 1e6:.1f} MB/s, "
                f"{elapsed_s:.0f} s passed, {left_s:.0f} s left",
                flush=True,
            )


class BarProgress:
    """A bar of rich on stderr, for terminals."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate)
        self._bar = RichProgress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("", total=None, rate="", visible=False)
        self._bytes, self._begun_s = 0, 0.0

    def __enter__(self) -> "BarProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, title: str, total: int) -> None:
        """Start to count from 0 under a title."""
        self._bytes, self._begun_s = 0, time.monotonic()
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(title, total=total, rate="")

    def advance(self, num_bytes: int = 0) -> None:
        """Count one more piece, and the bytes of text in it."""
        self._bytes += num_bytes
        rate = self._bytes / max(time.monotonic() - self._begun_s, 1e-9) / 1e6
        self._bar.update(self._task, advance=1, rate=f"{rate:.1f} MB/s" if self._bytes else "")


def is_terminal() -> bool:
    """Whether a person watches: both streams are a terminal."""
    return sys.stdout.isatty() and sys.stderr.isatty()
