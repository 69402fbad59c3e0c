"""How is a job started as users start it, and what does `accelerate launch` hand to its workers?"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_multi_gpu_env

from tests.interpreters import python_path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FROM_OUTSIDE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

ON_CPU = """
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_port: 0
fsdp_config:
  fsdp_version: mics
"""


def written(folder: Path, more: str = "", text: str = ON_CPU) -> Path:
    """A launcher's file, with more lines."""
    file = folder / "mics.yaml"
    file.write_text(text + more)
    return file


def sent(*arguments: object) -> dict[str, str]:
    """What the unmodified launcher puts into the environment of its workers for these arguments."""
    given = launch_command_parser().parse_args([*map(str, arguments), "train.py"])
    args, _, _ = _validate_launch_command(given)
    env = prepare_multi_gpu_env(args)
    return {name: value for name, value in env.items() if os.environ.get(name) != value}


def started(folder: Path, *command: object, **env: str) -> subprocess.Popen[str]:
    """A launcher at work in a folder; it and all that it starts are one process group."""
    kept = {name: value for name, value in os.environ.items() if name not in FROM_OUTSIDE}
    return subprocess.Popen(
        [str(BIN / str(command[0])), *map(str, command[1:])],
        cwd=folder,
        env={**kept, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and all that was printed."""
    try:
        text, _ = launcher.communicate()
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    return launcher.returncode, text


def launched(folder: Path, *command: object, **env: str) -> tuple[int, str]:
    """Run a launcher to its end."""
    return ended(started(folder, *command, **env))
