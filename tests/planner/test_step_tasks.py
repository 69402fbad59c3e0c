"""Does the simulated step keep the engine's order and overlaps?"""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest

from mics_strategy.config import ShardConfig
from mics_strategy.engine.plan import ROOT_NAME
from mics_strategy.planner.measured import MeasuredStage
from mics_strategy.planner.simulator import PlayedStep, planned_timeline, play, sent_bytes, step_seconds
from mics_strategy.planner.step_tasks import COMPUTE, FIRST_HOP, GATHER, SECOND_HOP
from mics_strategy.timeline import Category, compare
from tests.planner.jobs import job, tiny_cluster

LAYERS = [f"model.layers.{i}" for i in range(4)]
BUSY = ShardConfig(params="world", grads="partition", optimizer="world")  # every kind of collective has a link


def played(config: ShardConfig, num_micro_steps: int = 2, **changes: object) -> PlayedStep:
    return play(job(config, **changes), num_micro_steps)


def intervals(step: PlayedStep, stream: str, name: str = "") -> Iterator[tuple[str, float, float]]:
    """Units with start and end."""
    for index, (task, label) in enumerate(zip(step.tasks.tasks, step.tasks.labels, strict=True)):
        if task.stream == stream and (not name or label.name == name):
            yield label.unit, step.times.start_s[index], step.times.end_s[index]


def test_units_compute_in_the_order_of_the_model_and_back() -> None:
    step = played(BUSY, 1)
    assert [unit for unit, _, _ in intervals(step, COMPUTE, "forward")] == [*LAYERS, ROOT_NAME]
    assert [unit for unit, _, _ in intervals(step, COMPUTE, "backward")] == [ROOT_NAME, *LAYERS[::-1]]


def test_nothing_computes_before_its_gather_and_nothing_is_reduced_before_its_backward() -> None:
    step = played(BUSY, 1)
    gathered: dict[str, float] = {}
    for unit, _, end in intervals(step, GATHER):
        gathered.setdefault(unit, end)
    assert all(start >= gathered[unit] for unit, start, _ in intervals(step, COMPUTE, "forward"))
    backwards = {unit: end for unit, _, end in intervals(step, COMPUTE, "backward")}
    first_hops = [*intervals(step, FIRST_HOP)]
    assert {unit for unit, _, _ in first_hops} == {ROOT_NAME, *LAYERS}
    assert all(start >= backwards[unit] for unit, start, _ in first_hops)


def test_a_gather_starts_with_the_compute_of_the_unit_before() -> None:
    """With prefetch=1 that of unit 3 is not sent before unit 1 has computed."""
    step = played(BUSY, 1)
    ends = {unit: end for unit, _, end in intervals(step, COMPUTE, "forward")}
    starts: dict[str, float] = {}
    for unit, start, _ in intervals(step, GATHER):
        starts.setdefault(unit, start)
    assert starts[LAYERS[3]] >= ends[LAYERS[1]]
    assert starts[LAYERS[2]] < ends[LAYERS[1]]


def test_second_hops_follow_the_last_micro_step_alone() -> None:
    step = played(BUSY, 2)
    last_start = sorted(start for _, start, _ in intervals(step, COMPUTE, "backward"))[len(LAYERS) + 1]
    second_hops = [*intervals(step, SECOND_HOP)]
    assert {unit for unit, _, _ in second_hops} == {ROOT_NAME, *LAYERS}
    assert all(start >= last_start for _, start, _ in second_hops)
    every = played(BUSY.replace(second_hop="micro_step"), 2)
    assert len([*intervals(every, SECOND_HOP)]) == 2 * len(second_hops)
    assert every.seconds > step.seconds


@pytest.mark.parametrize("overlap", ["all", "none"])
def test_a_cpu_computes_longer_by_the_calls_of_its_collectives_and_a_gpu_does_not(overlap: str) -> None:
    """Every stage of a unit costs as much as the smallest one inside a node, which the calibration has measured."""
    tables = [(2, ((4096, 3e-3), (2**20, 5e-3))), (4, ((4096, 2e-3), (2**20, 9e-3)))]
    stages = tuple(
        MeasuredStage(collective="send", link="intra_node", size=size, ranks_of_node=size, seconds_by_bytes=table)
        for size, table in tables
    )
    config = BUSY.replace(overlap=overlap)
    computed: dict[str, Counter[tuple[str, str]]] = {"gloo": Counter(), "nccl": Counter()}
    calls = Counter[tuple[str, str]]()
    for backend, seconds in computed.items():
        cluster = dataclasses.replace(tiny_cluster(), measured_stages=stages, backend=backend)
        tasks = played(config, 2, cluster=cluster).tasks
        calls.clear()
        for task, label in zip(tasks.tasks, tasks.labels, strict=True):
            if label.stage is None:
                seconds[label.name, label.unit] += task.seconds
            else:
                calls["forward" if label.stage.phase == "forward" else "backward", label.unit] += 1
    for unit in (ROOT_NAME, *LAYERS):
        for name in ("forward", "backward"):
            longer = computed["gloo"][name, unit] - computed["nccl"][name, unit]
            assert longer == pytest.approx(calls[name, unit] * 2e-3)
            assert calls[name, unit] >= 2
    assert computed["gloo"]["step", ""] == computed["nccl"]["step", ""]


def test_recomputation_runs_in_front_of_the_backward_of_layers_alone() -> None:
    step = played(BUSY, 1, recompute=True)
    recomputed = {unit: end for unit, _, end in intervals(step, COMPUTE, "recompute")}
    assert {*recomputed} == {*LAYERS}
    assert all(s == e for u, s, _ in intervals(step, COMPUTE, "backward") for e in [recomputed.get(u, s)])
    assert step.seconds > played(BUSY, 1).seconds


@pytest.mark.parametrize("switch", ["gather", "reduce", "second_hop", "update"])
def test_each_overlap_saves_time(switch: str) -> None:
    """The update has an own payload where stepped parameters are synchronized."""
    config = BUSY.replace(params="partition") if switch == "update" else BUSY
    overlaps = {"gather", "reduce", "second_hop", "update"}
    with_all = played(config.replace(overlap=overlaps)).seconds
    without = played(config.replace(overlap=overlaps - {switch})).seconds
    assert without > with_all * 1.001
    assert played(config.replace(overlap="none")).seconds >= without


def test_a_secondary_copy_keeps_later_gathers_inside_the_node() -> None:
    config = ShardConfig(params="world", grads="world", optimizer="world")
    plain, kept = played(config), played(config.replace(secondary_params="partition"))
    assert kept.seconds < plain.seconds

    def links(step: PlayedStep) -> list[str]:
        return [task.resource for task in step.tasks.tasks if task.stream == GATHER]

    assert links(kept).count("inter_node") == len(LAYERS) + 1  # once in a step
    assert links(plain).count("inter_node") > 2 * len(LAYERS)


@pytest.mark.parametrize("preset", ["ddp", "mics", "zero3", "zeropp-hpz", "paro-nig", "zeropp"])
def test_a_step_of_many_micro_steps_is_as_long_as_its_full_simulation(preset: str) -> None:
    seven = job(ShardConfig.preset(preset), global_batch=28)
    assert seven.num_micro_steps == 7
    assert step_seconds(seven) == pytest.approx(play(seven, 7).seconds, rel=1e-6)


@pytest.mark.parametrize("preset", ["ddp", "mics", "zero3", "zeropp"])
def test_the_compute_row_is_disjoint_and_sums_to_the_step(preset: str) -> None:
    simulated = job(ShardConfig.preset(preset), recompute=True)
    step = play(simulated, 3)
    timeline = planned_timeline(step, simulated.scopes)  # a row that overlaps is refused
    assert sum(part.seconds for part in timeline.parts(0)) == pytest.approx(step.seconds)
    assert timeline.step_s(0) == pytest.approx(step.seconds)


@pytest.mark.parametrize("preset", ["mics", "zero3", "zeropp", "zeropp-hpz", "paro-gig"])
def test_collectives_of_a_timeline_send_the_planned_bytes_over_their_whole_span(preset: str) -> None:
    simulated = job(ShardConfig.preset(preset))
    timeline = planned_timeline(play(simulated, 2), simulated.scopes)
    found = [i for row in timeline.rows_of(0)[1:] for i in row.intervals]
    assert sum(interval.sent_bytes for interval in found) == simulated.plan(2).sent_bytes()
    names = {
        simulated.scopes.span_of(stage.role).name for stage in simulated.plan(2).collectives if stage.unit in LAYERS
    }
    assert {interval.key.axis for interval in found if interval.key.unit in LAYERS} == names
    assert {interval.key.category for interval in found} == {Category.COLLECTIVE}


def test_a_slow_node_and_a_slow_device_lengthen_the_step() -> None:
    slow = tiny_cluster(slowest_node_factor=1.5)
    busy = tiny_cluster(overlap_slowdown=1.2)
    mics = ShardConfig.preset("mics")
    base = step_seconds(job(mics))
    assert base < step_seconds(job(mics, slow)) < 1.5 * base * 1.001
    assert base < step_seconds(job(mics, busy)) < 1.2 * base * 1.001


def test_equal_timelines_have_no_different_part_and_another_cluster_has() -> None:
    mics = ShardConfig.preset("mics")
    one, other = (
        job(mics),
        job(mics, tiny_cluster(device=dataclasses.replace(tiny_cluster().device, peak_flop_per_s=5e10))),
    )
    timelines = [planned_timeline(play(each, 2), each.scopes) for each in (one, one, other)]
    assert not any(part.differs for part in compare(timelines[0], timelines[1], 0))
    differing = {part.key.name for part in compare(timelines[0], timelines[2], 0) if part.differs}
    assert {"forward", "backward"} <= differing


@pytest.mark.parametrize("num_micro_steps", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("second_hop", ["boundary", "micro_step"])
def test_what_a_step_sends_is_that_of_all_its_micro_steps(num_micro_steps: int, second_hop: str) -> None:
    """The plan of all of them, beside that of three."""
    planned = job(BUSY.replace(second_hop=second_hop), global_batch=4 * num_micro_steps)
    assert planned.num_micro_steps == num_micro_steps
    whole = Counter[str]()
    for collective in planned.plan(num_micro_steps).collectives:
        whole[collective.axis] += collective.sent_bytes
    assert sent_bytes(planned) == whole
