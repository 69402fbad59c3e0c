"""What does a save do on a disk that is full? The disk is a real one, of 2 MiB."""

import errno
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.checkpoint import FileSystemWriter, SavePlan

from mics_strategy import CheckpointError
from mics_strategy.checkpoint.save import save_checkpoint
from tests.checkpoint.test_sharded import load_and_tell, run_of
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankPool, raises_on_every_rank

BLOCK_BYTES = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk; tests/checkpoint/test_sharded.py has a pretended one")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def save_twice(ctx: RankContext, run: Run, path: Path, asynchronous: bool) -> None:
    """Job: rank 1 fills the disk before the second save, and writes late, when rank 0 has failed."""
    training = start(ctx, run)
    training.step(0)
    save_checkpoint(path, training.sharded, [training.optimizer])
    training.step(1)
    if ctx.rank == 1:
        _fill(path.parent / "filler")
    begin = FileSystemWriter.prepare_local_plan

    def late(writer: FileSystemWriter, plan: SavePlan) -> SavePlan:
        time.sleep(0.3 * ctx.rank)
        return begin(writer, plan)

    with mock.patch.object(FileSystemWriter, "prepare_local_plan", late):
        save_checkpoint(path, training.sharded, [training.optimizer], asynchronous=asynchronous).wait()


def _fill(file: Path) -> None:
    """Fill a disk but for a little, in which a save can make its folder."""
    try:
        with file.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(BLOCK_BYTES))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    with file.open("r+b") as filler:
        filler.truncate(file.stat().st_size - 2 * BLOCK_BYTES)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_told_on_every_rank_and_leaves_the_older_one(
    ranks: RankPool, small_disk: Path, asynchronous: bool
) -> None:
    run, path = run_of("mics"), small_disk / "last"
    words = r"Rank \d could not write .*No space left on device"
    raises_on_every_rank(lambda: ranks(2, save_twice, run, path, asynchronous), CheckpointError, words)
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["filler", "last"]
    assert [found[2] for found in ranks(2, load_and_tell, run, path)] == [1, 1]
