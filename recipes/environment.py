"""Where and with what a run was made: `environment.json` of its folder, for the report."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

from mics_strategy.version import package_version

from .config import Recipe

ENVIRONMENT = "environment.json"
_BEGUN, _ENDED = "begun", "ended"


def write_environment(folder: Path, recipe: Recipe, num_ranks: int) -> None:
    """Write what is known when a run begins or continues."""
    names = ("mics_strategy", "torch", "lightning" if recipe.trainer.framework == "lightning" else "accelerate")
    versions = [f"{name} {package_version(name)}" for name in names]
    facts = {
        _BEGUN: _now().isoformat(timespec="seconds"),
        "ranks": f"{num_ranks} on {recipe.trainer.num_nodes} node(s), {_hardware(recipe)}",
        "host": platform.node(),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "git commit": _git_commit(),
    }
    _write(folder, {name: text for name, text in facts.items() if text})


def end_environment(folder: Path, sample: str) -> None:
    """Add the time at which the run ends, and what the trained model wrote; empty for nothing."""
    if (folder / ENVIRONMENT).is_file():
        facts = json.loads((folder / ENVIRONMENT).read_text())
        facts |= {"text by the model": sample} if sample else {}
        _write(folder, {**facts, _ENDED: _now().isoformat(timespec="seconds")})


def described(facts: dict[str, str]) -> list[tuple[str, str]]:
    """Return the lines of the report: names and texts.

    Raises:
        ValueError: A time is none.
        TypeError: A fact is no text.
    """
    lines = [(name, str(text)) for name, text in facts.items() if name not in (_BEGUN, _ENDED)]
    times = [datetime.datetime.fromisoformat(facts[name]) for name in (_BEGUN, _ENDED) if name in facts]
    if len(times) == 2:
        seconds = round((times[1] - times[0]).total_seconds())
        hours, minutes = divmod(seconds // 60, 60)
        lines.insert(0, ("duration, from the last start", f"{hours} h {minutes:02d} min {seconds % 60:02d} s"))
    if times:
        lines.insert(0, ("last start", times[0].strftime("%Y-%m-%d %H:%M %z")))
    return lines


def _write(folder: Path, facts: dict[str, str]) -> None:
    (folder / ENVIRONMENT).write_text(json.dumps(facts, indent=1) + "\n")


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()


def _hardware(recipe: Recipe) -> str:
    if recipe.trainer.accelerator != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _git_commit() -> str:
    """Return the commit of the folder in which the run was started; empty where there is none."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""
