"""How does an unchanged script start with us?

::

    torchrun --nproc-per-node 8 -m mics_strategy.run train.py --lr 1e-3
    accelerate launch --config_file mics.yaml -m mics_strategy.run -m package.train --lr 1e-3

With the launcher's file that is needed only where torch's autoload is switched off (see `mics_strategy_autoload`).

The script finds everything as if Python had started it, and its Accelerators are sharded: as ``mics.yaml`` says, else
by the preset "mics".
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from mics_strategy.errors import MiCSError

_USAGE = (
    "usage: python -m mics_strategy.run SCRIPT [ARGUMENTS]\n       python -m mics_strategy.run -m MODULE [ARGUMENTS]"
)
_NOT_STARTED = 2  # the exit code that Python itself gives


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script or a module as the main program; what it raises is raised.

    Args:
        arguments: The script and its arguments, or ``-m``, the module and its arguments.

    Returns:
        0 when it has run, 2 when there was nothing to run.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_module = given[:1] == ["-m"]
    what, own = (given[1:2], given[2:]) if is_module else (given[:1], given[1:])
    if not what or what[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if what in (["-h"], ["--help"]) else _NOT_STARTED
    (name,) = what
    problem = _problem_of_module(name) if is_module else _problem_of_script(Path(name))
    if problem is None:
        problem = _load()
    if problem is not None:
        print(f"mics_strategy.run: {problem}", file=sys.stderr)
        return _NOT_STARTED
    sys.argv[:] = [name, *own]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    _run_script(Path(name))
    return 0


def _run_script(script: Path) -> None:
    """Run a file, or a folder or archive with a `__main__.py`; until the process ends it is the main module."""
    is_plain = script.is_file() and not zipfile.is_zipfile(script)
    if not sys.flags.safe_path:  # Python has put the current directory there; a folder puts itself there
        sys.path[:1] = [str(script.resolve().parent)] if is_plain else []
    if not is_plain:
        runpy.run_path(str(script), run_name="__main__")
        return
    file = str(script.absolute())
    loader = SourceFileLoader("__main__", file)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(file), file), module.__dict__)


def _problem_of_script(script: Path) -> str | None:
    if script.exists():
        return None
    hint = f" A module's name is given after `-m`: `-m {script}`." if script.suffix != ".py" else ""
    return f"there is no script `{script}` in {os.getcwd()}.{hint}"


def _problem_of_module(name: str) -> str | None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        return f"there is no module `{name}` ({error}), neither in {os.getcwd()} nor installed."
    return None if found else f"there is no module `{name}`, neither in {os.getcwd()} nor installed."


def _load() -> str | None:
    """Load the adapter, and have it asked for; why that is not possible."""
    if importlib.util.find_spec("accelerate") is None:
        return "Accelerate is not installed. `pip install mics_strategy[accelerate]`."
    from mics_strategy.accelerate import launch

    try:
        launch.enable()
    except MiCSError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
