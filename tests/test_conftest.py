"""Does the police see what a test leaves behind, and what is in the wrong tier?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import RankContext, RankPool

HAS_CUDA = torch.cuda.is_available()  # as other modules ask when they are imported, before ranks are forked
ROOT = Path(__file__).parents[1]
OFFENDERS = """
import os, subprocess, sys, threading, time, warnings
import pytest, torch, torch.distributed as dist

def test_environment(): os.environ["LEFT_BEHIND"] = "1"
def test_nothing_1(): assert "LEFT_BEHIND" not in os.environ
def test_thread(): threading.Thread(target=time.sleep, args=(4,), name="left").start()
def test_group(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def test_nothing_2(): assert not dist.is_initialized()
def test_dtype(): torch.set_default_dtype(torch.float64)
def test_num_threads(): torch.set_num_threads(3)
def test_grad_mode(): torch.set_grad_enabled(False)
def test_nothing_3(): assert torch.zeros((), requires_grad=True).add(1).requires_grad
def test_warning(): warnings.warn("odd")
def test_old_call(): warnings.warn_explicit("old", DeprecationWarning, __file__, 1, module="mics_strategy.x")
def test_old_calls_of_others(): import other_package
def test_interpreter(): subprocess.run([sys.executable, "-c", ""])
def test_nothing_4(): subprocess.run(["true"])
@pytest.mark.slow
def test_slow_interpreter(): subprocess.run([sys.executable, "-c", ""])
@pytest.mark.wide
@pytest.mark.parametrize("letter", "xyz")
@pytest.mark.parametrize(("number", "word"), [(1, "odd"), (2, "even")])
def test_a_diagonal_is_run(letter, number, word):
    assert letter + word in ("xodd", "zeven")
def test_job(ranks): assert ranks(2, len_of_path) == [2, 2]
def len_of_path(ctx): return dist.get_world_size()
"""

# Compiled where it is first imported, as by an installer that compiles nothing; the second warning is of 3.12.
OTHER_PACKAGE = r"""
import warnings
PATTERN = "\."
warnings.warn_explicit("invalid escape", SyntaxWarning, __file__, 3, module=__file__.removesuffix(".py"))
warnings.warn("old", DeprecationWarning)
"""


def in_bad_fork(ctx: RankContext) -> bool:
    return torch.cuda._is_in_bad_fork()


def test_asking_for_a_device_does_not_spoil_the_ranks(ranks: RankPool) -> None:
    assert ranks(1, in_bad_fork) == [False]


@pytest.mark.slow
def test_every_offender_is_caught_and_no_other_test(tmp_path: Path) -> None:
    file = tmp_path / "test_offenders.py"
    file.write_text(OFFENDERS)
    other = tmp_path / "site-packages" / "other_package.py"
    other.parent.mkdir()
    other.write_text(OTHER_PACKAGE)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-rA"]
    command = [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(other.parent), str(ROOT)])}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = {line.partition(" - ")[0].replace(str(file), "") for line in run.stdout.splitlines()}
    caught = {line.split("::")[1] for line in lines if line.startswith(("ERROR ", "FAILED "))}
    assert caught == {
        *("test_environment", "test_thread", "test_group", "test_dtype", "test_num_threads"),
        *("test_grad_mode", "test_warning", "test_old_call", "test_interpreter"),
    }, run.stdout
    passed = {line.split("::")[1] for line in lines if line.startswith("PASSED ")}
    assert sum(name.startswith("test_a_diagonal_is_run[") for name in passed) == 2
