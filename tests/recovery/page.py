"""Examples of docs/recovery.md on two nodes of two ranks: ``python -m tests.recovery.page NAME`` kills the second one.

Then it starts the same script again, as a node that joins the others. NAME is what the example uses.
"""

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed  # before the fork

import mics_strategy.api
import mics_strategy.recovery.attempt
import mics_strategy.recovery.restart  # noqa: F401
from mics_strategy.recovery.joining import Applications
from mics_strategy.snapshots.memory import MemorySnapshots
from tests.recovery.job import run_store

PAGE = Path(__file__).parents[2] / "docs" / "recovery.md"
DIES_BEFORE_STEP, WAITS_BEFORE_STEP = 40, 60
WAITS_S = 60.0


def patch_steps(rank: int) -> None:
    """Let ranks die behind one step, and the first one wait for newcomers behind another."""
    poll, is_asked = Applications.poll, threading.Event()
    scheduler_step, after_step = torch.optim.lr_scheduler.StepLR.step, MemorySnapshots.after_step

    def step_or_die(scheduler: torch.optim.lr_scheduler.StepLR) -> None:
        strike(scheduler.last_epoch)
        scheduler_step(scheduler)

    def snapshot_or_die(snapshots: MemorySnapshots, extra: Any = None) -> bool:
        strike(extra["step"])
        return after_step(snapshots, extra)

    def strike(step: int) -> None:
        if rank >= 2 and step == DIES_BEFORE_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == WAITS_BEFORE_STEP:
            is_asked.wait(WAITS_S)

    def poll_and_note(applications: Applications) -> None:
        poll(applications)
        if applications.waiting:
            is_asked.set()

    torch.optim.lr_scheduler.StepLR.step = step_or_die  # type: ignore[method-assign]
    MemorySnapshots.after_step = snapshot_or_die  # type: ignore[method-assign]
    Applications.poll = poll_and_note  # type: ignore[method-assign]


def run_rank(rank: int, world_size: int, port: int, code: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), GROUP_RANK=str(rank // 2))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    exec(compile(code, str(PAGE), "exec"), {})
    os._exit(0)


def start_store() -> tuple[int, int]:
    """Fork a process with a store. Returns its id, and the port."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        run_store(writer)
    return pid, int(os.read(reader, 16))


def start_ranks(world_size: int, port: int, code: str, join: str | None) -> list[int]:
    """Fork the ranks of a job. Returns their ids."""
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            try:
                if join is None:
                    patch_steps(rank)
                else:
                    os.environ["JOIN"] = join
                run_rank(rank, world_size, port, code)
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def main() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    code = next(example for example in examples if sys.argv[1] in example)
    torch.set_num_threads(1)
    (store, port), (own_store, own_port) = start_store(), start_store()
    pids = start_ranks(4, port, code, None)
    codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[2:]}
    pids += start_ranks(2, own_port, code, f"127.0.0.1:{port}")
    codes |= {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids if pid not in codes}
    print("exit codes", [codes[pid] for pid in pids], flush=True)
    for pid in (store, own_store):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
