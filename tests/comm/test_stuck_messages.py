"""Does a rank go on when a message has stopped in its middle?

A message that does not fit into the buffers of its socket is sent in parts. Gloo wakes nobody who waits for the rest.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from mics_strategy.comm.desync import DesyncWatchdog
from mics_strategy.comm.queue import CommThread, TaskSteps
from mics_strategy.comm.transport import GlooTransport
from mics_strategy.comm.workspace import Workspace

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
transport, thread = GlooTransport(dist.new_group([0, 1]), "two"), CommThread("thread", DesyncWatchdog(rank))
sent, received = torch.zeros(2, 40_000_000), torch.zeros(2, 40_000_000)  # 160 MB a message

def exchange():
    messages = transport.exchange(received.view(-1), sent.view(-1), 7)
    yield
    messages.wait()

def submit():
    return thread.submit("Task", "numbers", frozenset([0, 1]), TaskSteps(exchange, None, Workspace()))

dist.barrier()
queued = submit()
if rank == 1:
    time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
transport.cancel()
thread.fail_stuck()
for work in (queued, submit()):
    try:
        work.join()
    except RuntimeError as error:
        print(error, flush=True)
thread.close([transport])
"""


@pytest.mark.slow
def test_what_was_sent_in_part_is_given_up_when_it_is_cancelled(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")], env=env, stdout=-1, text=True
        )
        for rank in range(2)
    ]
    try:
        printed = ranks[0].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert printed.splitlines() == ["a message of which a part had been sent or had arrived was given up"] * 2
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]
