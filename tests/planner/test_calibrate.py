"""Does a calibration measure what the engine will use, equally on all ranks?"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mics_strategy import Codec, ConfigError, ShardConfig, Topology
from mics_strategy.cli import main
from mics_strategy.planner import calibrate as calibrate_module
from mics_strategy.planner import device_rates, layer_time
from mics_strategy.planner.calibrate import CalibrationOptions, calibrate, probes
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.choice import simulate
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.layer_time import sustained_share
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.simulator import compute_times
from mics_strategy.planner.workload import Workload
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.cuda_harness.streams import machine as current_machine
from tests.interpreters import python_path
from tests.planner.jobs import tiny_cluster
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[2]
PRESETS = [
    *[(name, {}) for name in ("mics", "zero1", "zero2", "zero3", "zeropp-hpz", "paro-iig", "paro-nig", "ddp")],
    ("mics", {"partition_size": "world"}),
    ("zero3", {"hierarchical": False}),
    ("ddp", {"hierarchical": False}),
]


@pytest.mark.parametrize(("ranks_per_node", "num_nodes"), [(2, 2), (4, 1), (1, 4), (2, 3), (8, 4)])
def test_every_stage_of_every_preset_is_measured(ranks_per_node: int, num_nodes: int) -> None:
    topology, world_size = Topology(ranks_per_node=ranks_per_node), ranks_per_node * num_nodes
    measured = [(p.collective, p.scopes.span_of(p.role).size, p.ranks_of_node) for p in probes(topology, world_size)]
    assert len(measured) == len(set(measured))
    for name, overrides in PRESETS:
        needed = _planned(name, overrides, (ranks_per_node, num_nodes))
        assert needed <= set(measured), name


def _planned(name: str, overrides: dict[str, Any], shape: tuple[int, int]) -> set[tuple[str, int, int]]:
    ranks_per_node, num_nodes = shape
    cluster = Cluster.from_fields({**_FIELDS, "ranks_per_node": ranks_per_node, "nodes": num_nodes})
    workload = Workload(
        model=describe_model("bert-1.5b", 128), global_batch=2 * cluster.world_size, micro_batch=1, recompute=False
    )
    job = simulate(workload, cluster, ShardConfig.preset(name, **overrides)).job
    inside = {axis.name: axis.size for axis in job.scopes.axes if axis.is_inside_node}
    stages = set()
    for planned in job.plan(2).collectives:
        ranks = 1
        for axis in planned.axis.split("+"):
            ranks *= inside.get(axis, 1)
        if planned.unit != "(usage)":
            stages.add((planned.collective, planned.size, ranks))
    return stages


_LINK = {"bandwidth": 1e9, "latency": 1e-5, "source": "stated"}
_FIELDS: dict[str, Any] = {"name": "stated", "device": "a100-40gb", "intra_node": _LINK, "inter_node": _LINK}


@contextmanager
def few_runs() -> Iterator[None]:
    """Two runs of each measurement, where a calibration takes the median of seven."""
    with mock.patch.object(device_rates, "RUNS", 2), mock.patch.object(calibrate_module, "RUNS", 2):
        yield


def run_calibration(ctx: RankContext) -> dict[str, Any]:
    hosts = [f"node{rank // ctx.ranks_per_node}" for rank in range(ctx.world_size)]
    options = CalibrationOptions(max_bytes=65536, stage_s=0.02, overlap_s=0.005)
    with few_runs():
        return calibrate(hosts, Topology(ranks_per_node=ctx.ranks_per_node), torch.device("cpu"), options)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_ranks_agree_and_the_planner_reads_it(ranks: RankPool, tmp_path: Path, ranks_per_node: int) -> None:
    results = ranks(2 * ranks_per_node, run_calibration, ranks_per_node=ranks_per_node)
    assert all(result == results[0] for result in results)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(results[0]))
    cluster = Cluster.load(path)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.backend) == (2, ranks_per_node, "gloo")
    assert cluster.origin is not None
    assert cluster.origin.hosts == ("node0", "node1")
    expected = probes(Topology(ranks_per_node=ranks_per_node), 2 * ranks_per_node)
    assert len(cluster.measured_stages) == len(expected)
    for stage in cluster.measured_stages:
        seconds = [row[1] for row in stage.seconds_by_bytes]
        assert seconds == sorted(seconds)
        assert len(seconds) >= 3
    links = {overlap.link for overlap in cluster.measured_overlaps}
    assert links == ({"intra_node", "inter_node"} if ranks_per_node > 1 else {"inter_node"})
    assert cluster.device.peak_flop_per_s > 1e8
    assert 0 < cluster.device.sustained_efficiency <= 1
    assert 0 < cluster.device.attention_share <= 1  # 1 on a busy machine: products of 512 x 512 are faster
    assert all(cluster.measured_codec(Codec(bits=bits, rotation=r)) for bits in (8, 4, 2) for r in (False, True))
    workload = Workload(
        model=describe_model("bert-1.5b", 128), global_batch=cluster.world_size, micro_batch=1, recompute=False
    )
    assert simulate(workload, cluster, ShardConfig.preset("mics")).step_s > 0


def _stage_times(ctx: RankContext, machine: Machine) -> set[float]:
    options = CalibrationOptions(max_bytes=65536, overlap_s=4e-5)
    fields = calibrate(["a", "a"], Topology(ranks_per_node=ctx.ranks_per_node), machine.device, options)
    return {row[1] for stage in fields["measured_stages"] for row in stage["seconds_by_bytes"]}


def _timed(run: Callable[[], object], *_: Any) -> float:
    """As if every collective took 10 microseconds."""
    before = len(current_machine().launches)
    run()
    launched = len(current_machine().launches) - before
    assert launched in (0, 4)  # none where matrix products are timed
    return 1e-5 * max(1, launched)


def test_on_gpus_four_collectives_are_timed_in_a_row() -> None:
    """Of one alone between two waits of the host, its launch would be measured."""
    rates = {"matmul_rate": 1e14, "memory_rate": 1e12, "attention_rate": 7e13, "codec_rates": (1e9, 1e9)}
    rates |= {"layer_seconds": 1.0, "memory_bytes": 10**9, "device_name": "pretended", "matrix_product": lambda: None}
    with ExitStack() as stack:
        for name, rate in rates.items():
            stack.enter_context(mock.patch.object(calibrate_module, name, return_value=rate))
        stack.enter_context(mock.patch.object(calibrate_module, "time_slowest_rank", _timed))
        _, found = simulate_gpus(2, _stage_times, ranks_per_node=2)
    assert found == [{1e-5}] * 2


def test_no_zeros_are_multiplied() -> None:
    """With zeros a GPU runs at a higher clock."""
    product: Any = device_rates.matrix_product(torch.float32, torch.device("cpu"), small=True)()
    assert product.std().item() == pytest.approx(len(product) ** 0.5, rel=0.1)  # of normal values


class Attention(nn.Module):
    """Causal attention of 2 heads of 128 elements over 512 tokens, as a calibration of a CPU measures it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x, is_causal=True)


def test_attention_that_was_measured_is_predicted_to_take_its_time() -> None:
    with mock.patch.object(layer_time, "median_seconds", return_value=3.0):
        rate = layer_time.attention_rate(torch.float32, torch.device("cpu"), lambda: None)
    example = {"x": torch.zeros(1, 2, 512, 128, device="meta", requires_grad=True)}
    traced = TraceInput(name="attention", example=example, units="auto", loss=lambda out: out.sum())
    (unit,) = trace_model(Attention(), traced).units
    device = dataclasses.replace(tiny_cluster().device, memory_bytes_per_s=1e30, attention_share=0.5)
    device = dataclasses.replace(device, peak_flop_per_s=2 * rate / device.matmul_efficiency)
    assert sum(compute_times(unit, 1, device)) == pytest.approx(3.0)


def test_a_layer_takes_the_time_of_its_flop_and_of_its_memory_at_the_best_speed() -> None:
    """In fp32 on a CPU: 2 sequences of 128 tokens of 256 elements, a feed-forward network of 1024."""
    tokens, width = 2 * 128, 256
    flop = 2 * tokens * (12 * width**2 + 2 * 128 * width)
    device = tiny_cluster().device  # 5e10 FLOP/s
    endless = dataclasses.replace(device, memory_bytes_per_s=1e30)
    assert sustained_share(endless, torch.float32, "cpu", 6 * flop / 5e10) == pytest.approx(0.5)
    assert sustained_share(endless, torch.float32, "cpu", flop / 5e10) == 1.0
    half = dataclasses.replace(endless, sustained_efficiency=0.5)  # of an earlier calibration
    assert sustained_share(half, torch.float32, "cpu", 6 * flop / 5e10) == pytest.approx(0.5)
    assert sustained_share(device, torch.float32, "cpu", 6 * flop / 5e10) > 0.5


@pytest.mark.parametrize(("run_s", "in_a_row"), [(0.001, 7), (0.02, 2), (0.2, 1)])
def test_what_takes_long_is_run_fewer_times_in_a_row(
    monkeypatch: pytest.MonkeyPatch, run_s: float, in_a_row: int
) -> None:
    ends_s = [0.0]  # of the runs
    monkeypatch.setattr("time.perf_counter", lambda: ends_s[-1])
    seconds = device_rates.median_seconds(
        lambda: ends_s.append(ends_s[-1] + run_s), torch.device("cpu"), start_together=lambda: None
    )
    assert seconds == pytest.approx(run_s)
    assert len(ends_s) - 1 == 2 + 7 * in_a_row  # two before, the second of them timed


def refuse_a_peak(ctx: RankContext) -> str:
    options = CalibrationOptions(max_bytes=65536, stage_s=0.02, overlap_s=0.005, peak_flop_per_s=1e6)
    with few_runs(), pytest.raises(ConfigError) as refused:
        calibrate(["one"] * ctx.world_size, Topology(ranks_per_node=2), torch.device("cpu"), options)
    return str(refused.value)


def test_a_peak_below_what_is_measured_is_refused_on_all_ranks(ranks: RankPool) -> None:
    messages = ranks(2, refuse_a_peak, ranks_per_node=2)
    assert len(set(messages)) == 1
    assert "Give the peak of this device" in messages[0]


@pytest.mark.parametrize("wrong", [{"max_bytes": 10}, {"stage_s": 0.0}, {"overlap_s": 0.0}, {"dtype": "int8"}])
def test_options_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CalibrationOptions(**wrong)


def test_without_a_launcher_the_command_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["calibrate", "--output", "cluster.json"]) == 1
    assert "torchrun --nproc-per-node GPUS --no-python mics calibrate" in capsys.readouterr().err


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mics_strategy.cli"]
    env = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_under_torchrun_writes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    done = torchrun("calibrate", "--output", str(path), "--stage-s", "0.05", "--max-mib", "1", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert f"mics plan --cluster {path}" in done.stdout
    assert Cluster.load(path).world_size == 2
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.slow
def test_a_missing_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = torchrun("calibrate", "--output", str(tmp_path / "no" / "cluster.json"), "--device", "cpu")
    assert done.returncode != 0
    assert "There is no folder" in done.stderr
