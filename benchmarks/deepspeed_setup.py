"""What does DeepSpeed need before its ranks start?

Its interpreter has torch and DeepSpeed, not this package; nothing here imports either.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.launch import RankFailedError

_BUILD = "from deepspeed.accelerator import get_accelerator as g; g().create_op_builder('ShareMemCommBuilder').load()"


def environment(python: str, ranks_per_node: int) -> dict[str, str]:
    """Variables for ranks that run under `python`, an interpreter with DeepSpeed."""
    return {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(ranks_per_node),
        "TORCHDYNAMO_DISABLE": "1",  # MiCS compiles a helper again for every list of tensors; here it runs as written
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",  # ninja
    }


def build_extension(python: str) -> None:
    """Build the one extension that DeepSpeed loads on CPUs; if its ranks do so at once, they fail or hang.

    Raises:
        RankFailedError: There is no such interpreter, or it cannot build.
    """
    if not os.access(python, os.X_OK):
        raise RankFailedError(f"`{python}` is no interpreter. Give the path of one that has deepspeed==0.19.2.")
    env = {**os.environ, **environment(python, 1), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", _BUILD], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RankFailedError(
            f"`{python}` cannot build DeepSpeed's extension: {done.stderr[-2000:]}\nInstall torch, deepspeed==0.19.2 "
            "and ninja there, and a C++ compiler on this machine."
        )
