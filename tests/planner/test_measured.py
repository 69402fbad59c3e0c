"""Are measurements read as they were written, refused where they are wrong, and used instead of datasheets?"""

import dataclasses
import datetime
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy import ConfigError, ShardConfig, Topology
from mics_strategy.comm.traffic import StageTraffic
from mics_strategy.errors import NoFeasiblePlan
from mics_strategy.planner.calibration import calibration_warnings, check_calibration
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.choice import plan, simulate
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.measured import (
    FORMAT,
    MeasuredCompute,
    MeasuredUnit,
    monotone,
    slowdowns,
)
from mics_strategy.planner.plan_options import cluster_of
from mics_strategy.planner.space import Space
from mics_strategy.planner.upgrades import upgrades
from mics_strategy.planner.workload import Workload
from mics_strategy.scopes import resolve_scopes

DAY = "2026-01-31"


def fields(**changes: Any) -> dict[str, Any]:
    """A file as `mics calibrate` writes it, of two nodes of two ranks."""
    link = {"bandwidth": 1e9, "latency": 1e-5, "source": "mics calibrate"}
    stage = {"collective": "all_gather", "link": "inter_node", "size": 2, "ranks_of_node": 1}
    return {
        "name": "four",
        "nodes": 2,
        "ranks_per_node": 2,
        "backend": "gloo",
        "device": {
            "name": "cpu",
            "memory": 8e9,
            "memory_bandwidth": 1e10,
            "peak": 1e11,
            "matmul_efficiency": 0.5,
        },
        "intra_node": link,
        "inter_node": link,
        "overlap_slowdown": 1.5,
        "measured_stages": [
            {**stage, "seconds_by_bytes": [[1000, 1.0], [3000, 2.0]]},
            {**stage, "size": 4, "seconds_by_bytes": [[1000, 5.0]]},
            {**stage, "size": 4, "ranks_of_node": 2, "seconds_by_bytes": [[1000, 7.0]]},
        ],
        "measured_overlaps": [{"link": "inter_node", "compute": 1.25, "collective": 2.0}],
        "calibration": {
            "format": FORMAT,
            "date": DAY,
            "hosts": ["a", "b"],
            "world_size": 4,
            "torch_version": "2.13.0",
            "package_version": "0.1.0",
            "dtype": "float32",
            "flop_per_s": {"float32": 5e10},
        },
        **changes,
    }


CODEC = {"bits": 8, "rotation": False, "encoded_per_s": 1e9, "decoded_per_s": 2e9}


def load(folder: Path, **changes: Any) -> Cluster:
    path = folder / "cluster.json"
    path.write_text(json.dumps(fields(**changes)))
    return Cluster.load(path)


def test_a_calibration_is_a_cluster(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    assert (cluster.backend, cluster.overlap_slowdown, cluster.world_size) == ("gloo", 1.5, 4)
    assert cluster.origin is not None
    assert cluster.origin.hosts == ("a", "b")
    assert cluster.measured_codecs == ()  # as in files of earlier versions
    (overlap,) = cluster.measured_overlaps
    assert (overlap.link, overlap.compute, overlap.collective) == ("inter_node", 1.25, 2.0)


def test_measured_seconds_count_and_ranks_of_a_node_tell_spans_of_one_size_apart(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    topology = Topology(ranks_per_node=2)
    axes = resolve_scopes(ShardConfig.preset("mics"), topology, 4).axes
    times = CommTime(cluster, axes)

    def seconds(axis: str, size: int, full_bytes: int) -> float:
        return times.of(StageTraffic("all_gather", axis, size, torch.float32, full_bytes)).seconds

    assert seconds("inter_node", 2, 2000) == 1.5  # between the measured sizes
    assert seconds("inter_node", 2, 5000) == 3.0  # beyond them
    assert seconds("intra_node+inter_node", 4, 1000) == 7.0
    assert seconds("intra_node", 2, 2000) == pytest.approx(1e-5 + 1000 / 1e9)  # not measured: the link's figures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibration": {**fields()["calibration"], "format": 99}}, "format 99, and this version reads"),
        ({"calibration": {**fields()["calibration"], "date": "today"}}, "is no day"),
        ({"calibration": {"format": FORMAT}}, "must have format, date, hosts"),
        ({"measured_stages": [{"collective": "gather"}]}, "must have collective, link"),
        ({"measured_stages": [{**fields()["measured_stages"][0], "link": "moon"}]}, "is 'moon'"),
        ({"measured_stages": [{**fields()["measured_stages"][0], "size": 3, "ranks_of_node": 2}]}, "a divisor of"),
        (
            {"measured_stages": [{**fields()["measured_stages"][0], "seconds_by_bytes": [[9, 1.0], [3, 2.0]]}]},
            "ascending",
        ),
        ({"measured_stages": [{**fields()["measured_stages"][0], "seconds_by_bytes": [[9, 0.0]]}]}, "above 0"),
        ({"measured_overlaps": [{"link": "inter_node", "compute": 0.5, "collective": 1.0}]}, "no slow-down"),
        ({"measured_codecs": [{**CODEC, "bits": 4.5}]}, "are no codec"),
        ({"measured_codecs": [{**CODEC, "rotation": 1}]}, "are no codec"),
        ({"measured_codecs": [{**CODEC, "decoded_per_s": 0.0}]}, "`decoded_per_s=0.0`.*is no speed"),
        ({"measured_codecs": [{"bits": 8}]}, "must have bits, rotation, encoded_per_s"),
        ({"overlap_slowdown": 0.5}, "makes compute faster"),
        ({"backend": "mpi"}, "`backend='mpi'`"),
        ({"speed": 1}, "`speed` is no field"),
        ({"inter_node": None}, "`inter_node` of cluster .* is missing"),
        ({"nodes_per_switch": "2"}, "`nodes_per_switch='2'`"),
        ({"slowest_node_factor": "1"}, "`slowest_node_factor=1`"),
        ({"overlap_slowdown": 10**400}, "`overlap_slowdown="),
        ({"calibration": {**fields()["calibration"], "hosts": 3}}, "another form than `mics calibrate` writes"),
        ({"calibration": {**fields()["calibration"], "flop_per_s": 3}}, "another form than `mics calibrate` writes"),
        ({"measured_stages": [{**fields()["measured_stages"][0], "seconds_by_bytes": [[9]]}]}, "ascending"),
        ({"measured_codecs": [{**CODEC, "decoded_per_s": 10**400}]}, "is no speed"),
        ({"intra_node": {"bandwidth": 10**400, "latency": 1, "source": ""}}, "not a quantity above 0"),
    ],
)
def test_a_wrong_or_foreign_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.yaml", b"a: &a [x, x]\nb: [*a, *a]\n", "has an alias"),
        ("c.json", b"[" * 100_000, "not valid JSON"),
        ("c.json", b"\xff{}", "not valid JSON"),
        ("c.toml", b"a = " + b"[" * 100_000, "not valid TOML"),
        ("c.yaml", b"name: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
    ids=["aliases", "nested JSON", "bytes", "nested TOML", "an object"],
)
def test_a_file_that_is_no_data_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Cluster.load(tmp_path / name)


def test_other_ranks_of_a_node_or_another_backend_are_refused(tmp_path: Path) -> None:
    cluster = load(tmp_path)
    check_calibration(cluster, ranks_per_node=2, backend="gloo")
    check_calibration(Cluster.preset("p4d.24xlarge"), ranks_per_node=1, backend="gloo")  # not calibrated
    with pytest.raises(ConfigError, match=r"`ranks_per_node=8` was asked for.*calibrated with 2 on a, b"):
        check_calibration(cluster, ranks_per_node=8)
    with pytest.raises(ConfigError, match=r"`backend='nccl'` was asked for.*'gloo'"):
        check_calibration(cluster, backend="nccl")


def test_links_that_were_not_measured_are_refused(tmp_path: Path) -> None:
    cluster = load(tmp_path, nodes=1, calibration={**fields()["calibration"], "hosts": ["a"], "world_size": 2})
    with pytest.raises(ConfigError, match=r"2 nodes were asked for.*calibrated on one, a"):
        cluster.with_nodes(2)


def test_a_calibration_of_one_node_plans_for_it_and_says_what_a_second_one_needs(tmp_path: Path) -> None:
    origin = {**fields()["calibration"], "hosts": ["a"], "world_size": 2}
    stages = [{**stage, "link": "intra_node", "ranks_of_node": 2} for stage in fields()["measured_stages"][:1]]
    cluster = load(tmp_path, nodes=1, calibration=origin, measured_stages=stages)
    training = Workload(model=describe_model("bert-1.5b", 128), global_batch=8)
    with pytest.raises(NoFeasiblePlan, match=r"No plan fits.*To fit, use \d+ nodes, or take a device") as refused:
        plan(training, cluster, Space())
    assert str(refused.value).endswith(f"GB instead of {cluster.device.name}, which this file was calibrated on.")
    large = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=10**11))
    assert plan(training, large, Space()).step.step_s > 0
    reasons = {upgrade.name: upgrade.reason for upgrade in upgrades(training, large, Space())}
    assert reasons["2 times the memory"] == ""
    assert "calibrated on one, a" in reasons["2 times the nodes"]


def test_old_calibrations_and_other_sizes_and_versions_are_said(tmp_path: Path) -> None:
    cluster, day = load(tmp_path), datetime.date.fromisoformat(DAY)
    assert calibration_warnings(cluster, day, "2.13.0+cpu") == []
    (old,) = calibration_warnings(cluster, day + datetime.timedelta(days=200), "2.13.0")
    assert "200 days old" in old
    (larger,) = calibration_warnings(cluster.with_nodes(4), day, "2.13.0")
    assert "on 4 ranks, and 8 are asked for" in larger
    (other,) = calibration_warnings(cluster, day, "2.12.0")
    assert "torch 2.13.0, and 2.12.0" in other
    assert calibration_warnings(Cluster.preset("p4d.24xlarge"), day, "1.0") == []


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((1.0, 4.0, 1.0, 3.0), (1.0, 1.0)),  # neither slows the other
        ((1.0, 4.0, 2.0, 3.0), (2.0, 2.0)),  # in 2 s of computation, the collective did 1 s of its work
        ((1.0, 4.0, 1.5, 4.0), (1.5, 10.0)),  # no work at all: the largest slow-down
        ((1.0, 4.0, 0.9, 2.0), (1.0, 1.0)),  # noise is no speed-up
    ],
)
def test_slow_downs_are_those_of_the_fluid_model(
    times: tuple[float, float, float, float], expected: tuple[float, float]
) -> None:
    assert tuple(slowdowns(*times).values()) == pytest.approx(expected)


def test_no_size_takes_longer_than_a_larger_one() -> None:
    assert monotone([(1, 5.0), (2, 2.0), (4, 3.0), (8, 9.0)]) == [(1, 2.0), (2, 2.0), (4, 3.0), (8, 9.0)]


def workload(**changes: Any) -> Workload:
    return Workload(model=describe_model("bert-1.5b", 128), global_batch=8, micro_batch=2, recompute=False, **changes)


def test_measured_computation_counts() -> None:
    cluster, config = Cluster.preset("p4d.24xlarge", nodes=1).with_nodes(1), ShardConfig.preset("ddp")
    cluster = dataclasses.replace(cluster, ranks_per_node=1)
    model = workload().model
    units = tuple(MeasuredUnit(name=unit.name, forward_s=1.0, backward_s=2.0) for unit in model.units)
    measured = MeasuredCompute(micro_batch=2, units=units, optimizer_s_per_numel=1e-9)
    step = simulate(workload(measured=measured), cluster, config)
    numel = sum(unit.numel for unit in model.units)
    assert step.step_s == pytest.approx(4 * 3.0 * len(units) + 1e-9 * numel)
    with pytest.raises(ConfigError, match="`micro_batch=1` was asked for, and 2 was measured"):
        simulate(workload(measured=measured), cluster, config, micro_batch=1)
    with pytest.raises(ConfigError, match="whole units were measured"):
        simulate(workload(measured=measured), cluster, config, recompute="attention")
    half = simulate(workload(measured=measured), cluster, config, recompute=0.5)
    layers = sum(unit.is_layer for unit in model.units)
    assert half.step_s - step.step_s == pytest.approx(4 * layers // 2)
    other = dataclasses.replace(measured, units=units[1:])
    with pytest.raises(ConfigError, match="Measure its own units"):
        simulate(workload(measured=other), cluster, config)


def test_the_commands_say_why_a_calibration_is_trusted_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(tmp_path, calibration={**fields()["calibration"], "date": "2020-01-01", "torch_version": "2.1.0"})
    options = Namespace(cluster=str(tmp_path / "cluster.json"), nodes="4", best_kernels=False, communicator_memory=None)
    assert cluster_of(options).num_nodes == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert [word in output.err for word in ("days old", "4 ranks, and 8", "torch 2.1.0")] == [True] * 3


def test_a_calibration_of_one_node_does_not_plan_for_two(tmp_path: Path) -> None:
    calibration = {**fields()["calibration"], "hosts": ["a"], "world_size": 2}
    load(tmp_path, calibration=calibration, nodes=1)
    with pytest.raises(ConfigError, match=r"links between nodes were not measured.*2 nodes"):
        cluster_of(
            Namespace(cluster=str(tmp_path / "cluster.json"), nodes="2", best_kernels=False, communicator_memory=None)
        )
