"""Does nobody wait for a rank that is gone, and does every rank hear what it waits for?"""

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from mics_strategy import CheckpointError, save_checkpoint, shard
from mics_strategy.checkpoint import shard_report
from mics_strategy.checkpoint.shard_report import StoreChannel
from mics_strategy.comm.consensus import gather_objects
from tests.checkpoint.test_sharded import run_of
from tests.engine.training import start
from tests.ranks import RankContext, RankPool


@pytest.fixture
def _impatient() -> Iterator[None]:
    with mock.patch.multiple(shard_report, _HEARTBEAT_S=0.05, _SILENT_S=0.5):
        yield


@pytest.mark.usefixtures("_impatient")
def test_a_slow_rank_is_waited_for_and_a_silent_one_is_not() -> None:
    store = dist.HashStore()
    slow, listener = StoreChannel(store, "one", 3), StoreChannel(store, "one", 0)
    with slow.heartbeat():
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match="Rank 2 has written no heartbeat"):
            listener.recv("share 2", 2)
        assert time.monotonic() - begun > 0.5
        slow.send("share 3", b"here")
        assert listener.recv("share 3", 3) == b"here"


def late(ctx: RankContext, folder: Path) -> None:
    """Rank 1 takes four times as long as a silent rank is waited for."""
    training = start(ctx, run_of("mics"))
    training.step(0)
    write = FileSystemWriter.write_data

    def slowly(*args: object) -> object:
        time.sleep(2.0 if ctx.rank == 1 else 0.0)
        return write(*args)  # type: ignore[arg-type]

    with (
        mock.patch.multiple(shard_report, _HEARTBEAT_S=0.05, _SILENT_S=0.5),
        mock.patch.object(FileSystemWriter, "write_data", slowly),
    ):
        save_checkpoint(folder / "one", training.sharded, [training.optimizer])


def test_a_rank_that_is_slow_to_write_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, late, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def _end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _saving(rank: int, store_file: Path, folder: Path, errors_folder: Path) -> None:
    """A process of its own, which no launcher watches; rank 1 is killed while it writes."""
    store = dist.FileStore(str(store_file), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    model = torch.nn.Linear(4, 4)
    sharded = shard(model, "zero3")
    if rank == 1:
        mock.patch.object(FileSystemWriter, "write_data", _end).start()
    with mock.patch.multiple(shard_report, _HEARTBEAT_S=0.1, _SILENT_S=1.0):
        try:
            save_checkpoint(folder / "one", sharded)
        except CheckpointError as error:
            (errors_folder / str(rank)).write_bytes(pickle.dumps(str(error)))
    os._exit(0)


def test_a_rank_that_dies_while_it_writes_is_named_on_all_others(tmp_path: Path) -> None:
    folder, errors_folder = tmp_path / "saves", tmp_path / "errors"
    folder.mkdir()
    errors_folder.mkdir()
    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            _saving(rank, tmp_path / "store", folder, errors_folder)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert "Rank 1 has written no heartbeat" in pickle.loads((errors_folder / str(rank)).read_bytes())
    assert not list(folder.iterdir())


def test_what_was_told_leaves_the_store(tmp_path: Path, ranks: RankPool) -> None:
    before, *after = ranks(2, _keys_after_saves, tmp_path)[0]
    assert after == [before + 1] * 3  # how the last save ended


def _keys_after_saves(ctx: RankContext, folder: Path) -> list[int]:
    training = start(ctx, run_of("mics"))
    store = dist.distributed_c10d._get_default_store()
    gather_objects(None)  # its own entries, which stay
    dist.barrier()
    counts = [store.num_keys()]
    for name in ("one", "two", "three"):
        save_checkpoint(folder / name, training.sharded)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def _save_beside_a_stranger(ctx: RankContext, folder: Path, kind: str) -> str:
    """What every rank is told when something else stands in the store in the place of rank 1's words."""
    training, tell = start(ctx, run_of("mics")), StoreChannel.send
    strange = {"pickled": pickle.dumps(Bomb(folder / "ran")), "of another kind": b'{"items": [], "paths": 3}'}[kind]

    def instead(self: StoreChannel, what: str, value: bytes) -> None:
        tell(self, what, strange if what == "share 1" else value)

    with mock.patch.object(StoreChannel, "send", instead), pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder / "one", training.sharded)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["pickled", "of another kind"])
def test_nothing_that_the_store_holds_is_run(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for said in ranks(2, _save_beside_a_stranger, tmp_path, kind):
        assert "The job's store holds no valid report of rank 1" in said
    assert not list(tmp_path.iterdir())
