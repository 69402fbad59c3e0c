"""Do ranks that share a device train as a plain process, and would the benchmark notice if they did not?

Here the device is the CPU, which says nothing of GPUs.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import table
from benchmarks.gpu_model import SIZES, Shape
from benchmarks.gpu_ranks import (
    RANK_BUILDERS,
    WORLD_SIZES,
    engines_of,
    failure_of,
    measure_ranks,
    plain_losses,
    rank_rows,
    train_on_ranks,
)
from benchmarks.gpu_training import EngineResult, Rounds, Trained
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
CPU, SHAPE = torch.device("cpu"), SIZES["tiny"]
ROUNDS = Rounds(rounds=1, warm_up=1, steps=2)
ENGINES = {2: ["ddp", "fsdp2", "zero3"], 4: ["ddp", "fsdp2", "fsdp2-hybrid", "zero3", "mics"]}


def wrong(name: str, change: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> Callable[..., Trained]:
    """An engine whose gradients are changed before they are used."""

    def build(shape: Shape, device: torch.device) -> Trained:
        trained = RANK_BUILDERS[name](shape, device)
        update = trained.update

        def wrong_update() -> None:
            for parameter in trained.model.parameters():
                parameter.grad = change(parameter, parameter.grad)
            update()

        trained.update = wrong_update
        return trained

    return build


WRONG = {
    "undivided": wrong("ddp", lambda _, grad: grad * torch.distributed.get_world_size()),
    "of rank 0 alone": lambda shape, device: Trained(
        shape.model(device), make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
}


def train_all(ctx: RankContext) -> dict[str, EngineResult]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.gpu_ranks.RANK_BUILDERS", RANK_BUILDERS | WRONG)
        names = [*engines_of(ctx.world_size), *WRONG]
        return {name: train_on_ranks(name, SHAPE, CPU, ROUNDS) for name in dict.fromkeys(names)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_train_as_a_plain_process_and_wrong_gradients_are_found(ranks: RankPool, world_size: int) -> None:
    results = ranks(world_size, train_all)
    assert all(list(each) == [*ENGINES[world_size], *WRONG] for each in results)
    assert all(each[name].losses == results[0][name].losses for each in results for name in each)
    expected = plain_losses(SHAPE, CPU, world_size, ROUNDS)
    rows = {row["engine"]: row for row in rank_rows(results[0], expected, world_size)}
    assert not any(rows[name]["problem"] for name in ENGINES[world_size]), rows
    assert all("is expected" in rows[name]["problem"] for name in WRONG)
    assert all(len(row["losses"][0]) == 3 and 0 < row["min s"] <= row["step s"] for row in rows.values())


@pytest.mark.weekly
def test_the_command_starts_ranks(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--smoke", "--parts", "ranks", "--output", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, check=True)
    rows = json.loads((tmp_path / "gpu.json").read_text())["parts"]["ranks"]
    assert [(row["ranks"], row["engine"]) for row in rows] == [(n, name) for n in WORLD_SIZES for name in ENGINES[n]]
    assert {row["engine"] for row in rows if "of fsdp2" in row and "of ddp" in row} == {"zero3", "mics"}


def result(step_s: float, loss: float = 4.0) -> EngineResult:
    return EngineResult(step_s=[step_s], peak_bytes=[0], losses=[[loss]])


def test_ratios_are_those_of_the_same_ranks() -> None:
    engines = {"ddp": result(1.0), "fsdp2": result(4.0), "fsdp2-hybrid": result(3.0), "mics": result(2.0)}
    *_, mics = rank_rows(engines, [4.0], 4)
    assert (mics["of fsdp2"], mics["of ddp"], mics["problem"]) == (1.5, 0.5, "")


def test_a_peer_that_fails_leaves_the_other_ratio() -> None:
    engines = {"ddp": result(1.0), "fsdp2": EngineResult(failure="RuntimeError: gloo"), "zero3": result(2.0)}
    rows = list(rank_rows(engines, [4.0], 2))
    assert (rows[2]["of fsdp2"], rows[2]["of ddp"]) == (None, 0.5)
    assert "WRONG: RuntimeError: gloo" in table(rows)


def test_after_a_failure_ranks_are_started_for_the_engines_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[tuple[str, ...]] = []

    def start(_: object, arguments: tuple[Any], *, nprocs: int) -> None:
        (job,) = arguments
        assert nprocs == job.world_size
        starts.append(job.engines)
        for name in job.engines:
            if name == "fsdp2":
                raise RuntimeError("\n\nTraceback\n  line\nValueError: no gloo\nmore of it\n")
            losses = plain_losses(SHAPE, CPU, nprocs, ROUNDS)
            Path(job.folder, name).write_text(
                json.dumps(asdict(EngineResult(step_s=[1.0], peak_bytes=[0], losses=[losses])))
            )

    monkeypatch.setattr("benchmarks.gpu_ranks.spawn", start)
    rows = list(measure_ranks(SHAPE, CPU, ROUNDS))
    left = [("fsdp2-hybrid", "zero3", "mics")]
    assert starts == [("ddp", "fsdp2", "zero3"), ("zero3",), tuple(ENGINES[4]), *left]
    assert {row["engine"] for row in rows if row["problem"]} == {"fsdp2"}
    assert {row["problem"] for row in rows} == {"", "ValueError: no gloo"}
    assert {row["engine"] for row in rows if row["ranks"] == 4} == set(ENGINES[4])


def test_a_process_that_was_killed_is_named() -> None:
    assert failure_of("process 1 terminated with signal SIGKILL") == "process 1 terminated with signal SIGKILL"


def test_the_page_says_what_it_is() -> None:
    section = PAGE.partition("\n### Ranks\n")[2].partition("\n### ")[0]
    assert set(re.findall(r"`([\w-]+)`", section)) >= {*RANK_BUILDERS, "ranks"}
    assert set(re.findall(r"^\| ([\w ]+?) \|", section, flags=re.MULTILINE)) >= {"ranks", "of fsdp2", "of ddp", "loss"}
    assert "nothing of NCCL" in " ".join(section.split())
    assert f"{SIZES['30m'].numel / 1e6:.0f} M" in section
