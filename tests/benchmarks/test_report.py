"""Do table, file and ratios say what was measured?"""

import json
from pathlib import Path

import pytest

from benchmarks.entries import Entry, parse_ours, peer
from benchmarks.measure import Measured, Round, combine
from benchmarks.rank import RankJob, RankRecord
from benchmarks.report import Cluster, Report, make_report, plot, table, write_json
from benchmarks.workload import Workload

WORKLOAD = Workload(width=64, layers=1, vocabulary=128, sequence=16, micro_batch=1, accumulation=2)
CLUSTER = Cluster(nodes=2, ranks_per_node=2, rate_mbit=8.0)  # 1e6 bytes a second
LOSSES = [5.0, 4.0]


def round_of(step_s: list[float], losses: list[float] = LOSSES, planned_bytes: float | None = None) -> Round:
    return Round(
        step_s=step_s,
        cpu_s=[2 * value for value in step_s],
        micro_steps_s=[0.5 * value for value in step_s],
        sent_bytes=[3_000_000] * len(step_s),
        planned_bytes=[] if planned_bytes is None else [planned_bytes] * len(step_s),
        planned_last_bytes=[] if planned_bytes is None else [planned_bytes / 2] * len(step_s),
        facts={},
        losses=losses,
        peak_bytes=300_000_000,
        training_bytes=20_000_000,
    )


def measured(entry: Entry, *rounds: Round) -> Measured:
    return Measured(entry=entry, rounds=list(rounds))


def ours(label: str) -> Entry:
    (entry,) = parse_ours(label)
    return entry


def report_of(*items: Measured, loss_tolerance: float = 1e-4) -> Report:
    return make_report(list(items), WORKLOAD, CLUSTER, loss_tolerance=loss_tolerance)


@pytest.fixture
def report() -> Report:
    refused = Measured(entry=ours("mics:grad_codec=int4"), rounds=[], refused="`grad_codec='int4'` is not available.")
    return report_of(
        measured(peer("compute"), round_of([0.4, 0.4])),
        measured(peer("ddp"), round_of([2.0, 3.0]), round_of([9.0])),
        measured(peer("fsdp2"), round_of([4.0])),
        measured(ours("mics"), round_of([1.5], planned_bytes=2_900_000)),
        refused,
    )


def test_rows_hold_medians_over_all_rounds(report: Report) -> None:
    ddp = next(row for row in report.rows if row.label == "ddp")
    assert (ddp.step_s, ddp.step_s_range, ddp.cpu_s) == (3.0, (2.0, 9.0), 6.0)
    assert ddp.tokens_per_s == 4 * 2 * 16 / 3.0


def test_a_row_with_outer_steps_holds_means() -> None:
    rounds = [round_of([1.0, 1.0, 4.0], planned_bytes=9)]
    report = report_of(*(measured(ours(name), *rounds) for name in ("mics:outer_every=3", "mics:outer_every=0")))
    assert [row.step_s for row in report.rows] == [2.0, 1.0]
    assert [row.tokens_per_s for row in report.rows] == [4 * 2 * 16 / 2.0, 4 * 2 * 16 / 1.0]


def test_ratios_are_to_the_fastest_peer_and_the_floor(report: Report) -> None:
    ratios = {row.label: row.to_peer for row in report.rows}
    assert ratios["fsdp2"] == 4.0 / 3.0
    assert ratios["mics"] == 0.5
    assert report.compute_s == 0.4
    assert report.micro_step_s == 0.1
    assert report.floor_s == 0.1 + max(0.1, WORKLOAD.numel * 4 / 1e6)
    assert {row.label: row.to_floor for row in report.rows}["mics"] == 1.5 / report.floor_s


def test_the_number_of_parameters_is_the_models() -> None:
    assert WORKLOAD.numel == sum(parameter.numel() for parameter in WORKLOAD.model().parameters())


def test_the_table_shows_rows_and_refusals(report: Report) -> None:
    lines = table(report).splitlines()
    assert lines[0].split()[:3] == ["engine", "step", "s"]
    (mics,) = [line.split() for line in lines if line.startswith("mics ")]
    assert mics == [
        "mics",
        "1.500",
        "1.50-1.50",
        "3.00",
        "85",
        "3.00",
        "2.90",
        "300",
        "20",
        "0.50",
        "4.05",
        "0.52",
        "3.75",
        "4.0000",
    ]
    assert "mics:grad_codec=int4  refused: `grad_codec='int4'` is not available." in lines
    assert report.is_sound


def test_the_file_holds_every_row(report: Report, tmp_path: Path) -> None:
    write_json([report], {"cores": 2}, tmp_path / "compare.json")
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["cores"] == 2
    (found,) = written["reports"]
    assert [row["label"] for row in found["rows"]] == ["compute", "ddp", "fsdp2", "mics", "mics:grad_codec=int4"]
    assert found["rows"][3]["planned_bytes"] == 2_900_000
    assert found["workload"]["accumulation"] == 2


def test_the_plot_is_a_picture(report: Report, tmp_path: Path) -> None:
    plot(report, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("loss", [4.01, float("nan")])
def test_other_losses_are_found_in_any_round(loss: float) -> None:
    found = report_of(
        measured(peer("ddp"), round_of([1.0])), measured(ours("mics"), round_of([1.0]), round_of([1.0], [5.0, loss]))
    )
    assert not found.is_sound
    assert "LOSSES DISAGREE: mics has" in table(found)


@pytest.mark.parametrize("label", ["mics:grad_codec=int4", "mics:reduce_dtype=bfloat16", "zeropp"])
def test_losses_of_inexact_engines_are_their_own(label: str) -> None:
    assert report_of(
        measured(peer("ddp"), round_of([1.0])), measured(ours(label), round_of([1.0], [5.0, 4.1]))
    ).is_sound


def test_a_failure_is_a_row_and_not_sound() -> None:
    found = report_of(
        measured(peer("ddp"), round_of([1.0])), Measured(entry=ours("mics"), rounds=[], failed="Rank 1\nx")
    )
    assert not found.is_sound
    assert "mics  failed: Rank 1" in table(found)


def test_ranks_are_combined_by_step_and_node() -> None:
    def record(node: int, step_s: float, sent: int, planned: float) -> RankRecord:
        facts = [{"micro_steps_s": step_s / 2, "planned_bytes": planned, "planned_last_bytes": planned / 2}]
        return RankRecord(
            node=node,
            losses=[float(node)],
            step_s=[step_s],
            cpu_s=[step_s / 4],
            sent_bytes=[sent],
            facts=facts,
            peak_bytes=9,
            before_bytes=4,
        )

    found = combine(
        [record(0, 1.0, 50, 10.0), record(0, 4.0, 50, 20.0), record(1, 2.0, 60, 5.0), record(1, 1.0, 60, 5.0)]
    )
    assert (found.step_s, found.cpu_s, found.micro_steps_s, found.sent_bytes) == ([4.0], [2.0], [2.0], [60])
    assert (found.planned_bytes, found.losses) == ([30.0], [0.5])
    assert (found.peak_bytes, found.training_bytes) == (9, 5)


def test_engines_without_a_plan_have_no_planned_bytes() -> None:
    record = RankRecord(node=0, losses=[1.0], step_s=[1.0], cpu_s=[1.0], sent_bytes=[1], facts=[{}])
    assert combine([record, record]).planned_bytes == []


def test_a_job_travels_as_text() -> None:
    job = RankJob(entry=ours("mics:prefetch=2"), workload=WORKLOAD, warm_up=1, steps=2)
    assert RankJob.from_json(job.to_json()) == job
