"""Is a draft that somebody still writes left alone, and one of a dead process removed, wherever that ran?"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from mics_strategy import CheckpointError
from mics_strategy.checkpoint import atomic, claims
from mics_strategy.checkpoint.folder import atomic_checkpoint_folder
from mics_strategy.checkpoint.save import save_checkpoint
from tests.checkpoint.test_atomic import names, write
from tests.checkpoint.test_sharded import run_of
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankPool, raises_on_every_rank

WRITER = """
import sys, time
from pathlib import Path
from mics_strategy.checkpoint import atomic
print(atomic.begin_draft(Path(sys.argv[1])), flush=True)
time.sleep(600)
"""


@pytest.fixture
def _quick() -> Iterator[None]:
    with mock.patch.multiple(claims, _WATCH_S=2.0, _CLAIM_WITHIN_S=0.3):
        yield


@pytest.mark.slow
def test_a_draft_of_a_living_process_is_left_alone_and_one_of_a_dead_process_removed(tmp_path: Path) -> None:
    path = tmp_path / "last"
    write(path, 1)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        draft = Path(writer.stdout.readline().strip())
        with pytest.raises(CheckpointError, match=rf"`{path}` is being saved by another job: process {writer.pid} on"):
            atomic.begin_draft(path)
        assert names(tmp_path) == sorted(["last", draft.name])
        writer.kill()
    write(path, 2)
    assert names(tmp_path) == ["last"]
    assert names(path) == ["data", "manifest.json"]


def of_another_machine(tmp_path: Path) -> Path:
    """A draft that looks as if a process with this one's number had made it elsewhere."""
    draft = tmp_path / ".last.01234567.draft"
    draft.mkdir()
    owner = claims.identity_of(os.getpid()) | {"boot": "another", "host": "node-7", "count": "0"}
    (draft / claims.NAME).write_text(json.dumps(owner))
    return draft


@pytest.mark.usefixtures("_quick")
def test_a_process_elsewhere_is_alive_while_it_counts(tmp_path: Path) -> None:
    draft, is_over = of_another_machine(tmp_path), threading.Event()
    owner = json.loads((draft / claims.NAME).read_text())

    def count() -> None:
        number = 0
        while not is_over.wait(0.1):
            number += 1
            with (draft / claims.NAME).open("r+") as file:  # in place, as a claim does
                file.write(json.dumps(owner | {"count": str(number % 10)}))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on node-7 is writing its draft"):
            atomic.begin_draft(tmp_path / "last")
    finally:
        is_over.set()
        thread.join()
    assert names(tmp_path) == [draft.name]
    write(tmp_path / "last", 1)  # it counts no more
    assert names(tmp_path) == ["last"]


@pytest.mark.parametrize("change", [lambda file: os.utime(file, (0, 0)), Path.unlink], ids=["long ago", "no owner"])
def test_nobody_waits_for_what_was_left_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    draft = of_another_machine(tmp_path)
    change(draft / claims.NAME)
    os.utime(draft, (0, 0))
    monkeypatch.setattr("mics_strategy.checkpoint.claims.time.sleep", lambda seconds: pytest.fail("it waits"))
    write(tmp_path / "last", 1)
    assert names(tmp_path) == ["last"]


@pytest.mark.usefixtures("_quick")
def test_a_number_that_another_process_has_by_now_is_no_owner(tmp_path: Path) -> None:
    draft = of_another_machine(tmp_path)
    (draft / claims.NAME).write_text(json.dumps(claims.identity_of(os.getpid()) | {"pid": 1, "started": "-1"}))
    write(tmp_path / "last", 1)
    assert names(tmp_path) == ["last"]


def save(ctx: RankContext, run: Run, path: Path) -> None:
    save_checkpoint(path, start(ctx, run).sharded)


def save_folder(ctx: RankContext, path: Path) -> None:
    with atomic_checkpoint_folder(path) as draft:
        (draft / "notes").write_text("of mine")


def test_two_jobs_that_save_to_one_folder_are_told_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    path, run = tmp_path / "last", run_of("mics", ranks_per_node=1)
    draft = atomic.begin_draft(path)  # this process is the other job
    for job in (lambda: ranks(2, save, run, path), lambda: ranks(2, save_folder, path)):
        raises_on_every_rank(job, CheckpointError, rf"`{path}` is being saved by another job: process {os.getpid()} on")
    assert names(tmp_path) == [draft.name]
    atomic.abort(draft)
    ranks(2, save_folder, path)
    assert names(path) == ["manifest.json", "notes"]
    assert [*atomic.read_manifest(path).files] == ["notes"]


@pytest.mark.parametrize("way", ["exchange", "aside"])
@pytest.mark.parametrize("before", ["checkpoint", "empty folder", "nothing"])
def test_a_link_stays_and_its_target_is_replaced(ranks: RankPool, tmp_path: Path, before: str, way: str) -> None:
    target, link = tmp_path / "disk" / "step-1", tmp_path / "run" / "last"
    link.parent.mkdir()
    if before == "checkpoint":
        write(target, 1)
    elif before == "empty folder":
        target.mkdir(parents=True)
    link.symlink_to(Path("..", "disk", "step-1"))
    if way == "aside":
        with mock.patch.object(atomic, "_swap", return_value=False):
            write(atomic.real(link), 2)
    else:
        ranks(2, save, run_of("mics", ranks_per_node=1), link)
        ranks(2, save_folder, link)
    assert link.is_symlink()
    assert atomic.find(link)
    assert (names(target.parent), names(link.parent)) == (["step-1"], ["last"])
    assert atomic.remove(link)
    assert (names(target.parent), names(link.parent)) == ([], [])


def interrupted(ctx: RankContext, path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_checkpoint_folder(path):
        raise KeyboardInterrupt
    save_folder(ctx, path)


def test_a_save_that_failed_leaves_no_draft_that_would_stop_the_next(ranks: RankPool, tmp_path: Path) -> None:
    path, run = tmp_path / "last", run_of("mics", ranks_per_node=1)
    ranks(2, interrupted, path)
    (path / "manifest.json").write_text("{}")
    raises_on_every_rank(lambda: ranks(2, save_folder, path), CheckpointError, "is not a complete manifest")
    too_long = tmp_path / ("x" * 300)
    for job in (lambda: ranks(2, save, run, too_long), lambda: ranks(2, save_folder, too_long)):
        raises_on_every_rank(job, CheckpointError, "File name too long")
    assert names(tmp_path) == ["last"]
