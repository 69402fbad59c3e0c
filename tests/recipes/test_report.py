"""The report: lines a reader can trust."""

from dataclasses import dataclass

import pytest

from recipes.metrics import History
from recipes.report import loss_summary, sparkline, traffic_table
from recipes.resume import convert_progress


@dataclass
class Row:
    axis: str
    collective: str
    planned_bytes: int
    sent_bytes: int
    count: int


def test_the_table_shows_planned_and_sent_bytes_and_their_sums():
    rows = [Row("intra_node", "all_gather", 1_000, 1_000, 3), Row("inter_node", "all_reduce", 24, 24, 1)]
    assert traffic_table(rows).splitlines() == [
        "  axis        collective  calls  planned     sent",
        "  intra_node  all_gather      3  1,000 B  1,000 B  equal",
        "  inter_node  all_reduce      1     24 B     24 B  equal",
        "  total                       4  1,024 B  1,024 B  equal",
    ]


def test_bytes_that_were_not_planned_are_marked():
    lines = traffic_table([Row("inter_node", "all_reduce", 24, 48, 2)]).splitlines()
    assert [line.endswith("DIFFERENT") for line in lines] == [False, True, True]


def test_sums_do_not_hide_differences():
    rows = [Row("a", "all_gather", 24, 48, 2), Row("b", "all_gather", 48, 24, 2)]
    assert traffic_table(rows).splitlines()[-1].endswith("DIFFERENT")


@pytest.mark.parametrize(
    ("values", "bars"), [([3.0, 2.0, 1.0], "█▅▁"), ([1.0], "▁"), ([2.0, 2.0], "▁▁")], ids=["falls", "one", "flat"]
)
def test_a_sparkline_goes_from_low_to_high(values: list[float], bars: str):
    assert sparkline(values) == bars


def test_a_long_sparkline_keeps_its_ends():
    bars = sparkline([float(-step) for step in range(1000)])
    assert (len(bars), bars[0], bars[-1]) == (60, "█", "▁")


def test_a_run_that_did_nothing_has_no_summary():
    assert loss_summary(History()) == ""


def test_counts_of_micro_batches_are_converted_with_their_lag():
    counts = {"ready": 50, "started": 50, "processed": 50, "completed": 49}
    convert_progress(counts, saved=2, present=4)
    assert counts == {"ready": 100, "started": 100, "processed": 100, "completed": 99}
