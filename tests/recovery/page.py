"""The example of docs/recovery.md on two nodes of two ranks: ``python -m tests.recovery.page`` kills the second one."""

import os
import re
import signal
from pathlib import Path

import torch
import torch.distributed  # before the fork

import mics_strategy.api
import mics_strategy.recovery.attempt  # noqa: F401
from tests.recovery.job import run_store

PAGE = Path(__file__).parents[2] / "docs" / "recovery.md"
DIES_BEFORE_STEP = 40


def run_rank(rank: int, port: int, code: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="4", GROUP_RANK=str(rank // 2), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    step = torch.optim.lr_scheduler.StepLR.step

    def step_or_die(scheduler: torch.optim.lr_scheduler.StepLR) -> None:
        if rank >= 2 and scheduler.last_epoch == DIES_BEFORE_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        step(scheduler)

    torch.optim.lr_scheduler.StepLR.step = step_or_die  # type: ignore[method-assign]
    exec(compile(code, str(PAGE), "exec"), {})
    os._exit(0)


def main() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    torch.set_num_threads(1)
    reader, writer = os.pipe()
    store_pid = os.fork()
    if not store_pid:
        run_store(writer)
    port = int(os.read(reader, 16))
    pids = []
    for rank in range(4):
        pid = os.fork()
        if not pid:
            try:
                run_rank(rank, port, code)
            finally:
                os._exit(1)
        pids.append(pid)
    print("exit codes", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
    os.kill(store_pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
