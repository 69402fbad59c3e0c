"""Does a profile on a GPU change nothing but to record events, and wait for none of them in a step?"""

from unittest import mock

import pytest
import torch

from mics_strategy.comm.ranges import RecordedCollective
from mics_strategy.timeline import Category, Timeline
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import config_of, one_of_many, start

PRESETS = ("mics", "zero1", "ddp")


def train(preset: str, *, is_profiled: bool, recomputes: str = "") -> tuple[Machine, Timeline | None]:
    """Three steps, of which a profile records all; the last one, after which it reads its events, may wait."""
    timeline = None
    with one_of_many() as machine:
        training = start(machine, config_of(preset), recomputes=recomputes)
        for _ in range(4):
            training.backward()
            training.update()
        profile = training.sharded.profile(steps=3) if is_profiled else None
        training.step()
        training.step()
        waits = list(machine.waits)
        training.backward()
        training.update()
        if profile is not None:
            rows = profile.result.own_rows  # the pretended ranks say what rank 0 says
            timeline = Timeline(source="recorded", num_steps=3, rows=rows)
        machine.waits[:] = waits
    return machine, timeline


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", PRESETS)
def test_kernels_collectives_and_their_order_are_those_without_a_profile(preset: str) -> None:
    plain, _ = train(preset, is_profiled=False)
    profiled, _ = train(preset, is_profiled=True)
    assert profiled.waits == plain.waits == []
    assert profiled.races == plain.races == []
    assert profiled.launches == plain.launches
    assert profiled.log == plain.log


@pytest.mark.parametrize("preset", PRESETS)
def test_waits_of_the_compute_stream_and_collectives_of_side_streams_are_recorded(preset: str) -> None:
    _, timeline = train(preset, is_profiled=True)
    assert timeline is not None
    compute, *queues = timeline.rows_of(0)
    keys = [interval.key for interval in compute.intervals]
    units = {f"layers.{index}" for index in range(4)}
    for name in ("forward", "backward"):
        assert units <= {key.unit for key in keys if key.name == name}
    collectives = {i.key for row in queues if row.resource != "control" for i in row.intervals}
    waits = {(key.name, key.unit) for key in keys if key.category is Category.WAIT}
    assert {key.name for key in collectives} >= {"all_gather"} if preset != "ddp" else {"all_reduce"}
    exposed = {unit for name, unit in waits if name == ("all_gather" if preset != "ddp" else "all_reduce")}
    assert units <= exposed
    assert sum(part.seconds for part in timeline.parts(0)) == pytest.approx(timeline.step_s(0))


@pytest.mark.parametrize("preset", PRESETS)
def test_waits_of_side_streams_are_none_of_the_compute_row(preset: str) -> None:
    """The host waits for each collective inside a chain, on a side stream. The row has the waits for the chain."""
    streams: list[torch.cuda.Stream] = []
    begin_wait = RecordedCollective.begin_wait

    def spied(collective: RecordedCollective) -> None:
        streams.append(torch.cuda.current_stream())
        begin_wait(collective)

    with one_of_many() as machine, mock.patch.object(RecordedCollective, "begin_wait", spied):
        training = start(machine, config_of(preset))
        training.step()
        training.sharded.profile(steps=1)
        training.step()
        compute = torch.cuda.current_stream()
    assert len(streams) > 4
    assert set(streams) == {compute}


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "alone"])
def test_torch_profiler_shows_collectives_where_they_are_launched(is_recorded: bool) -> None:
    with one_of_many() as machine:
        training = start(machine, config_of("mics"))
        training.step()
        if is_recorded:
            training.sharded.profile(steps=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            training.step()
    ranges = {event.key for event in profiler.key_averages() if event.key.startswith("mics::")}
    for layer in range(4):
        gather = f"all_gather layers.{layer} [intra_node]"
        assert {f"mics::forward layers.{layer}", f"mics::{gather}", f"mics::wait {gather}"} <= ranges


@pytest.mark.parametrize("recomputes", ["reentrant", "other"])
def test_recomputations_are_recorded_as_such(recomputes: str) -> None:
    _, timeline = train("mics", is_profiled=True, recomputes=recomputes)
    assert timeline is not None
    recomputed = {part.key.unit for part in timeline.parts(0) if part.key.name == "recompute"}
    assert recomputed == {f"layers.{index}" for index in range(4)}
