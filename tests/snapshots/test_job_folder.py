"""Is a job's folder found by that job alone, this user's alone, and removed when the job is over?"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mics_strategy import CheckpointError
from mics_strategy.checkpoint.claims import identity_of
from mics_strategy.snapshots import job_folder
from mics_strategy.snapshots.job_folder import (
    JobFolder,
    known_job,
    launcher_key,
    launcher_of,
    remove_left_overs,
    user_folder,
)
from mics_strategy.snapshots.user_files import open_private, read_private, write_private


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(job_folder, "num_begun", {})


@pytest.mark.usefixtures("under_torchrun")
def test_a_launcher_finds_its_job_again_and_another_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = user_folder(tmp_path)
    key = launcher_key(os.getppid())
    assert known_job(folder, key) is None
    JobFolder(folder, "a-job").name_launcher(os.getppid(), key)
    monkeypatch.setattr(job_folder, "num_begun", {})  # a new process of the same launcher
    assert known_job(folder, launcher_key(os.getppid())) == "a-job"
    assert known_job(folder, launcher_key(os.getppid())) is None  # the second training of this process
    monkeypatch.setattr(job_folder, "num_begun", {})
    assert launcher_key(os.getpid()) != key


@pytest.mark.usefixtures("under_torchrun")
def test_a_later_process_with_the_launchers_number_is_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    key = launcher_key(os.getppid())
    here = identity_of(os.getppid())
    for change in ({"started": "1"}, {"boot": "another"}, {"namespace": "pid:[1]"}):
        monkeypatch.setattr(job_folder, "num_begun", {})
        monkeypatch.setattr(job_folder, "identity_of", lambda pid, change=change: here | change)
        assert launcher_key(os.getppid()) != key


def test_without_a_launcher_no_job_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launcher_of(begins_again=False) == 0
    assert launcher_key(0) == ""
    JobFolder(user_folder(tmp_path), "a-job").name_launcher(0, "")
    assert known_job(user_folder(tmp_path), "") is None


@pytest.mark.usefixtures("under_torchrun")
def test_a_training_is_started_again_by_its_launcher_or_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_of(begins_again=True) == launcher_of(begins_again=False) == os.getppid()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launcher_of(begins_again=True) == os.getpid()


WRONG: dict[str, Callable[[Path], Any]] = {
    "a link": lambda path: path.symlink_to(path.parent),
    "a file": lambda path: path.write_text(""),
    "a mode": lambda path: (path.mkdir(), path.chmod(0o750)),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_a_folder_that_another_user_may_have_made_is_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path / f"mics_strategy-{os.geteuid()}")
    with pytest.raises(CheckpointError, match=r"is not used for snapshots: it.*Another user.*Remove it"):
        user_folder(tmp_path)


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = user_folder(tmp_path)
    write_private(folder / "file", b"x")
    assert read_private(folder / "file") == b"x"
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(CheckpointError, match=f"belongs to the user {own} and not to {own + 1}"):
        read_private(folder / "file")
    with pytest.raises(CheckpointError, match=f"belongs to the user {own}"):
        job_folder.check_private_folder(folder)


def test_a_link_to_a_file_is_not_read(tmp_path: Path) -> None:
    write_private(tmp_path / "file", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(CheckpointError, match="missing, or a link"), open_private(tmp_path / "link"):
        pass


HOLDER = """
import sys, time
from pathlib import Path
from mics_strategy.snapshots.job_folder import JobFolder
folder = JobFolder(Path(sys.argv[1]), "a-job")
folder.lock()
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.interpreter
def test_a_living_job_keeps_its_folder_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "_LOCK_WITHIN_S", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        age(tmp_path / "a-job")
        assert remove_left_overs(tmp_path, "another") == []
        with pytest.raises(CheckpointError, match=r"`a-job` already runs on this node.*name of its own"):
            JobFolder(tmp_path, "a-job").lock()
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()
    age(tmp_path / "a-job")
    assert remove_left_overs(tmp_path, "another") == ["a-job"]


def age(folder: Path) -> None:
    """Let a folder be two days old."""
    then = time.time() - 2 * job_folder.LEFT_OVER_S
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


LAUNCHERS = {"lives": (os.getpid, []), "is gone": (lambda: 2**22, ["old"])}


@pytest.mark.parametrize(("pid", "removed"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_job_whose_launcher_lives_is_no_left_over(pid: Callable[[], int], removed: list[str], tmp_path: Path) -> None:
    """It may be between two attempts, when no process has its lock."""
    path = JobFolder(tmp_path, "old").path
    write_private(path / "launcher-1.json", json.dumps(identity_of(pid())).encode())
    age(path)
    assert remove_left_overs(tmp_path, "new") == removed


def test_left_overs_are_removed_by_age_and_this_jobs_are_not(tmp_path: Path) -> None:
    for name in ("old", "young", "own"):
        JobFolder(tmp_path, name)
    age(tmp_path / "old")
    age(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    assert remove_left_overs(tmp_path, "own") == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "own", "young"]


def test_a_process_has_one_object_for_a_job(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "a-job")
    with pytest.raises(CheckpointError, match="already keeps snapshots of the job `a-job`"):
        JobFolder(tmp_path, "a-job")
    folder.release()
    JobFolder(tmp_path, "a-job").release()
