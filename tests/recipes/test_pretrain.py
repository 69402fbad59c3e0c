"""The program from beginning to end: ranks, files, a falling loss, a run that continues on other ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.config import load_recipe
from recipes.pretrain import main

pytestmark = pytest.mark.slow
STEPS = 40
SAVED_AT = 25
SHARDED = ("--trainer.checkpoint_format=sharded", "--trainer.log_every_steps=5")


def run(
    repository: Path, cache_dir: Path, output_dir: Path, *options: str, strategy: str = "ddp"
) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "recipes.pretrain", "--config", "recipes/llama/debug.yaml"),
        *(f"--strategy.name={strategy}", f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={output_dir}"),
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


def losses(output_dir: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture(scope="module")
def finished(
    repository: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run on 2 ranks, once for all tests of this file."""
    output_dir = tmp_path_factory.mktemp("run")
    options = (f"--trainer.max_steps={STEPS}", "--trainer.log_every_steps=5")
    result = run(repository, cache_dir, output_dir, *options, f"--trainer.checkpoint_every_steps={SAVED_AT}")
    assert result.returncode == 0, result.stderr
    return output_dir, result


@pytest.fixture(scope="module")
def sharded(repository: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with MiCS on 2 ranks that saves shards, and what it prints."""
    output_dir = tmp_path_factory.mktemp("sharded")
    writing = (f"--trainer.max_steps={STEPS}", f"--trainer.checkpoint_every_steps={SAVED_AT}")
    result = run(repository, cache_dir, output_dir, *SHARDED, *writing, strategy="mics")
    assert result.returncode == 0, result.stderr
    return output_dir, result.stdout


def test_the_loss_falls_on_two_ranks(finished: tuple[Path, subprocess.CompletedProcess[str]]):
    found = losses(finished[0])
    assert found[1] == pytest.approx(6.2, abs=0.2)  # ln 512: nothing known yet
    assert found[STEPS] < 2.6


def test_a_run_writes_its_metrics_and_its_resolved_config(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
):
    output_dir, _ = finished
    assert sorted(losses(output_dir)) == [1, *range(5, STEPS + 1, 5)]
    recipe = load_recipe([f"--config={output_dir / 'config.yaml'}"], has_cuda=False)
    assert (recipe.strategy.name, recipe.trainer.max_steps) == ("ddp", STEPS)
    last = json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[-2])
    assert last.keys() >= {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"}
    assert last["tokens"] == STEPS * 1024


def test_a_run_says_what_it_does_once_and_without_warnings(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
):
    output = finished[1].stdout
    for words in (
        "4 micro batch x 2 accumulation x 2 ranks = 16 sequences x 64 tokens = 1,024 tokens",
        "no files read",
        "strategy ddp, 2 ranks",
        "checkpoints: every 25 steps, and when the run is stopped",
        "validation loss",
        "tok/s",
        "Loss █",
        "The model continues 'The old king'",
    ):
        assert output.count(words) >= 1, words
    assert output.count("llama-debug: llama") == 1
    assert "Warning" not in finished[1].stderr


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_ranks(
    finished: tuple[Path, subprocess.CompletedProcess[str]], repository: Path, cache_dir: Path, tmp_path: Path
):
    output_dir, _ = finished
    last = shutil.ignore_patterns(f"step={STEPS}.*")
    shutil.copytree(output_dir / "checkpoints", tmp_path / "checkpoints", ignore=last)
    options = (f"--trainer.max_steps={STEPS}", "--trainer.log_every_steps=5", "--trainer.resume=auto")
    result = run(repository, cache_dir, tmp_path, "--trainer.devices=1", *options)
    assert result.returncode == 0, result.stderr
    assert f"continues {tmp_path / 'checkpoints' / f'step={SAVED_AT}.ckpt'}" in result.stdout
    resumed, whole = losses(tmp_path), losses(output_dir)
    assert sorted(resumed) == [SAVED_AT + 1, 30, 35, 40]
    assert [resumed[35], resumed[40]] == pytest.approx([whole[35], whole[40]], abs=1e-4)


@pytest.mark.slow
def test_mics_trains_like_ddp_and_sends_what_it_planned(
    finished: tuple[Path, subprocess.CompletedProcess[str]], sharded: tuple[Path, str]
):
    output_dir, output = sharded
    assert losses(output_dir) == pytest.approx(losses(finished[0]), abs=1e-3)
    assert "all_gather" in output
    assert "equal" in output
    assert "DIFFERENT" not in output


def test_what_cannot_work_ends_before_ranks_start(repository: Path, cache_dir: Path, tmp_path: Path):
    config = f"--config={repository / 'recipes' / 'llama' / 'debug.yaml'}"
    folders = (f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path}")
    with pytest.raises(SystemExit, match=r"mics pretrain: `batch\.global_size=12` cannot be shared evenly: 2 ranks"):
        main([config, "--strategy.name=ddp", *folders, "--batch.global_size=12"])
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_is_a_file_is_told_in_one_line(repository: Path, cache_dir: Path, tmp_path: Path):
    config = f"--config={repository / 'recipes' / 'llama' / 'debug.yaml'}"
    (tmp_path / "file").touch()
    message = "mics pretrain: `.*file` cannot be used: a folder is needed there"
    with pytest.raises(SystemExit, match=message):
        main([config, f"--data.cache_dir={cache_dir}", f"--trainer.output_dir={tmp_path / 'file'}"])


@pytest.mark.slow
def test_sharded_checkpoints_resume_on_another_number_of_ranks(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    sharded: tuple[Path, str],
    repository: Path,
    cache_dir: Path,
    tmp_path: Path,
):
    shutil.copytree(sharded[0], tmp_path, dirs_exist_ok=True)
    checkpoint, last = sorted((tmp_path / "checkpoints").iterdir())
    assert (checkpoint / "manifest.json").is_file()
    shutil.rmtree(last)
    resuming = (f"--trainer.max_steps={STEPS}", "--trainer.resume=auto", "--trainer.devices=1")
    alone = "--strategy.shard={partition_size: 1}"
    result = run(repository, cache_dir, tmp_path, *SHARDED, *resuming, alone, strategy="mics")
    assert result.returncode == 0, result.stderr
    before, after = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (sharded[0], tmp_path))
    kept = [line for line in before if json.loads(line)["step"] <= SAVED_AT]
    assert after[: len(kept)] == kept  # with their times: no step was taken again
    assert [json.loads(line)["step"] for line in after if '"loss"' in line].count(
        STEPS
    ) == 1  # but those that were lost
    resumed, whole = losses(tmp_path), losses(finished[0])
    assert [resumed[35], resumed[40]] == pytest.approx([whole[35], whole[40]], abs=1e-3)
