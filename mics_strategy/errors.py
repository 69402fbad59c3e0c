"""Errors of this package.

Every error says what was requested, what was found and what to do. Each class is also the builtin that a caller would
expect, so ``except ValueError`` keeps working.
"""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the names that resemble `name`, and at all names, for an error."""
    known = sorted(names)
    matches = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
    return f"{hint} Use one of {', '.join(known)}."


class MiCSError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MiCSError, ValueError):
    """An option, or a combination of options with this job, is not supported."""


class ShapeError(MiCSError, ValueError):
    """A buffer does not have the size that a collective or a layout requires."""


class LifecycleError(MiCSError, RuntimeError):
    """The state of a unit, a parameter or a gradient does not allow an operation."""


class CheckpointError(MiCSError, RuntimeError):
    """A checkpoint cannot be written, read or applied."""


class CommunicationError(MiCSError, RuntimeError):
    """A collective failed: a peer died, diverged or did not answer in time."""


class NoFeasiblePlan(MiCSError, ValueError):
    """No configuration fits into the memory of a rank."""


def command_error(command: str, error: MiCSError | OSError) -> str:
    """The line with which ``mics <command>`` ends where its user can repair the cause.

    Raises:
        OSError: `error`, if it is of no path.
    """
    text = str(error)
    if isinstance(error, OSError):
        if error.filename is None:
            raise error
        is_kind = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a folder is needed there, and a file is in its place" if is_kind else error.strerror
        text = f"`{error.filename}` cannot be used: {reason}. Name another path, or correct this one."
    return f"mics {command}: {text}"
