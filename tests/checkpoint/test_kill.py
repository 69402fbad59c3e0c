"""Is the newest checkpoint whole, whenever and whoever is killed?"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mics_strategy.checkpoint import atomic
from tests.checkpoint.saver import value_after

pytestmark = pytest.mark.slow

_STEPS = 10**6
_SAVES = 50


def start_ranks(folder: Path, world_size: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.saver", str(folder), str(_STEPS)],
            env={**os.environ, **common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("killed", ["rank 0", "rank 1", "all"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_newest_checkpoint_is_whole_after_a_kill(tmp_path: Path, killed: str, seed: int) -> None:
    """The job is killed at a random instant while it saves, after up to fifty saves."""
    chance = random.Random(f"{killed} {seed}")
    ranks = start_ranks(tmp_path, 2)
    try:
        said = follow(ranks[0], chance.randrange(3, _SAVES))
        time.sleep(chance.random() / 20)
        for rank in {"rank 0": [0], "rank 1": [1], "all": [0, 1]}[killed]:
            ranks[rank].send_signal(signal.SIGKILL)
        time.sleep(0.5)  # what the other rank does then may not harm the folder either
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    found = atomic.newest_first(tmp_path)
    assert found
    for path in found:
        assert_whole(path)
    assert atomic.read_manifest(found[0]).world_size == 2
    assert max(step_in(path) for path in found) >= said - 1  # an asynchronous save may have been under way


def follow(rank: subprocess.Popen[str], count: int) -> int:
    """Read what it says until it has begun `count` saves."""
    assert rank.stdout is not None
    for line in rank.stdout:
        if int(line) >= count:
            return int(line)
    raise AssertionError("the job ended by itself")


def assert_whole(path: Path) -> None:
    """Every file is as it was written, and every number is the one of the checkpoint's step."""
    manifest = atomic.read_manifest(path)
    atomic.check_files(path, manifest, manifest.files)
    dcp_to_torch_save(path, path.parent / "whole.pt")
    found: dict[str, Any] = torch.load(path.parent / "whole.pt", weights_only=True)
    expected = value_after(step_in(path))
    assert all((value == expected).all() for value in found["model"].values())
    assert len(found["model"]) == 8


def step_in(path: Path) -> int:
    return int(torch.load(path / "meta.pt", weights_only=True)["step"])
