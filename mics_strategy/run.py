"""Launcher that runs an unchanged script with sharding.

::

    torchrun --nproc-per-node 8 -m mics_strategy.run train.py --lr 1e-3
    accelerate launch --config_file mics.yaml -m mics_strategy.run -m package.train --lr 1e-3

With the launcher's file it is needed only if torch's autoload is disabled (see `mics_strategy_autoload`).

The script runs as if Python had started it. Its Accelerators are sharded according to ``mics.yaml``, or else with the
preset "mics".
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
from mics_strategy.version import install_advice

_USAGE = (
    "usage: python -m mics_strategy.run SCRIPT [ARGUMENTS]\n       python -m mics_strategy.run -m MODULE [ARGUMENTS]"
)
_NOT_STARTED = 2  # Python's own exit code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script or a module as the main program; its exceptions propagate.

    Args:
        arguments: The script and its arguments; or ``-m``, the module and its arguments.

    Returns:
        0 if it has run, 2 if it could not be started.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    is_module = args[:1] == ["-m"]
    target, script_args = (args[1:2], args[2:]) if is_module else (args[:1], args[1:])
    if not target or target[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if target in (["-h"], ["--help"]) else _NOT_STARTED
    (name,) = target
    problem = _problem_of_module(name) if is_module else _problem_of_script(Path(name))
    if problem is None:
        problem = _load()
    if problem is not None:
        print(f"mics_strategy.run: {problem}", file=sys.stderr)
        return _NOT_STARTED
    sys.argv[:] = [name, *script_args]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    _run_script(Path(name))
    return 0


def _run_script(script: Path) -> None:
    """Run a file as the main module, or a folder or archive with a `__main__.py`.

    It remains the main module until the process ends.
    """
    is_plain = script.is_file() and not zipfile.is_zipfile(script)
    if not sys.flags.safe_path:  # Python has put the current directory there; a folder adds itself
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
    hint = f" To run a module, pass its name after `-m`: `-m {script}`." if script.suffix != ".py" else ""
    return f"there is no script `{script}` in {os.getcwd()}.{hint}"


def _problem_of_module(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        return f"there is no module `{name}` ({error}), neither in {os.getcwd()} nor installed."
    return None if spec else f"there is no module `{name}`, neither in {os.getcwd()} nor installed."


def _load() -> str | None:
    """Enable the adapter; return an error text if that is impossible."""
    if importlib.util.find_spec("accelerate") is None:
        return f"Accelerate is not installed. {install_advice('accelerate')}"
    from mics_strategy.accelerate import launch

    try:
        launch.enable()
    except MiCSError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
