"""Owners of drafts: is a draft being written, or left by a dead process.

The process that makes a draft writes a file into it that names the process and holds a counter, increased every few
seconds. On the same machine, the process table shows whether the owner is alive. It does not show processes of other
machines and containers. For those the counter is watched, which needs neither synchronized clocks nor locks; not every
shared file system has these.
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
_BEAT_S = 5.0  # interval of the counter
_WATCH_S = 30.0  # without a new count, after which a remote owner counts as dead
_CLAIM_WITHIN_S = 2.0  # between the making of a draft and of its owner file
_STALE_S = 600.0  # since the last count, by the file system's clock, after which the owner counts as dead


class Claim:
    """This process's claim on a draft, held until `release`.

    Args:
        draft: Existing folder.

    Raises:
        OSError: The owner file cannot be written.
    """

    def __init__(self, draft: Path) -> None:
        self._file = draft / NAME
        self._is_released = threading.Event()
        self._write(0)
        self._thread = threading.Thread(target=self._beat, name=f"claim on {draft.name}", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop counting. The file remains; others see that its counter stands still."""
        self._is_released.set()
        self._thread.join()

    def _beat(self) -> None:
        count = 0
        while not self._is_released.wait(_BEAT_S):
            count += 1
            with contextlib.suppress(OSError):  # the write of the draft itself raises
                self._write(count)

    def _write(self, count: int) -> None:
        """Write in place with constant length, so that readers never see a part."""
        text = json.dumps(identity_of(os.getpid()) | {"count": f"{count:012}"})
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, text.encode(), 0)
        finally:
            os.close(descriptor)


def living_owner(draft: Path, now: float, claimed: Collection[str]) -> str | None:
    """Describe the living process that writes a draft; None if there is none.

    Args:
        draft: Folder of the draft.
        now: Current time by the clock of the draft's file system, such as that of a file written just now.
        claimed: Names of the drafts that this process has claimed.

    Cost:
        30 s if the owner ran on another machine or in another container, and counted within the last ten minutes.
    """
    first = _read(draft)
    deadline_s = time.monotonic() + _CLAIM_WITHIN_S
    while first is None and _may_be_claimed(draft, now) and time.monotonic() < deadline_s:
        time.sleep(0.05)
        first = _read(draft)
    if first is None:
        return None  # written by an older version, or the process died while making the draft
    owner, text = first
    local_identity = identity_of(os.getpid())
    description = f"process {owner.get('pid')} on {owner.get('host')}"
    if {key: owner.get(key) for key in local_identity} == local_identity:
        return description if draft.name in claimed else None
    if all(owner.get(key) == local_identity[key] for key in ("boot", "namespace")) and local_identity["boot"]:
        return description if _start_of(owner.get("pid")) == owner.get("started") else None
    if now - _time_of(draft / NAME) > _STALE_S:
        return None
    deadline_s = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        latest = _read(draft)
        if latest is None and not draft.exists():
            return None  # committed or removed meanwhile
        if latest is not None and latest[1] != text:
            return description
    return None


def _may_be_claimed(draft: Path, now: float) -> bool:
    """Whether a draft was just made, or has an owner file that could not be read."""
    return (draft / NAME).exists() or now - _time_of(draft) < _CLAIM_WITHIN_S


def _time_of(path: Path) -> float:
    """Time of the last write, by the file system's clock; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(draft: Path) -> tuple[dict[str, object], str] | None:
    """Read the owner file. It is opened again each time, to bypass network caches."""
    try:
        text = (draft / NAME).read_text()
        owner = json.loads(text)
    except (OSError, ValueError):
        return None
    return (owner, text) if isinstance(owner, dict) else None


def identity_of(pid: int) -> dict[str, object]:
    """Identify a process, by the machine's boot and the process table if known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "namespace": namespace,
        "pid": pid,
        "started": _start_of(pid),
    }


def _start_of(pid: object) -> str | None:
    """Return the start time of a process in ticks since boot; None if it is not alive.

    It tells a process from a later one with the same number.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
