"""Does a rank go on when a message has stopped in its middle?

A message that does not fit into the buffers of its socket is sent in parts. Gloo wakes nobody who waits for the rest.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from mics_strategy.comm.desync import DesyncWatchdog
from mics_strategy.comm.queue import CommThread, TaskSteps
from mics_strategy.comm.transport import GlooTransport
from mics_strategy.comm.workspace import Workspace

rank, size = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=size)
transport = GlooTransport(dist.new_group(list(range(size))), "all")
thread = CommThread("thread", DesyncWatchdog(rank), [transport])
sent, received = torch.zeros(size, 40_000_000), torch.zeros(size, 40_000_000)  # 160 MB a message

def exchange():
    messages = transport.exchange(received.view(-1), sent.view(-1), 7)
    yield
    messages.wait()

def submit():
    return thread.submit("Task", "numbers", frozenset(range(size)), TaskSteps(exchange, None, Workspace()))

def report(wait):
    try:
        wait()
    except RuntimeError as error:
        print(error, flush=True)

def die(signal_number):
    if rank == 1:
        time.sleep(0.01)
        os.kill(os.getpid(), signal_number)

dist.barrier()
"""
CANCELS = """
queued = submit()
die(signal.SIGSTOP)
time.sleep(0.5)
transport.cancel()
thread.fail_stuck()
for work in (queued, submit()):
    report(work.join)
thread.close()
"""
WAITS = """
queued = submit()
die(signal.SIGKILL)
report(queued.wait)
thread.close()
"""
WAITS_TWICE = """
first = submit()
die(signal.SIGSTOP)
report(first.wait)
sent += rank + 1
second = submit()
report(second.wait)
print(received[1 - rank][0].item(), received[1 - rank][-1].item(), flush=True)
thread.close()
"""
BETWEEN_HOSTS = """
from mics_strategy.comm.host_messages import HostMessages
messages = HostMessages("hosts")
waits, others = messages.waits("hosts"), [other for other in range(size) if other != rank]
works = [(other, messages.recv(received[other], other, 1)) for other in others]
works += [(other, messages.send(sent[other], other, 1)) for other in others]
die(signal.SIGKILL)
report(lambda: waits.wait(works))
messages.close()
"""


def run(
    folder: Path, size: int, script: str, waits_for: list[int], stopped_s: float = 0.0
) -> tuple[list[list[str]], list[int]]:
    """What ranks print, and how all have ended; those for which nobody waits are killed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT + script]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder / "store"), str(size)], env=env, stdout=-1, text=True)
        for rank in range(size)
    ]
    try:
        if stopped_s:
            time.sleep(stopped_s)
            ranks[1].send_signal(signal.SIGCONT)
        printed = [ranks[rank].communicate(timeout=90)[0].splitlines() for rank in waits_for]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return printed, [rank.returncode for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("script", [WAITS, BETWEEN_HOSTS], ids=["in a step", "between hosts"])
def test_who_waits_for_the_rest_of_a_message_of_a_dead_rank_is_told(tmp_path: Path, script: str) -> None:
    """By gloo, if no part of its message has arrived; rank 2 may see the end of rank 0 before that of rank 1."""
    printed, codes = run(tmp_path, 3, script, [0, 2])
    told = "rank [01] ended before a message was complete|.*Connection (reset|closed) by peer.*"
    assert all(len(lines) == 1 and re.fullmatch(told, lines[0]) for lines in printed), printed
    assert codes == [0, -signal.SIGKILL, 0]


@pytest.mark.slow
def test_who_is_stopped_in_the_middle_of_a_message_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """The waiting rank asks the connection twice or more meanwhile."""
    printed, codes = run(tmp_path, 2, WAITS_TWICE, [0, 1], stopped_s=16.0)  # with the start of the interpreters
    assert printed == [["2.0 2.0"], ["1.0 1.0"]]
    assert codes == [0, 0]


@pytest.mark.slow
def test_what_was_sent_in_part_is_given_up_when_it_is_cancelled(tmp_path: Path) -> None:
    printed, codes = run(tmp_path, 2, CANCELS, [0])
    assert printed == [["a message of which a part had been sent or had arrived was given up"] * 2]
    assert codes == [0, -signal.SIGKILL]
