"""Does a process that has trained on gloo end in order?

A thread of gloo that frees a tensor after the interpreter has gone aborts the process, once in a few hundred runs. So
the threads must be gone before that, and the test looks at the threads.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

SCRIPT = """
import atexit, os, sys
from pathlib import Path

def print_threads():
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(sum(name.startswith("pt_gloo") for name in names), flush=True)

atexit.register(print_threads)  # the first to be registered runs last

import torch
import torch.distributed as dist
from mics_strategy import shard

rank, path, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
sharded = shard(model, "zero3", units=[torch.nn.Linear])
model(torch.ones(2, 4)).sum().backward()
sharded.full_state_dict()
print_threads()
if ending == "forks" and os.fork() == 0:
    sys.exit(3)
if ending == "forks":
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
if ending == "fails" and rank == 0:
    sharded.mark_modified()
    model(torch.ones(2, 4))  # gathers that rank 1 never takes part in
dist.destroy_process_group()
"""


def _endings(directory: Path, ending: str) -> list[tuple[int, list[int]]]:
    """Exit code of both ranks, and their numbers of gloo threads: after training, and at the very end."""
    path = str(directory / "store")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), path, ending], env=env, stdout=-1, text=True)
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=50)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, list(map(int, out.split()))) for rank, out in zip(ranks, printed, strict=True)]


def test_gloo_has_no_threads_when_the_interpreter_ends(tmp_path: Path) -> None:
    for exit_code, (training, at_end) in _endings(tmp_path, "in order"):
        assert exit_code == 0
        assert training > 0
        assert at_end == 0


def test_a_rank_whose_peer_has_left_ends_too(tmp_path: Path) -> None:
    (exit_code, _), (other, _) = _endings(tmp_path, "fails")
    assert exit_code == 1
    assert other == 0


def test_a_forked_child_ends_as_it_wants(tmp_path: Path) -> None:
    for exit_code, (_, *of_child, _) in _endings(tmp_path, "forks"):
        assert exit_code == 0
        assert of_child[-1] == 3
