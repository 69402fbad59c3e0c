"""Signals that ask a run to save: SIGUSR1 goes on afterwards, SIGTERM and SIGINT (Ctrl-C) end the run.

A signal may reach one rank or all. After every optimizer step the ranks agree on the strongest request, so that all of
them save after the same step. A handler only takes a note: nothing communicates inside of it. A second SIGINT ends this
process at once.
"""

import os
import shlex
import signal
import socket
import threading
from collections.abc import Sequence
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Request(IntEnum):
    """What a signal asks for; larger ones win."""

    NONE = 0
    SAVE = 1
    STOP = 2
    INTERRUPT = 3


_REQUESTS = {signal.SIGUSR1: Request.SAVE, signal.SIGTERM: Request.STOP, signal.SIGINT: Request.INTERRUPT}
_NAMES = {request: number.name for number, request in _REQUESTS.items()}


class SaveRequests:
    """The requests that this process received and the ranks have not agreed on yet.

    Args:
        saves: Whether the run writes checkpoints.

    Attributes:
        stopped_at: Optimizer steps after which a signal ended the training; 0 where none did.
        stopped_by: Request on which the ranks then agreed.
    """

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves
        self.stopped_at = 0
        self.stopped_by = Request.NONE
        self._received: list[Request] = []
        self._num_handled = 0
        self._group: Any = None
        self._earlier: dict[int, Any] = {}
        self._wakeup: socket.socket | None = None

    def install(self) -> None:
        """Handle the signals from now on; call it again after a framework has set handlers of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._wakeup is None:
            received, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=_watch_interrupts, args=(received,), daemon=True).start()
        for number in _REQUESTS:
            self._earlier.setdefault(number, signal.signal(number, self._handle))

    def close(self) -> None:
        """Restore the handlers from before `install`."""
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
            self._wakeup = None
        self._group = None

    def agree(self, step: int) -> Request:
        """Return the strongest request of all ranks, once. Collective; call it after every optimizer step.

        Args:
            step: Optimizer steps done.

        Cost:
            One all-reduce of 8 bytes between the hosts, over a gloo group of its own that the first call opens. It
            waits until every host has submitted this step, and for no device.
        """
        num_received = len(self._received)  # a handler may append at any time
        request = max(self._received[self._num_handled : num_received], default=Request.NONE)
        self._num_handled = num_received
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = self._group or dist.new_group(backend="gloo")
            strongest = torch.tensor([request])
            dist.all_reduce(strongest, dist.ReduceOp.MAX, group=self._group)
            request = Request(int(strongest))
        if request >= Request.STOP:
            self.stopped_at, self.stopped_by = step, request
        return request

    @property
    def exit_code(self) -> int:
        """Exit code of the first process: 0 where SIGTERM ended a run that is saved, else 128 and the signal."""
        if self.stopped_by is Request.STOP:
            return 0 if self.saves else 128 + signal.SIGTERM
        return 128 + signal.SIGINT if self.stopped_by else 0

    def describe(self, request: Request, step: int, arguments: Sequence[str] = ()) -> str:
        """Return the line that rank 0 prints.

        Args:
            request: Request that the ranks have agreed on.
            step: Optimizer steps done.
            arguments: Arguments of the program, which a run that stops is continued with.
        """
        if not self.saves:
            end = "the run goes on" if request is Request.SAVE else "the run ends"
            return (
                f"{_NAMES[request]}: nothing is saved, because of `trainer.checkpoint_every_steps=never` (a number of "
                f"steps would save); {end} after step {step}"
            )
        if request is Request.SAVE:
            return f"{_NAMES[request]}: checkpoint after step {step}"
        return f"{_NAMES[request]}: saved after step {step}. Continue with: {resume_command(arguments)}"

    def note(self, number: int) -> None:
        """Take a note of a signal of this process."""
        self._received.append(_REQUESTS[signal.Signals(number)])

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.note(number)
        if number != signal.SIGINT:  # print() may not be called again inside of itself, write() may
            os.write(2, f"{signal.Signals(number).name} received, handled after this optimizer step\n".encode())


def _watch_interrupts(received: socket.socket) -> None:
    """Answer SIGINT in a thread: the handler does not run while the main thread waits for another rank.

    Args:
        received: Receives the number of every signal of this process, until its other end is closed.
    """
    num_interrupts = 0
    while numbers := received.recv(64):
        before, num_interrupts = num_interrupts, num_interrupts + numbers.count(signal.SIGINT)
        if num_interrupts > 1:
            os._exit(128 + signal.SIGINT)
        if num_interrupts > before and os.environ.get("LOCAL_RANK", "0") == "0":  # a terminal sends it to every rank
            os.write(2, b"SIGINT received, handled after this optimizer step; a second one ends the run at once\n")
    received.close()


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that continues a run from its newest checkpoint."""
    others = [*arguments]
    while "--trainer.resume" in others:  # its value is the next word
        position = others.index("--trainer.resume")
        del others[position : position + 2]
    others = [text for text in others if not text.startswith("--trainer.resume=")]
    return shlex.join(["mics", "pretrain", *others, "--trainer.resume=auto"])
