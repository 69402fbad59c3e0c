"""Every recipe's small version takes two steps on two gloo ranks that a real launcher started."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.config import recipe_files
from recipes.files import ROOT, name_of
from recipes.pretrain import main
from tests.interpreters import python_path
from tests.recipes.short_runs import check_run

pytestmark = pytest.mark.slow
ACCELERATE = "--trainer.framework=accelerate"
NAMES = [name_of(file) for file in recipe_files(ROOT)]


def free_ports(count: int) -> list[str]:
    """Ports below those that the system gives away by itself: the last of them is used only after minutes."""
    ports: list[str] = []
    for port in random.sample(range(20_000, 32_000), 10 * count):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(str(port))
    return ports[:count]


def run(command: Sequence[str], repository: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(repository), **variables}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_every_recipe_takes_two_steps(repository: Path, cache_dir: Path, tmp_path: Path):
    names = [*NAMES[0::2], *NAMES[1::2]]  # families mixed, so that nothing survives from one to the next
    options = (f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path}/{{name}}")
    command = [sys.executable, "tests/recipes/run_recipes.py", *names, "--", *options]
    result = run(command, repository, PORTS=",".join(free_ports(len(names))))
    assert result.returncode == 0, result.stderr
    check_runs(result.stdout, names, tmp_path)


def test_every_eighth_recipe_takes_two_steps_with_accelerate(repository: Path, cache_dir: Path, tmp_path: Path):
    names = NAMES[0::8]
    options = (f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path}/{{name}}", ACCELERATE)
    command = [sys.executable, "tests/recipes/run_recipes.py", *names, "--", *options]
    variables = {"PORTS": ",".join(free_ports(len(names))), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    ranks = [{**variables, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"} for rank in ("0", "1")]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda rank: run(command, repository, **rank), ranks))
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    check_runs(results[0].stdout, names, tmp_path)


def check_runs(output: str, names: list[str], folder: Path) -> None:
    assert output.count("strategy mics") == len(names)
    assert output.count("  equal") > len(names)
    assert "DIFFERENT" not in output
    for name in names:
        check_run(folder / name)
        page = (folder / name / "report.html").read_text()
        assert (">equal<" in page, ">DIFFERENT<" in page) == (True, False)


@pytest.mark.weekly
def test_accelerate_trains_as_lightning_does(repository: Path, cache_dir: Path, tmp_path: Path):
    """By the command, which starts the ranks itself, with the file of a recipe or its name."""
    records = {}
    for framework, recipe in (("lightning", "recipes/llama/debug.yaml"), ("accelerate", "llama-debug")):
        options = (f"--trainer.framework={framework}", "--strategy.name=mics", "--trainer.max_steps=4")
        folders = (f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path / framework}")
        command = [sys.executable, "-m", "mics_strategy.cli", "pretrain", recipe, *options, *folders]
        result = run([*command, "--trainer.log_every_steps=1"], repository)
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / framework / "metrics.jsonl").read_text().splitlines()
        kept = ("step", "loss", "grad_norm", "lr", "validation_loss")
        records[framework] = [{name: r[name] for name in kept if name in r} for r in map(json.loads, lines)]
        assert "The model continues" in result.stdout
        assert result.stdout.count("llama-debug: llama") == 1
    assert len(records["lightning"]) == 6
    for one, other in zip(records["lightning"], records["accelerate"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_launcher_with_other_ranks_is_refused(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"is for 2 ranks[\s\S]*started 3"):
        main(["bert-base", "--ci", f"--data.cache_dir={cache_dir}"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trainer.precision=bf16-true",), "precision=bf16-true.*accelerate.*bf16-mixed"),
        (("--strategy.name=fsdp", "--model.meta_start=false"), "strategy.name=fsdp.*accelerate.*ddp"),
        (("--trainer.num_nodes=2",), "2 nodes.*without a launcher.*torchrun on every node.*num_nodes=1"),
    ],
)
def test_accelerate_refuses_what_its_loop_does_not_do(options: tuple[str, ...], message: str, cache_dir: Path):
    with pytest.raises(SystemExit, match=message):
        main(["llama-7b", "--ci", ACCELERATE, f"--data.cache_dir={cache_dir}", *options])
