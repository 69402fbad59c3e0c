"""How well does the planner predict steps on slow links?

``python -m benchmarks.truth`` calibrates the testbed, predicts bytes and time of every configuration, and measures them
with the engine, all in one run. Nothing is fitted to a configuration: the links are those that `mics calibrate` has
measured, the computation that of the plain model with all ranks computing at once. With ``--compute away`` layers sleep
in place of computing, as in `benchmarks.compare`. See docs/planner-truth.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import unit_times, workload_options
from benchmarks.entries import Entry, parse_ours
from benchmarks.launch import Launch, RankFailedError, launch
from benchmarks.measure import Measured, Setup, measure
from benchmarks.testbed import Testbed, TestbedError, make_testbed
from benchmarks.workload import AWAY, Workload
from mics_strategy import MiCSError, ShardConfig
from mics_strategy.planner.choice import simulate
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.workload import Workload as PlannedWorkload
from mics_strategy.text_table import text_table

OURS = (
    "mics,mics:partition_size=4,mics:overlap=none,mics:grad_codec=int8,mics:grad_codec=int4,"
    "zero1,zero2,zero3,zeropp-hpz,paro-iig"
)
_TIMEOUT_S = 300.0
_CLEAR = 0.05  # pairs whose measured times differ by less have no order


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration, predicted and measured.

    Attributes:
        label: The entry.
        rate_mbit: Rate of a node's link, Mbit/s.
        width: Width of the model.
        accumulation: Micro-steps of a step.
        predicted_s: Predicted seconds of a step.
        measured_s: Median over the measured steps of the slowest rank.
        planned_bytes: That one rank sends in a step, by axis, as the planner says.
        issued_bytes: The same as the engine has submitted.
        wire_ratio: Bytes counted on a node's link, by those that the planner sends over it; 0 where it does not say.
    """

    label: str
    rate_mbit: float
    width: int
    accumulation: int
    predicted_s: float
    measured_s: float
    planned_bytes: dict[str, float]
    issued_bytes: dict[str, float]
    wire_ratio: float

    @property
    def error(self) -> float:
        """Of the predicted time, relative to the measured one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_exact(self) -> bool:
        """Whether planned and issued bytes are equal on every axis."""
        return self.planned_bytes == self.issued_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, measure, print and write; 0 when every configuration ran and all bytes are as planned."""
    rows: list[Row] = []
    try:
        options = workload_options.parse(parser(), arguments)
        for found in run(options):
            rows += found
    except (TestbedError, RankFailedError, MiCSError, ValueError) as error:
        if rows:
            print(report(rows))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(report(rows))
    if options.output is not None:
        options.output.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return 0 if rows and all(row.is_exact for row in rows) else 1


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--nodes", type=int, default=2)
    add("--ranks-per-node", type=int, default=2)
    add("--rate-mbit", type=float, nargs="+", default=[200.0, 800.0], help="of each node's link, in each direction")
    add("--ours", default=OURS, help="presets, each with overrides, as for `compare`")
    workload_options.add_options(made, accumulation=[1, 4])
    add("--rounds", type=int, default=1, help="in each, every configuration runs once")
    add("--steps", type=int, default=4, help="measured in each round")
    add("--warm-up", type=int, default=2, help="steps before them")
    add("--stage-s", type=float, default=1.0, help="of `mics calibrate`")
    add("--output", type=Path, default=None, help="a file for the numbers, as JSON")
    add("--keep", type=Path, default=None, help="a folder for the calibrations")
    return made


def run(options: argparse.Namespace) -> Iterator[list[Row]]:
    """All rows, link by link and workload by workload.

    Raises:
        TestbedError: The testbed cannot be made here.
        RankFailedError: A rank failed.
        ConfigError: A configuration is impossible here.
    """
    entries = [_two_stages(entry) for entry in parse_ours(options.ours)]
    with tempfile.TemporaryDirectory(prefix="truth-") as temporary:
        folder = Path(temporary) if options.keep is None else options.keep
        folder.mkdir(parents=True, exist_ok=True)
        for rate_mbit in options.rate_mbit:
            with make_testbed(nodes=options.nodes, rate_mbit=rate_mbit) as bed:
                for workload in workload_options.workloads(options):
                    yield _rows(bed, entries, rate_mbit, workload, (options, folder))


def _two_stages(entry: Entry) -> Entry:
    """With the number of stages fixed: what `hierarchical="auto"` would find is no business of this comparison."""
    return dataclasses.replace(entry, overrides={"hierarchical": True, **entry.overrides})


def _rows(
    bed: Testbed,
    entries: list[Entry],
    rate_mbit: float,
    workload: Workload,
    place: tuple[argparse.Namespace, Path],
) -> list[Row]:
    options, folder = place
    cluster_path = folder / f"cluster-{rate_mbit:g}.json"
    if not cluster_path.exists():
        command = ["-m", "mics_strategy.cli", "calibrate", "--output", str(cluster_path), "--name", "testbed"]
        _launch(bed, options, [*command, "--stage-s", str(options.stage_s), "--max-mib", "32"])
    units_path = folder / f"units-{rate_mbit:g}-{workload.width}-{workload.accumulation}.json"
    four = dataclasses.replace(workload, accumulation=max(2, workload.accumulation))
    _launch(bed, options, ["-m", "benchmarks.unit_times", json.dumps(four.as_dict()), str(units_path)])
    cluster = Cluster.load(cluster_path)
    if workload.compute == AWAY:  # what computes somewhere else takes no core from what is sent
        cluster = dataclasses.replace(cluster, measured_overlaps=(), overlap_slowdown=1.0)
    planned = PlannedWorkload(
        model=describe(workload),
        global_batch=workload.micro_batch * workload.accumulation * cluster.world_size,
        micro_batch=workload.micro_batch,
        recompute=False,
        param_dtype="float32",
        measured=unit_times.read(units_path),
    )
    setup = Setup(
        workload=workload,
        ranks_per_node=options.ranks_per_node,
        rounds=options.rounds,
        warm_up=options.warm_up,
        steps=options.steps,
        timeout_s=_TIMEOUT_S,
        peer_python={},
    )
    measured = measure(bed, entries, setup, say=lambda line: print(line, flush=True))
    return [_row(item, planned, cluster, rate_mbit, workload) for item in measured]


def _launch(bed: Testbed, options: argparse.Namespace, arguments: list[str]) -> None:
    job = Launch(
        command=[sys.executable, *arguments],
        ranks_per_node=options.ranks_per_node,
        timeout_s=_TIMEOUT_S,
    )
    launch(bed, job)


def describe(workload: Workload) -> ModelDescription:
    """The model, traced on the meta device."""
    with torch.device("meta"):
        model = workload.model()
        tokens = torch.zeros(1, workload.sequence, dtype=torch.int64)
    traced = TraceInput(
        name="gpt",
        example={"inputs": tokens, "targets": tokens},
        tokens_per_sample=workload.sequence,
        loss=lambda loss: loss,
    )
    return trace_model(model, traced)


def _row(item: Measured, planned: PlannedWorkload, cluster: Cluster, rate_mbit: float, workload: Workload) -> Row:
    if not item.rounds:
        raise RankFailedError(f"{item.entry.label} has not run: {item.refused or item.failed}")
    step = simulate(planned, cluster, ShardConfig.preset(item.entry.name, **item.entry.overrides))
    facts = item.rounds[-1].facts
    leaving = sum(num_bytes for axis, num_bytes in step.sent_bytes.items() if "intra_node" not in axis)
    sent = statistics.median(value for one_round in item.rounds for value in one_round.sent_bytes)
    return Row(
        label=item.entry.label,
        rate_mbit=rate_mbit,
        width=workload.width,
        accumulation=workload.accumulation,
        predicted_s=step.step_s,
        measured_s=statistics.median(value for one_round in item.rounds for value in one_round.step_s),
        planned_bytes={axis: float(num_bytes) for axis, num_bytes in sorted(step.sent_bytes.items())},
        issued_bytes={
            name.removeprefix("issued "): facts[name] for name in sorted(facts) if name.startswith("issued ")
        },
        wire_ratio=sent / (leaving * cluster.ranks_per_node) if leaving else 0.0,
    )


def report(rows: list[Row]) -> str:
    """The rows as a table, and how good the predictions are."""
    header = ("configuration", "Mbit/s", "width", "micro-steps", "predicted s", "measured s", "error", "bytes", "wire")
    lines = [header]
    for row in rows:
        lines.append(
            (
                row.label,
                f"{row.rate_mbit:g}",
                str(row.width),
                str(row.accumulation),
                f"{row.predicted_s:.3f}",
                f"{row.measured_s:.3f}",
                f"{row.error:+.1%}",
                "exact" if row.is_exact else "DIFFER",
                f"{row.wire_ratio:.3f}",
            )
        )
    errors = [abs(row.error) for row in rows]
    right, clear = pairs_in_order(rows)
    return "\n".join(
        [
            *text_table(lines, num_left=1),
            f"{len(rows)} configurations; error of the step time: median {statistics.median(errors):.1%}, "
            f"{sum(error <= 0.05 for error in errors)} of {len(rows)} within 5 %, worst {max(errors):.1%}",
            f"order: {right} of {clear} pairs that differ by {_CLEAR:.0%} or more are predicted right (Kendall's tau "
            f"{(2 * right - clear) / max(1, clear):.2f})",
            f"bytes: {sum(row.is_exact for row in rows)} of {len(rows)} equal to what the engine submitted",
        ]
    )


def pairs_in_order(rows: list[Row]) -> tuple[int, int]:
    """Pairs of configurations in the predicted order, and all pairs; of equal links, widths and accumulation.

    Pairs with nearly the same measured time do not count.
    """
    right = clear = 0
    for first, second in itertools.combinations(rows, 2):
        if any(getattr(first, name) != getattr(second, name) for name in ("rate_mbit", "width", "accumulation")):
            continue
        if abs(first.measured_s / second.measured_s - 1) < _CLEAR:
            continue
        clear += 1
        right += (first.measured_s < second.measured_s) == (first.predicted_s < second.predicted_s)
    return right, clear


if __name__ == "__main__":
    sys.exit(main())
