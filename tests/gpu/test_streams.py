"""Does a GPU compute the same whichever stream is late, and do ranks that share one train as a plain process?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import PARTS
from tests.gpu.late_streams import CASES, VARIANTS

ROOT = Path(__file__).parents[2]
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zeropp-hpz", "mics", "paro-iig", "paro-nii")


def printed(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"tests.gpu.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]  # behind what `shard` prints


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu) for case in CASES])
def test_late_streams_change_no_bit(case: str) -> None:
    found = json.loads(printed("late_streams", case))
    digests = {variant: of_variant["digest"] for variant, of_variant in found.items()}
    control = digests.pop("control")
    assert all(of_variant["finite"] for variant, of_variant in found.items() if variant != "control")
    assert len(set(digests.values())) == 1, digests
    assert control != digests["as it is"], "nothing is shown where waiting for no chain changes nothing"
    assert found["as it is"]["waits"] == []
    assert "MainThread" not in found["as it is"]["threads"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "options"),
    [
        pytest.param(preset, options, marks=on_gpu, id=f"{preset}{options or ''}")
        for preset, options in [
            *((preset, {}) for preset in PRESETS),
            ("mics", {"prefetch": 2}),
            ("mics", {"overlap": "none"}),
        ]
    ],
)
def test_ranks_that_share_a_gpu_train_as_a_plain_process(preset: str, options: dict[str, object]) -> None:
    printed("real_sums", preset, json.dumps(options))


@pytest.mark.slow
def test_the_comparison_of_late_streams_runs_on_a_cpu() -> None:
    """There it shows nothing but that the program is sound: all variants have the same bits."""
    found = json.loads(printed("late_streams", "paro-iig", "cpu", *VARIANTS[::3]))
    assert len({of_variant["digest"] for of_variant in found.values()}) == 1
    assert all(of_variant["finite"] for of_variant in found.values())


def test_everything_that_the_first_half_hour_runs_is_there() -> None:
    script = re.sub(r"^ *#.*", "", (ROOT / "tests" / "gpu" / "run").read_text(), flags=re.MULTILINE)
    named = re.findall(r"(?<= )tests/[\w/]+(?:\.py)?", script)
    assert len(named) >= 4
    assert all((ROOT / path).exists() for path in named)
    assert {part for parts in re.findall(r"--parts ([\w,]+)", script) for part in parts.split(",")} == set(PARTS)
    assert "tests/gpu/run" in (ROOT / "Makefile").read_text()
    subprocess.run(["bash", "-n", ROOT / "tests" / "gpu" / "run"], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_the_first_half_hour_says_so_and_succeeds(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    ran = subprocess.run([ROOT / "tests" / "gpu" / "run"], env=environment, capture_output=True, text=True)
    assert (ran.returncode, "nothing was run on a GPU" in ran.stdout) == (0, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("torch_package", "error"),
    [
        (None, ""),
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise ImportError('libcudart.so: cannot open')", "ImportError: libcudart.so: cannot open"),
    ],
    ids=["no torch", "a torch without a dependency", "a broken torch"],
)
def test_a_python_without_torch_is_no_error_and_a_broken_torch_is_shown(
    tmp_path: Path, torch_package: str | None, error: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec "{sys.executable}" -S "$@"\n')  # nothing that is installed
    python.chmod(0o755)
    if torch_package is not None:
        (tmp_path / "torch.py").write_text(torch_package)
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path / "out")}
    ran = subprocess.run([ROOT / "tests" / "gpu" / "run"], env=environment, capture_output=True, text=True)
    assert (ran.returncode, "nothing was run on a GPU" in ran.stdout) == (0, True)
    assert (ran.stderr.splitlines()[-1:], "Traceback" in ran.stderr) == ([error] if error else [], bool(error))


@pytest.fixture
def pretended(tmp_path: Path) -> dict[str, str]:
    """An environment in which every command of the script says what it was asked for, and a GPU seems to be there."""
    for name in ("python", "nvidia-smi", "compute-sanitizer"):
        (tmp_path / name).write_text('#!/bin/bash\necho "asked for $*"\n[[ "$*" != *"$FAILS"* ]]\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHON": "python", "OUT": str(tmp_path / "out"), "FAILS": "no such part"}


def report_of(environment: dict[str, str]) -> tuple[int, str, dict[str, str]]:
    """Exit status, standard output, and the report by part."""
    ran = subprocess.run([ROOT / "tests" / "gpu" / "run"], env=environment, capture_output=True, text=True)
    sections = Path(environment["OUT"], "report.md").read_text().split("\n# ")
    return ran.returncode, ran.stdout, dict(section.lstrip("# ").split("\n", 1) for section in sections)


def test_the_one_report_holds_every_part(pretended: dict[str, str]) -> None:
    code, _, report = report_of(pretended)
    assert code == 0
    assert all(f"--parts {part}" in report[part] for part in ("engine", "ranks", "codecs"))
    assert all("asked for" in section for section in report.values())
    commands = re.findall(r"^ *part (\w+) (\d+)", (ROOT / "tests" / "gpu" / "run").read_text(), flags=re.MULTILINE)
    assert set(report) == {name for name, _ in commands}
    assert max(int(limit) for _, limit in commands) <= 600


def test_a_part_that_fails_leaves_the_others_their_turn(pretended: dict[str, str]) -> None:
    code, output, report = report_of(pretended | {"FAILS": "--parts engine"})
    assert (code, "failed: engine (see" in output) == (1, True)
    assert "asked for" in report["codecs"]


def test_parts_behind_the_end_of_the_budget_are_left_out_and_named(pretended: dict[str, str]) -> None:
    code, output, report = report_of(pretended | {"BUDGET": "0"})
    assert code == len(report)
    assert all("left out, all 0 seconds are used" in section for section in report.values())
    assert "asked for -m" not in output
