"""Are parts of timelines summed, compared, and written as traces that a viewer reads?"""

import itertools
import json

import pytest

from mics_strategy import ConfigError
from mics_strategy.timeline import (
    COMPUTE_ROW,
    Category,
    Interval,
    PartKey,
    Row,
    Timeline,
    chrome_trace,
    compare,
    table,
)

FORWARD = PartKey(category=Category.COMPUTE, name="forward", unit="layers.0")
BACKWARD = PartKey(category=Category.COMPUTE, name="backward", unit="layers.0")
WAIT = PartKey(category=Category.WAIT, name="all_gather", unit="layers.0", axis="inter_node")
GATHER = PartKey(category=Category.COLLECTIVE, name="all_gather", unit="layers.0", axis="inter_node")
DATA = PartKey(category=Category.DATA, name="data")


def interval(key: PartKey, start_s: float, end_s: float, queued_s: float = 0.0) -> Interval:
    return Interval(key=key, start_s=start_s, end_s=end_s, queued_s=queued_s)


def two_steps(*, rank: int = 0, source: str = "recorded", wait_s: float = 1.0) -> Timeline:
    """Two equal steps: data 1 s, a wait, forward 2 s, backward 4 s; a gather on a row of its own."""
    compute, gathers, now = [], [], 10.0
    for _ in range(2):
        for key, seconds in ((DATA, 1.0), (WAIT, wait_s), (FORWARD, 2.0), (BACKWARD, 4.0)):
            compute.append(interval(key, now, now + seconds))
            now += seconds
        gathers.append(interval(GATHER, now - 3.0, now - 1.0, queued_s=0.5))
    rows = (
        Row(rank=rank, resource="gather", intervals=tuple(gathers)),
        Row(rank=rank, resource=COMPUTE_ROW, intervals=tuple(compute)),
    )
    return Timeline(source=source, num_steps=2, rows=rows)


def test_parts_add_up_to_the_step() -> None:
    timeline = two_steps()
    seconds = {str(part.key): part.seconds for part in timeline.parts(0)}
    assert seconds == {
        "forward layers.0": 2.0,
        "backward layers.0": 4.0,
        "all_gather layers.0 [inter_node]": 1.0,
        "data": 1.0,
    }
    assert sum(seconds.values()) == timeline.step_s(0) == 8.0
    assert [part.seconds for part in timeline.collectives(0)] == [2.0]


@pytest.mark.parametrize(("wait_s", "differs"), [(1.0, False), (1.19, False), (1.21, True), (0.79, True), (0.0, True)])
def test_a_part_is_marked_from_a_fifth_on(wait_s: float, differs: bool) -> None:
    rows = compare(two_steps(source="planned"), two_steps(wait_s=wait_s), 0)
    assert {row.key for row in rows if row.differs} == ({WAIT} if differs else set())


def test_work_in_one_timeline_only_is_marked() -> None:
    planned = two_steps(source="planned")
    shorter = [row if row.resource == COMPUTE_ROW else Row(rank=0, resource="x", intervals=()) for row in planned.rows]
    lacking = Timeline(source="recorded", num_steps=2, rows=tuple(shorter))
    assert [row.key for row in compare(planned, lacking, 0) if row.differs] == [GATHER]
    assert [row.key for row in compare(lacking, planned, 0) if row.differs] == [GATHER]


def test_the_table_shows_every_part_the_sum_and_the_marks() -> None:
    lines = table(two_steps(wait_s=1.5), 0, two_steps(source="planned")).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["compute", "compute", "wait", "data"]
    assert lines[3].split() == [
        "wait",
        "all_gather",
        "layers.0",
        "[inter_node]",
        "1500.000",
        "17.6%",
        "1000.000",
        "differs",
    ]
    assert lines[5].split() == ["sum", "of", "the", "parts", "8500.000", "100.0%"]
    assert lines[6].split() == ["step", "8500.000", "100.0%"]
    assert lines[7].split()[-3:] == ["2000.000", "23.5%", "2000.000"]
    assert sum(line.endswith("differs") for line in lines) == 1


def test_a_trace_has_the_plan_below_and_no_overlap_in_a_row() -> None:
    recorded, planned = two_steps(wait_s=2.0), two_steps(source="planned")
    trace = json.loads(json.dumps(chrome_trace(recorded, planned)))
    events = trace["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "rank 0 recorded"), (1, "rank 0 planned")]
    spans = [e for e in events if e["ph"] == "X" and e["name"] != "queued"]
    assert min(e["ts"] for e in spans if e["pid"] == 0) == min(e["ts"] for e in spans if e["pid"] == 1) == 0
    for pid, tid in {(e["pid"], e["tid"]) for e in spans}:
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(lane))
    marked = {e["name"] for e in spans if e["args"].get("differs")}
    assert marked == {"all_gather layers.0 [inter_node] (differs)"}
    queued = [e["dur"] for e in events if e["name"] == "queued"]
    assert queued == [pytest.approx(0.5e6)] * 4


def test_overlapping_collectives_have_lanes() -> None:
    gathers = (interval(GATHER, 0.0, 2.0), interval(GATHER, 1.0, 3.0), interval(GATHER, 2.0, 4.0))
    rows = (
        Row(rank=3, resource=COMPUTE_ROW, intervals=(interval(FORWARD, 0.0, 4.0),)),
        Row(rank=3, resource="gather", intervals=gathers),
    )
    events = chrome_trace(Timeline(source="recorded", num_steps=1, rows=rows))["traceEvents"]
    lanes = [(e["tid"], e["ts"]) for e in events if e["ph"] == "X" and e["cat"] == "collective"]
    assert lanes == [(1, 0.0), (1, 2e6), (2, 1e6)]


def test_malformed_timelines_are_refused() -> None:
    with pytest.raises(ConfigError, match="ends at"):
        interval(FORWARD, 2.0, 1.0)
    with pytest.raises(ConfigError, match="overlap on the compute row of rank 1"):
        Row(rank=1, resource=COMPUTE_ROW, intervals=(interval(FORWARD, 0.0, 2.0), interval(DATA, 1.0, 3.0)))
    with pytest.raises(ConfigError, match="one compute row for each rank"):
        Timeline(source="planned", num_steps=1, rows=(Row(rank=0, resource="gather", intervals=()),))
    with pytest.raises(ConfigError, match="Rank 7 has no row"):
        two_steps().parts(7)
