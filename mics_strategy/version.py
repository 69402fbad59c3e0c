"""Versions and packages of the environment that the package runs in."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
import warnings
from collections.abc import Iterator

_NAME = "mics_strategy"


def package_version(name: str = _NAME) -> str:
    """As installed; ``"unknown"`` of what is not, as a checkout."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache  # once in a process
def check_torch(version: str) -> None:
    """Refuse a torch that is too old, and warn of one that is too new.

    `pip install --no-deps` lets both in.

    Raises:
        ImportError: It is older than the oldest that the package supports.
    """
    for requirement in _requirements():
        if re.match(r"torch\b", requirement):
            oldest, newest = (re.search(rf"{sign}(\d+)\.(\d+)", requirement) for sign in (">=", "<"))
            found = re.match(r"(\d+)\.(\d+)", version)
            message = f"mics_strategy {package_version()} needs {requirement}, and torch {version} is installed."
            if oldest and found and _numbers(found) < _numbers(oldest):
                raise ImportError(f"{message} Run `pip install '{requirement}'`.")
            if newest and found and _numbers(found) >= _numbers(newest):
                warnings.warn(f"{message} It may work, but no test of the package has run with it.", stacklevel=3)


def install_advice(extra: str) -> str:
    """Say which command installs what the environment lacks of an extra."""
    extras, missing = [extra], []
    for name in extras:
        for requirement in _requirements(name):
            package = re.split(r"[^\w.-]", requirement)[0]
            if package == _NAME:  # [lightning,accelerate]
                extras += re.findall(r"\w+", requirement.removeprefix(package))
            elif package_version(package) == "unknown":
                missing.append(shlex.quote(requirement))
    if not missing:
        return f"Run `pip install -c constraints.txt '.[{extra}]'` in a checkout."
    return f"Run `pip install {' '.join(missing)}` (in a checkout, with `-c constraints.txt`)."


def _requirements(extra: str = "") -> Iterator[str]:
    """Yield the requirements of the package or of an extra; none in a checkout."""
    if package_version() == "unknown":
        return
    for line in importlib.metadata.requires(_NAME) or ():
        requirement, _, marker = line.partition(";")
        if (f'extra == "{extra}"' in marker) if extra else "extra" not in marker:
            yield requirement.strip()


def _numbers(version: re.Match[str]) -> tuple[int, int]:
    return int(version[1]), int(version[2])
