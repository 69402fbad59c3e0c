"""Signals to the program as users send them: ranks of a real launcher save, stop and continue."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 400  # more than are done before a signal arrives
LOGGED = "--trainer.log_every_steps=1"


def start(
    repository: Path, folders: tuple[Path, Path], *options: str, stderr: IO[str] | int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a run in a session of its own, as a terminal does."""
    cache, output = folders
    command = [
        *(sys.executable, "-m", "recipes.pretrain", "llama-debug", f"--data.cache_dir={cache}"),
        *(f"--trainer.output_dir={output}", LOGGED, "--sample.num_tokens=0", *options),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    process = subprocess.Popen(
        command,
        cwd=repository,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    _started.append(process)
    return process


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _ends_what_it_started() -> Iterator[None]:
    yield
    for process in _started:
        with contextlib.suppress(ProcessLookupError):  # its ranks are of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    _started.clear()


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 240
    while max(losses(output), default=0) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def losses(output: Path) -> dict[int, float]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def saved(output: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step=")) for path in (output / "checkpoints").glob("step=*"))


def rank_processes(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


FULL_DDP = ("--strategy.name=ddp", f"--trainer.max_steps={STEPS}", "--trainer.checkpoint_every_steps=1000")
SHARDED = (
    *("--strategy.name=mics", f"--trainer.max_steps={STEPS}", "--trainer.checkpoint_every_steps=1000"),
    "--trainer.checkpoint_format=sharded",
)
ALONE = ("--trainer.devices=1", "--strategy.shard.partition_size=1")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("framework", "options"),
    [("lightning", SHARDED), ("accelerate", FULL_DDP)],
    ids=["lightning-mics", "accelerate-ddp"],
)
def test_sigterm_saves_and_the_printed_command_continues(
    framework: str, options: Sequence[str], repository: Path, cache_dir: Path, tmp_path: Path
):
    process = start(repository, (cache_dir, tmp_path), f"--trainer.framework={framework}", *options)
    wait_for_step(tmp_path, 3, process)
    os.kill(rank_processes(process)[-1], signal.SIGUSR1)  # one rank
    while not saved(tmp_path):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # the process that the user has started
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    first, last = saved(tmp_path)
    assert f"SIGUSR1: checkpoint after step {first}" in output
    assert max(losses(tmp_path)) == last < STEPS
    line = next(line for line in output.splitlines() if line.startswith("SIGTERM: "))
    assert line.startswith(f"SIGTERM: saved after step {last}. Continue with: mics pretrain llama-debug --data")
    assert "Loss " not in output  # no report of a run that is not finished
    assert "Traceback" not in errors
    resume = [word for word in line.partition("mics pretrain ")[2].split() if word.startswith("--trainer.resume")]
    shorter = ("--trainer.max_steps=" + str(last + 2), *ALONE, *resume)
    rows = (tmp_path / "metrics.jsonl").read_text()
    continued = start(repository, (cache_dir, tmp_path), f"--trainer.framework={framework}", *options, *shorter)
    _, errors = continued.communicate()
    assert continued.returncode == 0, errors
    assert sorted(losses(tmp_path)) == [*range(1, last + 3)]
    assert (tmp_path / "metrics.jsonl").read_text().startswith(rows)  # with their times: no step was taken again


@pytest.mark.wide
@pytest.mark.parametrize(
    ("framework", "options"),
    [("lightning", SHARDED), ("accelerate", FULL_DDP)],
    ids=["lightning-mics", "accelerate-ddp"],
)
def test_an_interrupt_of_the_terminal_saves_and_the_printed_command_continues(
    framework: str, options: Sequence[str], repository: Path, cache_dir: Path, tmp_path: Path
):
    process = start(repository, (cache_dir, tmp_path), f"--trainer.framework={framework}", *options)
    wait_for_step(tmp_path, 3, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the program and its ranks
    output, errors = process.communicate()
    assert process.returncode == 130, errors
    (last,) = saved(tmp_path)
    assert max(losses(tmp_path)) == last < STEPS
    line = f"SIGINT: saved after step {last}. Continue with: mics pretrain llama-debug --data"
    assert next(text for text in output.splitlines() if text.startswith("SIGINT: ")).startswith(line)
    assert errors.count("SIGINT received, handled after this optimizer step; a second one ends the run at once") == 1
    assert "Traceback" not in errors


def test_a_second_interrupt_ends_a_run_that_hangs(repository: Path, cache_dir: Path, tmp_path: Path):
    with (tmp_path / "errors").open("w") as file:
        process = start(repository, (cache_dir, tmp_path), "--trainer.framework=lightning", *SHARDED, stderr=file)
    wait_for_step(tmp_path, 2, process)
    (other,) = rank_processes(process)
    os.kill(other, signal.SIGSTOP)  # the first rank waits for it without an end
    os.killpg(process.pid, signal.SIGINT)
    while "SIGINT received" not in (tmp_path / "errors").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    assert (process.returncode, saved(tmp_path)) == (130, [])


def test_a_signal_to_a_run_without_checkpoints_is_answered(repository: Path, cache_dir: Path, tmp_path: Path):
    options = ("--trainer.framework=lightning", f"--trainer.max_steps={STEPS}", *ALONE)
    process = start(repository, (cache_dir, tmp_path), *options)
    wait_for_step(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "checkpoints: none, so that a run that is stopped is lost" in output
    assert "SIGTERM: nothing is saved, because of `trainer.checkpoint_every_steps=never`" in output
    assert not (tmp_path / "checkpoints").exists()
