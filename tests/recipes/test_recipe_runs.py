"""Every recipe's small version takes two steps on two gloo ranks that a real launcher started."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from recipes.config import recipe_files
from recipes.files import ROOT, name_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
NAMES = [name_of(file) for file in recipe_files(ROOT)]
BATCHES = [NAMES[0::3], NAMES[1::3], NAMES[2::3]]  # families mixed, so that nothing survives from one to the next


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [str(item.getsockname()[1]) for item in sockets]


def run(command: Sequence[str], repository: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository), **variables}
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=230, check=False
    )


def check_run(output_dir: Path) -> None:
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert all(0 < loss < 20 for loss in losses)
    assert [record["step"] for record in records if "validation_loss" in record] == [0, 2]


@pytest.mark.parametrize("names", BATCHES, ids=["first", "second", "third"])
def test_every_recipe_takes_two_steps(names: list[str], repository: Path, cache_dir: Path, tmp_path: Path):
    options = (f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path}/{{name}}")
    command = [sys.executable, "tests/recipes/run_recipes.py", *names, "--", *options]
    result = run(command, repository, PORTS=",".join(free_ports(len(names))))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("strategy mics") == len(names)
    assert "DIFFERENT" not in result.stdout
    for name in names:
        check_run(tmp_path / name)


def test_the_command_starts_the_ranks(repository: Path, cache_dir: Path, tmp_path: Path):
    options = ("--ci", f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path}")
    command = [sys.executable, "-m", "mics_strategy.cli", "pretrain", "recipes/llama/7b.yaml", *options]
    result = run(command, repository)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("llama-7b: llama") == 1
    check_run(tmp_path)


def test_torchrun_starts_the_ranks(repository: Path, cache_dir: Path, tmp_path: Path):
    options = ("--ci", f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = run([*torchrun, "-m", "recipes.pretrain", "bert-base", *options], repository)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("bert-base: bert") == 1
    assert "bits per byte" not in result.stdout  # hidden tokens have no code length
    check_run(tmp_path)


def test_a_launcher_with_other_ranks_is_refused(repository: Path, cache_dir: Path):
    variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"}
    command = [sys.executable, "-m", "recipes.pretrain", "bert-base", "--ci", f"--data.cache_dir={cache_dir}"]
    result = run(command, repository, **variables)
    assert (result.returncode, result.stdout) == (1, "")
    assert "is for 2 ranks" in result.stderr
    assert "started 3" in result.stderr
