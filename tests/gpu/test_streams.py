"""Does a GPU compute the same whichever stream is late, and do ranks and frameworks on one train as a plain process?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.frameworks import CASES as FRAMEWORKS
from tests.gpu.late_streams import CASES, VARIANTS, train

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


def test_the_program_of_late_streams_trains_without_a_gpu() -> None:
    """Nothing is late there; what it puts in the place of the engine's methods must take what they are given."""
    digests = [train("paro-iig", variant, torch.device("cpu"))["digest"] for variant in ("as it is", "late everything")]
    assert digests[0] == digests[1]


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


@pytest.mark.wide(every=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(pytest.param(case, "cuda", marks=on_gpu) for case in FRAMEWORKS),
        *((case, "cpu") for case in FRAMEWORKS),  # the time of a GPU is too short for a program that does not run
    ],
)
def test_frameworks_train_as_on_a_plain_device(case: str, kind: str) -> None:
    printed("frameworks", case, kind)


@pytest.mark.slow
def test_the_comparison_of_late_streams_runs_on_a_cpu() -> None:
    """There it shows nothing but that the program is sound: all variants have the same bits."""
    found = json.loads(printed("late_streams", "paro-iig", "cpu", *VARIANTS[::3]))
    assert len({of_variant["digest"] for of_variant in found.values()}) == 1
    assert all(of_variant["finite"] for of_variant in found.values())
