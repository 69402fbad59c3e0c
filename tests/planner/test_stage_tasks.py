"""Stages of a collective run one after the other; links and the device slow each other."""

import dataclasses
import itertools

import pytest
import torch

from mics_strategy import ShardConfig, Topology
from mics_strategy.comm.traffic import StageTraffic
from mics_strategy.engine.plan import Plan, PlannedCollective, StepOrder
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.choice import simulate
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.event_queue import DEVICE, Slowdown, Task, run
from mics_strategy.planner.measured import MeasuredStage
from mics_strategy.planner.step_tasks import StepRules, UnitTime, step_tasks
from mics_strategy.planner.workload import Workload
from mics_strategy.scopes import resolve_scopes

MIB = 2**20


def cluster(backend: str = "gloo") -> Cluster:
    """Two nodes of two, whose all-gathers of 8 MiB take 0.8 s between nodes and 0.4 s inside them."""
    stages = tuple(
        MeasuredStage(
            collective="all_gather",
            link=link,
            size=2,
            ranks_of_node=ranks,
            seconds_by_bytes=((MIB, seconds / 8), (8 * MIB, seconds)),
        )
        for link, ranks, seconds in (("inter_node", 1, 0.8), ("intra_node", 2, 0.4))
    )
    return dataclasses.replace(
        Cluster.preset("p4d.24xlarge", nodes=2), ranks_per_node=2, backend=backend, measured_stages=stages
    )


def gather(axis: str, stage: int) -> PlannedCollective:
    traffic = StageTraffic("all_gather", axis, 2, torch.float32, 8 * MIB)
    return PlannedCollective(traffic, unit="", phase="forward", micro_step=0, role="param_all_gather", stage=stage)


@pytest.mark.parametrize("second_stage", [0, 1], ids=["two collectives", "two stages"])
def test_stages_and_collectives_of_a_unit_run_one_after_the_other(second_stage: int) -> None:
    topology = Topology(ranks_per_node=2)
    axes = resolve_scopes(ShardConfig.preset("zero3"), topology, 4).axes
    collectives = (gather("inter_node", 0), gather("intra_node", second_stage))
    order = StepOrder(forward=(0,), backward=(0,), num_micro_steps=1)
    rules = StepRules(overlap=frozenset(), prefetch=1, sync_axes=frozenset(), comm_time=CommTime(cluster("nccl"), axes))
    unit = UnitTime(name="", forward_s=0.0, recompute_s=0.0, backward_s=0.0)
    tasks = step_tasks(Plan(collectives=collectives, num_micro_steps=1), order, (unit,), 0.0, rules)
    assert max(run(tasks.tasks).end_s) == pytest.approx(1.2)


@pytest.mark.parametrize("preset", ["zero3", "mics", "zero1", "zeropp-hpz", "paro-iig", "ddp"])
def test_stages_of_a_collective_are_on_axes_of_their_own(preset: str) -> None:
    workload = Workload(model=describe_model("bert-1.5b", 128), global_batch=8, micro_batch=1, recompute=False)
    step = simulate(workload, cluster(), ShardConfig.preset(preset))
    collectives = step.job.plan(2).collectives
    starts = [index for index, planned in enumerate(collectives) if planned.stage == 0]
    for start, end in itertools.pairwise([*starts, len(collectives)]):
        stages = collectives[start:end]
        assert [planned.stage for planned in stages] == [*range(len(stages))]
        assert len({(planned.unit, planned.phase) for planned in stages}) == 1
        assert len({(planned.axis, planned.collective) for planned in stages}) == len(stages)


def test_a_link_and_the_device_slow_each_other() -> None:
    tasks = [Task("compute", DEVICE, 1.0, ()), Task("gather", "link", 1.0, ())]
    times = run(tasks, links={"link": Slowdown(device=2.0, link=4.0)})
    assert times.end_s == pytest.approx([2.0, 2.5])  # in 2 s at a quarter of its speed, then half a second alone
    assert run(tasks).end_s == [1.0, 1.0]
    assert run(tasks, 2.0).end_s == pytest.approx([1.5, 1.0])  # a link without figures of its own


def test_slow_downs_of_two_links_add_up() -> None:
    tasks = [Task("compute", DEVICE, 1.0, ()), Task("gather", "a", 9.0, ()), Task("reduce", "b", 9.0, ())]
    links = {"a": Slowdown(device=1.5), "b": Slowdown(device=2.0)}
    assert run(tasks, links=links).end_s[0] == pytest.approx(2.5)
