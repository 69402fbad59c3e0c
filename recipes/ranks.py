"""The ranks of one machine, started by this process where no launcher has started them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

_POLL_S = 0.1
GRACE_S = 5.0  # for ranks to end by themselves after another one has
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


def start_ranks(world_size: int, module: str, arguments: Sequence[str]) -> int:
    """Run a module on the ranks of this machine; return its exit code.

    SIGTERM and SIGUSR1 are forwarded to every rank. When a rank fails, the others are ended. SIGINT, which a terminal
    sends to the ranks as well, becomes a SIGTERM for them, so that they do not take it for a second one; a second one
    kills them. The exit code is then 130.

    Args:
        world_size: Number of ranks.
        module: Name of the module, as for `python -m`.
        arguments: Arguments of the program.
    """
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun does
    }
    command = [sys.executable, "-m", module, *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with _forwarding(ranks) as interrupts:
            for rank in range(world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment | own))
            code = _wait(ranks)
            return 128 + signal.SIGINT if interrupts else code
    except KeyboardInterrupt:
        for rank in ranks:
            rank.kill()
        return 128 + signal.SIGINT
    finally:
        _end(ranks)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit code of the first rank that failed; 0 when all have ended well."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        if None not in codes:
            return 0
        time.sleep(_POLL_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for ranks that still run, and end those that do not end by themselves."""
    deadline_s = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@contextlib.contextmanager
def _forwarding(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals on to every rank that runs; list a SIGINT."""
    interrupts: list[int] = []

    def forward(number: int, _: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        interrupts.append(number)
        forward(signal.SIGTERM, frame)

    handlers = {**dict.fromkeys(_FORWARDED, forward), signal.SIGINT: interrupt}
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield interrupts
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
