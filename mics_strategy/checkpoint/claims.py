"""Is somebody still writing a draft, or was it left behind by a process that died?

The process that makes a draft keeps a file in it that names the process and counts up every few seconds. On the same
machine the process table says whether the owner lives. Processes of other machines, and of other containers, are not in
it: there the count is watched, which needs neither common clocks nor locks, that not every shared file system has.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path

NAME = ".owner.json"
_BEAT_S = 5.0  # between two counts
_WATCH_S = 30.0  # without a new count, after which an owner elsewhere is taken for dead
_BIRTH_S = 2.0  # between the draft and its owner's file
_OLD_S = 600.0  # since the last count, by the file system's clock: nothing to be watched


class Claim:
    """This process's claim on a draft, held until `release`.

    Args:
        draft: An existing folder.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, draft: Path) -> None:
        self._file = draft / NAME
        self._is_released = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name=f"claim on {draft.name}", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop counting. The file stays; others find that nobody counts."""
        self._is_released.set()
        self._thread.join()

    def _beat(self) -> None:
        count = 0
        while not self._is_released.wait(_BEAT_S):
            count += 1
            with contextlib.suppress(OSError):  # whoever writes the draft itself is told
                self._write(count)

    def _write(self, count: int) -> None:
        """In place and always as long, so that a reader never finds less than an owner."""
        text = json.dumps(_identity() | {"count": f"{count:012}"})
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, text.encode(), 0)
        finally:
            os.close(descriptor)


def living_owner(draft: Path, now: float, own: Collection[str]) -> str | None:
    """Who still writes a draft; None where nobody does.

    Args:
        draft: The folder.
        now: Time by the clock of its file system: when something was written there just now.
        own: Names of the drafts on which this process has a claim.

    Cost:
        30 s where the owner ran on another machine, or in another container, and counted within ten minutes.
    """
    first = _read(draft)
    deadline_s = time.monotonic() + _BIRTH_S
    while first is None and _may_get_an_owner(draft, now) and time.monotonic() < deadline_s:
        time.sleep(0.05)
        first = _read(draft)
    if first is None:
        return None  # of an older version, or its process died while it made the draft
    owner, text = first
    me = _identity()
    words = f"process {owner.get('pid')} on {owner.get('host')}"
    if {key: owner.get(key) for key in me} == me:
        return words if draft.name in own else None
    if all(owner.get(key) == me[key] for key in ("boot", "namespace")) and me["boot"]:
        return words if _start_of(owner.get("pid")) == owner.get("started") else None
    if now - _time_of(draft / NAME) > _OLD_S:
        return None
    deadline_s = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        found = _read(draft)
        if found is None and not draft.exists():
            return None  # published or discarded meanwhile
        if found is not None and found[1] != text:
            return words
    return None


def _may_get_an_owner(draft: Path, now: float) -> bool:
    """Whether a draft was just made, or its owner's file is there and could not be read."""
    return (draft / NAME).exists() or now - _time_of(draft) < _BIRTH_S


def _time_of(path: Path) -> float:
    """When something was last written, by the clock of the file system; long ago where there is nothing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(draft: Path) -> tuple[dict[str, object], str] | None:
    """What the owner's file says; opened anew, so that a network file system does not answer from its cache."""
    try:
        text = (draft / NAME).read_text()
        found = json.loads(text)
    except (OSError, ValueError):
        return None
    return (found, text) if isinstance(found, dict) else None


def _identity() -> dict[str, object]:
    """This process: by its machine's boot and its table of processes, where that is known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "namespace": namespace,
        "pid": pid,
        "started": _start_of(pid),
    }


def _start_of(pid: object) -> str | None:
    """When a process began, in ticks since the boot; None where there is none. A number may be another's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
