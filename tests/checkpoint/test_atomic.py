"""Is a checkpoint whole at any moment, and is what is not whole found and named?"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from mics_strategy import CheckpointError
from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.manifest import FORMAT, NAME, FileEntry, Manifest


def write(path: Path, step: int, content: bytes = b"numbers") -> None:
    draft = atomic.begin_draft(path)
    (draft / "data").write_bytes(content)
    atomic.write_manifest(draft, manifest(step, {"data": atomic.entry_of(draft / "data")}))
    atomic.commit(draft, path)


def manifest(step: int, files: dict[str, FileEntry]) -> Manifest:
    scopes = {"params": 2, "grads": 2, "optimizer": 4}
    return Manifest(step=step, world_size=4, scopes=scopes, package_version="0", torch_version="2", files=files)


@pytest.fixture(params=["exchange", "aside"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of replacing: in one step, and on a file system that cannot."""
    if request.param == "exchange":
        yield
        return
    with mock.patch.object(atomic, "_swap", return_value=False):
        yield


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.usefixtures("_way")
def test_a_checkpoint_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-1"
    write(path, 1, b"old")
    write(path, 2, b"new")
    assert (path / "data").read_bytes() == b"new"
    assert atomic.read_manifest(path).step == 2
    assert names(path.parent) == ["step-1"]


def test_this_file_system_exchanges_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert atomic._swap(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "file").read_text() == "other"


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("stop", range(12))
def test_a_kill_between_any_two_steps_leaves_a_whole_one(tmp_path: Path, stop: int) -> None:
    """Every call that changes the folder is counted; the process 'dies' before the call number `stop`."""
    path = tmp_path / "last"
    write(path, 1, b"old")
    done = 0

    def dying(call):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal done
            if done == stop:
                raise Killed
            done += 1
            return call(*args, **kwargs)

        return run

    with mock.patch.multiple(os, rename=dying(os.rename), fsync=dying(os.fsync)):
        with (
            mock.patch.object(atomic.shutil, "rmtree", dying(atomic.shutil.rmtree)),
            mock.patch.object(atomic, "_swap", dying(atomic._swap)),
        ):
            try:
                write(path, 2, b"new")
                killed = False
            except Killed:
                killed = True
                for name in list(atomic._claims):  # which end with the process
                    atomic._release(name)
    assert killed or 5 <= done <= stop  # it ended before that call
    assert atomic.find(path)
    found = atomic.read_manifest(path)
    atomic.check_files(path, found, found.files)
    assert (found.step, (path / "data").read_bytes()) in [(1, b"old"), (2, b"new")]
    assert killed or found.step == 2
    assert atomic.newest_first(tmp_path) == [path]
    write(path, 3, b"next")
    assert names(tmp_path) == ["last"]


WRITER = """
import sys
from pathlib import Path
from tests.checkpoint.test_atomic import write
folder = Path(sys.argv[1])
for step in range(1, 10**6):
    write(folder / "last", step, b"%d " % step * 5000)
    write(folder / f"step-{step}", step, b"%d " % step * 5000)
    print(step, flush=True)
"""


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("after_ms", [3, 11, 29, 53])
def test_a_killed_writer_leaves_whole_checkpoints(tmp_path: Path, after_ms: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            writer.stdout.readline()
        time.sleep(after_ms / 1000)
        os.kill(writer.pid, signal.SIGKILL)
        said = max(map(int, writer.stdout.read().split()), default=3)
    found = atomic.newest_first(tmp_path)
    assert len(found) >= said + 1
    for path in found:
        read = atomic.read_manifest(path)
        atomic.check_files(path, read, read.files)
        assert (path / "data").read_bytes() == b"%d " % read.step * 5000
    assert atomic.read_manifest(found[0]).step >= said


def test_newest_first_by_step(tmp_path: Path) -> None:
    for name, step in (("b", 30), ("a", 200), ("c", 4)):
        write(tmp_path / name, step)
    (tmp_path / "unfinished").mkdir()
    atomic.begin_draft(tmp_path / "d")
    assert [path.name for path in atomic.newest_first(tmp_path)] == ["a", "b", "c"]
    assert atomic.newest_first(tmp_path / "nowhere") == []


def test_a_name_that_begins_like_another_is_left_alone(tmp_path: Path) -> None:
    other = atomic.begin_draft(tmp_path / "last.epoch")
    write(tmp_path / "last", 1)
    assert other.is_dir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(b"numberz"), "has the right size, but other bytes.*SHA-256"),
        (lambda file: file.write_bytes(b"num"), "has 3 bytes, but had 7"),
        (lambda file: file.unlink(), "cannot be read.*No such file"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_damage_is_named(tmp_path: Path, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "step-1"
    write(path, 1)
    read = atomic.read_manifest(path)
    atomic.check_files(path, read, read.files)
    damage(path / "data")
    with pytest.raises(CheckpointError, match=rf"step-1/data` {words}"):
        atomic.check_files(path, read, read.files)


def test_sizes_alone_are_compared_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write(path, 1)
    (path / "data").write_bytes(b"numberz")
    read = atomic.read_manifest(path)
    atomic.check_files(path, read, read.files, digests=False)
    (path / "data").write_bytes(b"num")
    with pytest.raises(CheckpointError, match="has 3 bytes, but had 7"):
        atomic.check_files(path, read, read.files, digests=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a complete manifest"),
        ("[1]", "is not a complete manifest"),
        ('{"format": 1}', "is not a complete manifest"),
        (manifest(1, {}).to_json()[:-40], "is not a complete manifest"),
        (manifest(1, {}).to_json().replace('"step"', '"stop"'), "is not a complete manifest"),
        (manifest(1, {}).to_json().replace('"format": 2', '"format": 99'), f"format 99.*up to {FORMAT}. Upgrade"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path / "step-1", 1)
    (tmp_path / "step-1" / NAME).write_text(text)
    with pytest.raises(CheckpointError, match=rf"step-1/{NAME}` (has )?{words}"):
        atomic.read_manifest(tmp_path / "step-1")
    assert atomic.newest_first(tmp_path) == [tmp_path / "step-1"]


def test_manifests_of_other_versions_are_read() -> None:
    """One of format 1, which says less, and one that says more."""
    expected = manifest(7, {})
    found = json.loads(expected.to_json())
    older = {key: value for key, value in found.items() if key not in ("optimizer_classes", "pending_micro_steps")}
    for other in (older | {"format": 1}, found | {"weather": "fine"}):
        read = Manifest.from_json(json.dumps(other), "here")
        assert (read.step, read.optimizer_classes, read.pending_micro_steps) == (7, (), 0)


def test_a_manifest_reads_as_it_was_written() -> None:
    found = manifest(7, {"a/b": FileEntry(num_bytes=3, sha256="ff")})
    assert Manifest.from_json(found.to_json(), "here") == found


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / "work" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("five years")
    for path in (thesis.parent, thesis):
        with pytest.raises(CheckpointError, match="is not a sharded checkpoint"):
            atomic.begin_draft(path)
    assert thesis.read_text() == "five years"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", 1)
    assert atomic.is_checkpoint(tmp_path / "empty")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with mock.patch.object(Path, "mkdir", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
        with pytest.raises(CheckpointError, match=rf"`{tmp_path}` is not writable \(Read-only file system\)"):
            atomic.begin_draft(tmp_path / "step-1")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that nobody can write, such as /proc")
def test_a_file_system_that_nobody_can_write_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"`/etc/passwd` is not writable \(Not a directory\)\. A file is in the "):
        atomic.begin_draft(Path("/etc/passwd/step-1"))
    with pytest.raises(CheckpointError, match=r"`/proc/checkpoints` is not writable"):
        atomic.begin_draft(Path("/proc/checkpoints/step-1"))
