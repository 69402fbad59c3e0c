"""Is the comparison of plan and measurement itself right?"""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.entries import parse_ours
from benchmarks.truth import Row, describe, main, pairs_in_order, parser, report
from benchmarks.workload import Workload
from mics_strategy.engine.units import find_units
from tests.benchmarks.needs import needs_testbed


def row(predicted_s: float, measured_s: float, accumulation: int = 1) -> Row:
    return Row(
        label="mics",
        rate_mbit=200.0,
        width=256,
        accumulation=accumulation,
        predicted_s=predicted_s,
        measured_s=measured_s,
        planned_bytes={"inter_node": 8.0},
        issued_bytes={"inter_node": 8.0},
        wire_ratio=1.0,
    )


def test_pairs_count_only_where_times_differ_and_the_setting_is_one() -> None:
    rows = [row(1.0, 1.0), row(2.0, 3.0), row(3.0, 2.0), row(3.1, 2.01), row(0.1, 9.0, accumulation=4)]
    rows.append(dataclasses.replace(rows[0], width=8, measured_s=9.0))
    assert pairs_in_order(rows) == (3, 5)  # the second before the third and the fourth is wrong; these two are alike


def test_the_report_has_the_median_error_and_the_order() -> None:
    text = report([row(1.1, 1.0), row(2.0, 2.0), row(3.0, 4.0)])
    assert "median 10.0%, 1 of 3 within 5 %, worst 25.0%" in text
    assert "3 of 3 pairs" in text
    assert "tau 1.00" in text


def test_the_described_model_is_the_trained_one() -> None:
    workload = Workload(width=64, layers=2, vocabulary=128, sequence=16)
    described = describe(workload)
    assert described.numel == workload.numel
    assert [unit.name for unit in described.units] == [unit.name for unit in find_units(workload.model(), "auto")]


def test_by_default_there_are_thirty_configurations() -> None:
    options = parser().parse_args([])
    assert len(parse_ours(options.ours)) * len(options.rate_mbit) * len(options.accumulation) >= 30


@pytest.mark.weekly
@needs_testbed
@pytest.mark.timeout(900)
def test_planned_bytes_are_those_on_the_wire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--width 128 --layers 2 --vocabulary 512 --sequence 32 --micro-batch 1 --accumulation 2 --steps 2"
    arguments = f"--rate-mbit 400 --ours mics --stage-s 0.1 --warm-up 1 {small}"
    assert main([*arguments.split(), "--output", str(tmp_path / "rows.json")]) == 0
    assert "bytes: 1 of 1 equal" in capsys.readouterr().out
