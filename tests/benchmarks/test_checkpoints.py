"""Does the benchmark of checkpoints run? Nothing here says how fast anything is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.weekly
def test_every_way_to_save_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.checkpoints"]
    options = ["--width", "32", "--layers", "2", "--rounds", "1", "--folder", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\S.*?) {2,}(\d+\.\d+) +(\d+\.\d\d) +(\d+\.\d+) +(\d)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["mics", "mics, asynchronous", "fsdp2, dcp.save", "fsdp2, dcp.async_save"]
    assert [row[4] for row in rows] == ["0", "2", "0", "2"]
    assert rows[0][2] == "1.00"
    assert list(tmp_path.iterdir()) == []
