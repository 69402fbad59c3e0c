"""What was measured, as numbers, text, a file and a picture?"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.entries import COMPUTE, Entry
from benchmarks.floor import floor_s, hop_to_compute, own_floor_s, second_hop_bytes
from benchmarks.measure import Measured, Round
from benchmarks.workload import AWAY, Workload
from mics_strategy import ShardConfig

_CODECS = ("weight_codec", "grad_codec")
_DTYPES = ("param_dtype", "reduce_dtype")
_HEADER = (
    "engine",
    "step s",
    "min-max",
    "cpu s",
    "tokens/s",
    "sent MB",
    "plan MB",
    "peak MB",
    "train MB",
    "peer",
    "floor",
    "own floor",
    "compute",
    "loss",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes and links of a run."""

    nodes: int
    ranks_per_node: int
    rate_mbit: float

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of one node's link, in one direction."""
        return self.rate_mbit * 1e6 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine, over all rounds.

    Attributes:
        label: The entry.
        kind: ``"ours"``, ``"peer"`` or ``"compute"``.
        outcome: ``""``, or why there are no numbers: ``"refused: ..."``, ``"failed: ..."``.
        step_s: Median over all measured steps; the mean where outer steps are among them.
        step_s_range: The fastest and the slowest.
        cpu_s: CPU time of all ranks in a step, likewise.
        tokens_per_s: Of all ranks together.
        sent_bytes: Median of the most that left one node in a step.
        planned_bytes: What the engine planned on axes between nodes; None where it does not plan.
        peak_bytes: Most resident memory of a rank (VmHWM).
        training_bytes: The same without interpreter and libraries.
        losses: Of every step, of the last round.
        to_peer: Step time by that of the fastest peer; None where no peer ran.
        to_floor: Step time by the floor; None where compute was not measured.
        to_own_floor: Step time by the floor of what the engine itself sends; None also where it does not plan.
    """

    label: str
    kind: str
    outcome: str = ""
    step_s: float = 0.0
    step_s_range: tuple[float, float] = (0.0, 0.0)
    cpu_s: float = 0.0
    tokens_per_s: float = 0.0
    sent_bytes: float = 0.0
    planned_bytes: float | None = None
    peak_bytes: int = 0
    training_bytes: int = 0
    losses: tuple[float, ...] = ()
    to_peer: float | None = None
    to_floor: float | None = None
    to_own_floor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One workload on one cluster.

    Attributes:
        floor_s: See `benchmarks.floor`; None where compute was not measured.
        micro_step_s: A forward and a backward with nothing sent and all ranks at work, median; None as above.
        compute_s: Step of compute alone; None as above.
        disagreements: Engines whose losses are not those of the others, in words.
    """

    cluster: Cluster
    workload: Workload
    rows: tuple[Row, ...]
    floor_s: float | None
    micro_step_s: float | None
    compute_s: float | None
    disagreements: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether all exact engines agree and none failed."""
        return not self.disagreements and not any(row.outcome.startswith("failed") for row in self.rows)


def make_report(measured: list[Measured], workload: Workload, cluster: Cluster, *, loss_tolerance: float) -> Report:
    """Medians, ratios and the check of losses.

    Args:
        measured: By entry.
        workload: That was trained.
        cluster: On which.
        loss_tolerance: Largest difference of the losses of exact engines at any step in any round, by the loss itself.
    """
    compute = next((item for item in measured if item.entry.name == COMPUTE and item.rounds), None)
    micro_step_s = None if compute is None else _micro_step_s(compute.rounds, workload.accumulation)
    floor = None if micro_step_s is None else _floor_s(micro_step_s, workload, cluster)
    num_tokens = workload.tokens * cluster.nodes * cluster.ranks_per_node
    rows = [_row(item, workload, num_tokens) for item in measured]
    fastest = min((row.step_s for row in rows if row.kind == "peer" and not row.outcome), default=None)
    return Report(
        cluster=cluster,
        workload=workload,
        rows=tuple(
            row
            if row.outcome
            else dataclasses.replace(
                row,
                to_peer=None if fastest is None else row.step_s / fastest,
                to_floor=None if floor is None else row.step_s / floor,
                to_own_floor=_to_own_floor(row, item, micro_step_s, workload, cluster),
            )
            for row, item in zip(rows, measured, strict=True)
        ),
        floor_s=floor,
        micro_step_s=micro_step_s,
        compute_s=next((row.step_s for row in rows if row.kind == "compute" and not row.outcome), None),
        disagreements=tuple(_disagreements(measured, workload, loss_tolerance)),
    )


def table(report: Report) -> str:
    """The report as text."""
    lines: list[tuple[str, ...]] = [_HEADER]
    lines += [_cells(row, report.compute_s) for row in report.rows if not row.outcome]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    text += [f"{row.label}  {row.outcome.splitlines()[0]}" for row in report.rows if row.outcome]
    if report.floor_s is not None and report.micro_step_s is not None:
        text.append(f"floor {report.floor_s:.3f} s; a micro-step with nothing sent {report.micro_step_s:.3f} s")
    text += [f"LOSSES DISAGREE: {what}" for what in report.disagreements]
    return "\n".join(text)


def write_json(reports: list[Report], facts: dict[str, Any], path: Path) -> None:
    """All numbers of a run, with what is needed to repeat it.

    Args:
        reports: One for each workload.
        facts: Command line, versions, machine.
        path: Overwritten.
    """
    path.write_text(json.dumps({**facts, "reports": [dataclasses.asdict(report) for report in reports]}, indent=1))


def plot(report: Report, path: Path) -> None:
    """Step times as bars with the floor as a line; needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if not row.outcome and row.kind != "compute"]
    figure = Figure(figsize=(8, 1 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:blue" if row.kind == "ours" else "tab:gray" for row in rows]
    axes.barh([row.label for row in rows], [row.step_s for row in rows], color=colors)
    axes.invert_yaxis()
    if report.floor_s is not None:
        axes.axvline(report.floor_s, color="tab:red", linestyle="--", label="floor")
        axes.legend()
    axes.set_xlabel("s per optimizer step, median")
    figure.suptitle(describe(report), fontsize="small")
    figure.savefig(path)


def describe(report: Report) -> str:
    """Cluster and workload in a line, and in another one what layers that sleep make of them."""
    cluster, workload = report.cluster, report.workload
    text = (
        f"{cluster.nodes} nodes of {cluster.ranks_per_node} ranks, {cluster.rate_mbit:g} Mbit/s a node; "
        f"{workload.numel / 1e6:.2f} M parameters, accumulation {workload.accumulation}, {workload.dtype}"
    )
    if workload.compute != AWAY:
        return text
    hop_bytes, rate = _hop_bytes(workload, cluster), cluster.link_bytes_per_s
    ratio = hop_to_compute(compute_s=workload.sleep_s, hop_bytes=hop_bytes, link_bytes_per_s=rate)
    return (
        f"{text}\n{workload.layers} layers sleep {workload.forward_s * 1e3:g} and {workload.backward_s * 1e3:g} ms: "
        f"compute {workload.sleep_s:.3f} s; second hop {hop_bytes / 1e6:.2f} MB, {hop_bytes / rate:.3f} s; "
        f"hop/compute {ratio:.2f}"
    )


def _hop_bytes(workload: Workload, cluster: Cluster) -> float:
    return second_hop_bytes(workload.numel * workload.torch_dtype.itemsize, cluster.nodes)


def _floor_s(micro_step_s: float, workload: Workload, cluster: Cluster) -> float:
    return floor_s(
        micro_step_s=micro_step_s,
        num_micro_steps=workload.accumulation,
        hop_bytes=_hop_bytes(workload, cluster),
        link_bytes_per_s=cluster.link_bytes_per_s,
    )


def _micro_step_s(rounds: list[Round], num_micro_steps: int) -> float:
    return statistics.median(value for one_round in rounds for value in one_round.micro_steps_s) / num_micro_steps


def _row(item: Measured, workload: Workload, num_tokens: int) -> Row:
    kind = "ours" if item.entry.is_ours else "compute" if item.entry.name == COMPUTE else "peer"
    if item.refused or item.failed:
        outcome = f"refused: {item.refused}" if item.refused else f"failed: {item.failed}"
        return Row(label=item.entry.label, kind=kind, outcome=outcome)
    typical = _typical(item.entry)
    step_s = [value for one_round in item.rounds for value in one_round.step_s]
    planned = [value for one_round in item.rounds for value in one_round.planned_bytes]
    return Row(
        label=item.entry.label,
        kind=kind,
        step_s=typical(step_s),
        step_s_range=(min(step_s), max(step_s)),
        cpu_s=typical([value for one_round in item.rounds for value in one_round.cpu_s]),
        tokens_per_s=num_tokens / typical(step_s),
        sent_bytes=typical([value for one_round in item.rounds for value in one_round.sent_bytes]),
        planned_bytes=typical(planned) if planned else None,
        peak_bytes=max(one_round.peak_bytes for one_round in item.rounds),
        training_bytes=max(one_round.training_bytes for one_round in item.rounds),
        losses=tuple(item.rounds[-1].losses),
    )


def _typical(entry: Entry) -> Callable[[Sequence[float]], float]:
    """The median of steps; their mean where one in `outer_every` sends for all."""
    return statistics.fmean if entry.overrides.get("outer_every") else statistics.median


def _to_own_floor(
    row: Row, item: Measured, micro_step_s: float | None, workload: Workload, cluster: Cluster
) -> float | None:
    if micro_step_s is None or row.planned_bytes is None:
        return None
    return row.step_s / own_floor_s(
        micro_step_s=micro_step_s,
        num_micro_steps=workload.accumulation,
        sent_bytes=row.planned_bytes,
        last_bytes=_typical(item.entry)([v for one_round in item.rounds for v in one_round.planned_last_bytes]),
        link_bytes_per_s=cluster.link_bytes_per_s,
    )


def _is_exact(item: Measured, workload: Workload) -> bool:
    fields = item.entry.overrides
    if item.entry.is_ours:
        config = ShardConfig.preset(item.entry.name)
        fields = {**{name: getattr(config, name) for name in _CODECS}, **fields}
    is_plain = all(fields.get(name) in (None, "none", "auto", "float32") for name in (*_CODECS, *_DTYPES))
    is_plain &= not fields.get("outer_every") and fields.get("second_hop") != "delayed"
    return is_plain and workload.dtype == "float32" and item.entry.name != COMPUTE


def _disagreements(measured: list[Measured], workload: Workload, tolerance: float) -> list[str]:
    """Every round of every exact engine beside the first round of the first one."""
    exact = [item for item in measured if item.rounds and _is_exact(item, workload)]
    disagreements = []
    for item in exact:
        reference = exact[0].rounds[0].losses
        pairs = [pair for one_round in item.rounds for pair in zip(one_round.losses, reference, strict=True)]
        # NaN is wrong.
        wrong = [(loss, other) for loss, other in pairs if not abs(loss - other) <= tolerance * abs(other)]
        if wrong:
            disagreements.append(
                f"{item.entry.label} has {wrong[0][0]:.6f} where {exact[0].entry.label} has {wrong[0][1]:.6f}; "
                f"at most {tolerance:g} of it is allowed"
            )
    return disagreements


def _cells(row: Row, compute_s: float | None) -> tuple[str, ...]:
    return (
        row.label,
        f"{row.step_s:.3f}",
        f"{row.step_s_range[0]:.2f}-{row.step_s_range[1]:.2f}",
        f"{row.cpu_s:.2f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.sent_bytes / 1e6:.2f}",
        "-" if row.planned_bytes is None else f"{row.planned_bytes / 1e6:.2f}",
        f"{row.peak_bytes / 1e6:.0f}",
        f"{row.training_bytes / 1e6:.0f}",
        "-" if row.to_peer is None else f"{row.to_peer:.2f}",
        "-" if row.to_floor is None else f"{row.to_floor:.2f}",
        "-" if row.to_own_floor is None else f"{row.to_own_floor:.2f}",
        "-" if compute_s is None else f"{row.step_s / compute_s:.2f}",
        f"{row.losses[-1]:.4f}",
    )
