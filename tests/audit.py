"""What a piece of code does beyond computing, as Python's audit hooks report it."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_RUN = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")
_CHANGE = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "shutil.rmtree")
_REACH = ("socket.connect", "socket.getaddrinfo", "urllib.Request", "webbrowser.open", "ctypes.dlopen")
_NAMED = frozenset((*_RUN, *_CHANGE, *_REACH, "exec", "compile", "import", "builtins.input"))
_active: "list[Audit]" = []


class Audit:
    """Commands, imports, writes, connections and reads of files while it is entered.

    Other threads that run already are not watched: a heartbeat that an earlier test has left, for example.

    Args:
        reads: Files and folders that may be read.
        imports: Modules that may be imported, with all that they import; "*" for any.

    Attributes:
        events: One line each; empty where nothing else was done.
    """

    def __init__(self, reads: Sequence[Path] = (), imports: Sequence[str] = ()) -> None:
        self.events: list[str] = []
        self._reads = [str(path) for path in reads]
        self._imports = imports
        self._earlier_threads: set[int | None] = set()

    def __enter__(self) -> Self:
        _install()
        self._earlier_threads = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.remove(self)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Keep an event that is not allowed."""
        if threading.get_ident() in self._earlier_threads:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & 0o3)
            is_read = not writes and any(str(path).startswith(start) for start in self._reads)
            if not is_read and not self._imports and not str(path).endswith((".py", ".pyc")):
                self.events.append(f"open {path!r} {mode}")
            elif writes:
                self.events.append(f"write {path!r} {mode}")
        elif event in _NAMED and not (event in ("exec", "compile", "import") and self._imports):
            self.events.append(f"{event} {str(arguments)[:200]}")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for audit in _active:
        audit.note(event, arguments)


def _install(installed: list[bool] = []) -> None:  # noqa: B006  # hooks cannot be removed, so there is one
    if not installed:
        sys.addaudithook(_hook)
        installed.append(True)
