"""In the place of `torch.cuda`: streams and events, and which of them is a thread's own."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda_harness.happens_before import HOST, Clock

if TYPE_CHECKING:
    from tests.cuda_harness.machine import Machine

ROOT = Path(__file__).parents[2]
_OURS = (f"{ROOT / 'mics_strategy'}/", f"{ROOT / 'tests'}/")
_HARNESS = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("machine", "pretence", "streams", "works"))


class Stream:
    """In the place of `torch.cuda.Stream`."""

    device_type = 1  # torch's number of CUDA

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.machine = machine()
        self.device_index = index_of(device)
        self.priority = priority
        self.stream_id = self.number = self.machine.orders.stream(f"the stream made at {source_line()}")

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def wait_stream(self, other: "Stream") -> None:
        self.machine.log.append(("wait", self.number, str(other.number)))
        self.machine.orders.wait(self.number, self.machine.orders.record(other.number))

    def wait_event(self, event: "Event") -> None:
        self.machine.orders.wait(self.number, event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.wait_on_host(self.number, "synchronisation of a stream")

    def query(self) -> bool:
        return False


class Event:
    """In the place of `torch.cuda.Event`. Every record of a timing event takes a millisecond."""

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        self.clock: Clock = {}
        self.step = -1
        self.is_timing = enable_timing
        self.time_ms = 0

    def record(self, stream: Stream | None = None) -> None:
        on = stream or current_stream()
        self.clock, self.step = on.machine.orders.record(on.number), on.machine.step_number
        on.machine.time_ms += self.is_timing
        self.time_ms = on.machine.time_ms

    def elapsed_time(self, end: "Event") -> float:
        if not (self.is_timing and end.is_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return float(end.time_ms - self.time_ms)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        here = machine()
        if self.step == here.step_number:
            here.note_wait("synchronisation of an event of the same step")
        here.orders.wait(HOST, self.clock)

    def query(self) -> bool:
        return False


@dataclass(slots=True)
class Here:
    """What belongs to a thread."""

    machine: "Machine | None" = None
    device_index: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    kind: str | None = None  # of the memory that is allocated now, where the caller has said it
    is_non_blocking: bool = False
    is_in_backward: bool = False


class _Threads(threading.local):
    def __init__(self) -> None:
        self.here = Here()


_threads = _Threads()


def here() -> Here:
    """Of this thread."""
    return _threads.here


@contextmanager
def as_thread(of: Here) -> Iterator[None]:
    """Be another thread for a while."""
    before, _threads.here = _threads.here, of
    try:
        yield
    finally:
        _threads.here = before


@contextmanager
def alone() -> Iterator[None]:
    """Do something that no GPU would do: nothing is pretended, nothing noted."""
    with as_thread(Here()), _disable_current_modes():
        yield


def machine() -> "Machine":
    """Of this thread."""
    current = here().machine
    if current is None:
        raise RuntimeError("no pretended GPU in this thread")
    return current


def index_of(device: Any = None) -> int:
    """The number of a device; of the current one where nothing else is said."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return here().device_index if index is None else index


def current_stream(device: Any = None) -> Stream:
    """In the place of `torch.cuda.current_stream`."""
    index = index_of(device)
    return here().streams.get(index) or machine().default_stream(index)


def source_line() -> str:
    """The line that is being run: of the package where one is on the stack, else of a test."""
    frame, fallback = sys._getframe(1), "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS) and name not in _HARNESS:
            line = f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
            if name.startswith(_OURS[0]):
                return line
            fallback = line if fallback == "?" else fallback
        frame = frame.f_back  # type: ignore[assignment]
    return fallback
