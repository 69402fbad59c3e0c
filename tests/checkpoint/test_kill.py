"""Is the newest checkpoint whole, whenever and whoever is killed?"""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mics_strategy import ShardConfig, shard
from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.save import save_checkpoint
from tests.ranks import RankContext, RankError, RankPool

pytestmark = pytest.mark.slow

_SAVES = 50
VICTIMS = {"rank 0": [0], "rank 1": [1], "all": [0, 1]}


def saves_until_killed(ctx: RankContext, folder: Path) -> None:
    """A checkpoint after every step; its step is its every number, and stands in its name and in `extra`."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    sharded = shard(model, ShardConfig.preset("mics"), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (folder / f"pid-{ctx.rank}").write_text(str(os.getpid()))
    for step in range(1, 10**6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        path = folder / "saved" / ("last" if step % 2 else f"step-{step}")
        save_checkpoint(path, sharded, [optimizer], {"step": step}, asynchronous=step % 3 == 0)
        if ctx.rank == 0:
            with (folder / "begun").open("a") as file:
                file.write("x")


def num_begun(folder: Path) -> int:
    """How many saves have begun."""
    file = folder / "begun"
    return len(file.read_text()) if file.exists() else 0


def kill(folder: Path, victims: list[int], count: int, delay_s: float) -> None:
    """Kill ranks some time after so many saves have begun."""
    while num_begun(folder) < count:
        time.sleep(0.01)
    time.sleep(delay_s)
    for rank in victims:
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("killed", VICTIMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_newest_checkpoint_is_whole_after_a_kill(ranks: RankPool, tmp_path: Path, killed: str, seed: int) -> None:
    """At a random instant of the saving, after up to fifty saves; what another rank does then harms nothing either."""
    chance, saved = random.Random(f"{killed} {seed}"), tmp_path / "saved"
    saved.mkdir()
    arguments = (tmp_path, VICTIMS[killed], chance.randrange(3, _SAVES), chance.random() / 20)
    killer = threading.Thread(target=kill, args=arguments, daemon=True)
    killer.start()
    with pytest.raises(RankError, match="exit code -9"):
        ranks(2, saves_until_killed, tmp_path)
    killer.join()
    found = atomic.newest_first(saved)
    assert found
    for path in found:
        assert_whole(path)
    assert atomic.read_manifest(found[0]).world_size == 2
    assert max(step_in(path) for path in found) >= num_begun(tmp_path) - 1  # an asynchronous save may be under way


def assert_whole(path: Path) -> None:
    """Every file is as it was written, and every number is the one of the checkpoint's step."""
    manifest = atomic.read_manifest(path)
    atomic.check_files(path, manifest, manifest.files)
    dcp_to_torch_save(path, path.parent / "whole.pt")
    found: dict[str, Any] = torch.load(path.parent / "whole.pt", weights_only=True)
    assert all((value == step_in(path)).all() for value in found["model"].values())
    assert len(found["model"]) == 8


def step_in(path: Path) -> int:
    return int(torch.load(path / "meta.pt", weights_only=True)["step"])
