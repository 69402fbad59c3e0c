"""Curves that coincide with DDP's are called equal, others are not, and quantized ones never are."""

import csv
import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mics_strategy import cli
from mics_strategy.errors import ConfigError
from recipes import fidelity
from recipes.curves import CONTROL, REFERENCE, TOLERANCE, Curve, compare, failures, read_curve, table, write_files
from recipes.errors import RecipeError
from recipes.fidelity import STRATEGIES, jobs, main
from tests.interpreters import python_path


def curve(strategy: str, factor: float = 1.0, *, is_quantized: bool = False) -> Curve:
    losses = {step: 6.0 / step**0.3 * (factor if step > 2 else 1.0) for step in range(1, 6)}
    return Curve(
        family="gpt2",
        strategy=strategy,
        is_quantized=is_quantized,
        losses=losses,
        validation_losses=(6.1, 4.0 * factor),
    )


@pytest.fixture
def curves() -> list[Curve]:
    return [
        *(curve(REFERENCE), curve(CONTROL, 1 + 2e-6), curve("mics", 1 - 1e-6)),
        curve("zeropp", 1.003, is_quantized=True),
    ]


def test_curves_that_differ_by_rounding_are_equal(curves: list[Curve]):
    rows = compare(curves)
    assert [row.verdict for row in rows] == ["reference", "control", "equal", "quantized"]
    assert [row.largest for row in rows] == pytest.approx([0, 2e-6, 1e-6, 3e-3], rel=1e-3)
    assert failures(rows) == []


def test_a_quantized_curve_is_never_called_equal(curves: list[Curve]):
    (row,) = compare([curves[0], replace(curves[2], is_quantized=True)])[1:]
    assert row.largest < TOLERANCE
    assert row.verdict == "quantized"


@pytest.mark.parametrize("corrupted", [1 + 2 * TOLERANCE, 0.0, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("step", [1, 5])
def test_one_corrupted_loss_is_reported(curves: list[Curve], corrupted: float, step: int):
    mics = curves[2]
    curves[2] = replace(mics, losses={**mics.losses, step: mics.losses[step] * corrupted})
    rows = compare(curves)
    assert (rows[2].verdict, rows[2].at_step) == ("DIFFERENT", step)
    assert [sentence.split(" by ")[0] for sentence in failures(rows)] == ["gpt2 mics differs from DDP"]
    assert "DIFFERENT" in table(rows)


@pytest.mark.parametrize("held_out", [4.0 * (1 + 2 * TOLERANCE), math.nan], ids=str)
def test_a_different_held_out_loss_is_reported(curves: list[Curve], held_out: float):
    curves[2] = replace(curves[2], validation_losses=(6.1, held_out))
    assert compare(curves)[2].verdict == "DIFFERENT"


def test_a_control_beyond_the_tolerance_says_so(curves: list[Curve]):
    (sentence,) = failures(compare([curves[0], curve(CONTROL, 1.01)]))
    assert "half micro-batches differs" in sentence
    assert "use fewer `--steps`" in sentence


def test_curves_of_other_steps_are_refused(curves: list[Curve]):
    with pytest.raises(RecipeError, match="gpt2 mics has losses of 5 steps, but there is no curve of DDP"):
        compare(curves[2:])
    del curves[0].losses[5]
    with pytest.raises(RecipeError, match=r"has losses of 5 steps, but there is 4 steps of DDP.*empty `--out`"):
        compare(curves)


def test_files_hold_every_loss(curves: list[Curve], tmp_path: Path):
    write_files(curves, {"steps": 5}, tmp_path)
    rows = list(csv.DictReader((tmp_path / "losses.csv").read_text().splitlines()))
    assert len(rows) == 4 * 5
    assert {row["strategy"] for row in rows} == {REFERENCE, CONTROL, "mics", "zeropp"}
    record = json.loads((tmp_path / "fidelity.json").read_text())
    assert (record["steps"], record["tolerance"]) == (5, TOLERANCE)
    assert [row["verdict"] for row in record["comparisons"]] == ["reference", "control", "equal", "quantized"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_losses_is_refused(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 6.1}\n')
    with pytest.raises(RecipeError, match=r"holds no training loss.*log.txt"):
        read_curve(tmp_path / "metrics.jsonl", "gpt2", "mics", is_quantized=False)


def test_jobs_know_what_is_quantized():
    listed = jobs("bert", STRATEGIES)
    assert [job.label for job in listed] == [REFERENCE, CONTROL, *STRATEGIES]
    assert {job.label for job in listed if job.is_quantized} == {"mics-int8", "zeropp"}
    assert {job.strategy for job in listed[2:]} == {f"mics_{name}" for name in STRATEGIES[1:4]} | {
        "mics",
        "mics_zeropp",
    }
    with pytest.raises(ConfigError, match="preset='zero9'"):
        jobs("bert", ["zero9"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "`steps=0` cannot be used"),
        (["--ranks=3"], "`ranks=3` cannot be used: it must be a multiple of 2"),
        (["--ranks=0"], "`ranks=0` cannot be used"),
        (["--global-batch=12"], "`global-batch=12` cannot be used: it must be a multiple of 8"),
        (["--strategies=zero9"], "`preset='zero9'` is not known"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([f"--out={tmp_path / 'out'}", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mics_fidelity_is_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "mics_strategy.recipes.fidelity", fidelity)  # also where another tree is installed
    assert cli.main(["fidelity", "--steps=0"]) == 2
    assert "`steps=0` cannot be used" in capsys.readouterr().err


def test_the_commands_of_the_guide_name_strategies_that_exist(repository: Path):
    guide = (repository / "docs" / "fidelity.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^mics fidelity(.*)$", guide, flags=re.MULTILINE)
    options = [fidelity.parser().parse_args(shlex.split(command)) for command in commands]
    assert [each.family for each in options] == ["both", "bert"]
    assert all(jobs("gpt2", each.strategies.split(",")) for each in options)


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "0")
    assert main([]) == 2
    assert "without torchrun or srun" in capsys.readouterr().err


@pytest.mark.weekly
@pytest.mark.timeout(900)  # four launches
def test_the_command_compares_trainings_of_two_ranks(repository: Path, cache_dir: Path, tmp_path: Path):
    small = ("--ranks=2", "--steps=4", "--source=grammar", "--global-batch=4", "--strategies=zero3,zeropp")
    command = [sys.executable, "-m", "recipes.fidelity", "--family=bert", *small]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(repository)}
    folders = [f"--cache-dir={cache_dir}", f"--out={tmp_path}"]
    result = subprocess.run(
        [*command, *folders], cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((tmp_path / "fidelity.json").read_text())["comparisons"]
    assert [(row["strategy"], row["verdict"]) for row in rows] == [
        *(("ddp", "reference"), (CONTROL, "control"), ("zero3", "equal"), ("zeropp", "quantized"))
    ]
    assert rows[3]["largest"] > rows[2]["largest"]


@pytest.mark.slow
def test_a_training_that_fails_shows_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--source=grammar", "--cache-dir=/proc/none", f"--out={tmp_path}"]) == 2
    assert "The training of gpt2 with ddp ended with code 1" in capsys.readouterr().err
