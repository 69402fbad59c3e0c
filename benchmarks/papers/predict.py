"""Prediction of one published result.

Each metric is a function from a row to a number; rows that state too little, or a metric that is not modelled, have a
reason instead.

Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.papers import collectives
from benchmarks.papers.job import PublishedJob, make_job
from benchmarks.papers.row import PublishedRow
from benchmarks.papers.states import fits, peak_bytes, states_bytes
from benchmarks.papers.systems import System, systems_of, with_partition
from benchmarks.papers.testbed import NotPredictable, Testbed, find_testbed

_STATE_BYTES = 16  # of a parameter with Adam in mixed precision
_DOUBTFUL_GAIN = 100.0  # per cent; see `_gain`


class Kind(Enum):
    """Kinds of results, for medians."""

    RATIO = "ratio of throughputs or times"
    EFFICIENCY = "scaling efficiency"
    THROUGHPUT = "throughput, MFU or TFLOPS"
    MEMORY = "memory"
    RUNS = "runnable or not"
    COLLECTIVE = "time of a collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A predicted value in the row's unit.

    Attributes:
        value: Value.
        kind: Kind of the result.
        assumptions: Assumptions for what the row does not state, and about the system.
        compared: Predicted over published, where that is not the ratio of the values; 0 where it is.
        is_calibration: Whether a constant of the test-bed is this very value, so that it proves nothing.
        waiting: Share of the step that waits for collectives, of a throughput; None of other kinds.
    """

    value: float
    kind: Kind
    assumptions: tuple[str, ...] = ()
    compared: float = 0.0
    is_calibration: bool = False
    waiting: float | None = None


def predict(row: PublishedRow) -> Predicted:
    """Predict the value of a row.

    Raises:
        NotPredictable: With the reason.
    """
    metric = row.words("metric")
    if not metric:
        raise NotPredictable("no metric stated")
    for pattern, function in _METRICS:
        if re.search(pattern, metric):
            return function(row)
    raise NotPredictable(f"metric `{row.text('metric')}` is not modelled")


def _published(row: PublishedRow) -> float:
    if row.value is None:
        raise NotPredictable(f"published value `{row.text('value')}` is no number")
    return row.value


def _world_sizes(row: PublishedRow, testbed: Testbed) -> Sequence[int]:
    """Numbers of ranks that a row may mean."""
    if row.world_size:
        return (row.world_size,)
    if "max" in row.words("metric") or "min" in row.words("metric") or "runnable" in row.words("metric"):
        return testbed.world_sizes
    return testbed.world_sizes[-1:]


def _jobs(row: PublishedRow, testbed: Testbed, world_size: int, *, is_baseline: bool = False) -> list[PublishedJob]:
    """The trainings of a row's system, or of its baseline, on so many ranks."""
    column = "baseline" if is_baseline else "system"
    if not row.text(column):
        raise NotPredictable(f"no {column} stated")
    per_node = testbed.cluster.ranks_per_node
    systems = [
        with_partition(system, row.text("partition_config"), per_node, is_baseline=is_baseline)
        for system in systems_of(row.text(column), row, testbed)
    ]
    systems = [with_partition(system, row.text(column), per_node, is_baseline=False) for system in systems]
    return [_fitted(row, system, testbed, world_size) for system in systems]


def _fitted(row: PublishedRow, system: System, testbed: Testbed, world_size: int) -> PublishedJob:
    """The training; where no partition is stated, with the smallest that fits.

    Source:
        MiCS (arXiv:2205.00119), section 5.1.1.
    """
    job = make_job(row, system, testbed, world_size)
    if "i" not in system.scopes or system.partition or system.factors or system.name != "mics":
        return job
    per_node = testbed.cluster.ranks_per_node
    partition = per_node
    while not fits(job) and world_size % (2 * partition) == 0:
        partition *= 2
        job = make_job(row, dataclasses.replace(system, partition=partition), testbed, world_size)
    note = f"partition not stated: the smallest that fits, {partition} ranks"
    return dataclasses.replace(job, assumptions=(*job.assumptions, note))


def _one(row: PublishedRow) -> PublishedJob:
    testbed = find_testbed(row)
    world_sizes = _world_sizes(row, testbed)
    job = _jobs(row, testbed, world_sizes[-1])[0]
    if row.world_size:
        return job
    note = f"ranks not stated: {world_sizes[-1]}, as in the paper's figures"
    return dataclasses.replace(job, assumptions=(*job.assumptions, note))


def _in_unit(row: PublishedRow, share: float) -> float:
    return share * 100 if row.text("unit") == "%" else share


def _throughput(job: PublishedJob, value: float, *notes: str) -> Predicted:
    assumptions = (*job.assumptions, *notes)
    return Predicted(value=value, kind=Kind.THROUGHPUT, assumptions=assumptions, waiting=job.waiting)


def _mfu(row: PublishedRow) -> Predicted:
    job = _one(row)
    mfu = job.flop_per_s(counts_recomputation=False) / job.peak_flop_per_s
    return _throughput(job, _in_unit(row, mfu))


def _tgs(row: PublishedRow) -> Predicted:
    job = _one(row)
    return _throughput(job, job.tokens_per_s_per_rank)


def _tflops(row: PublishedRow) -> Predicted:
    job = _one(row)
    return _throughput(job, job.flop_per_s(counts_recomputation=True) / 1e12)


def _peak_share(row: PublishedRow) -> Predicted:
    job = _one(row)
    stated = re.search(r"([\d.]+)\s*tflops", row.words("metric"))
    peak = float(stated[1]) * 1e12 if stated else job.peak_flop_per_s
    share = job.flop_per_s(counts_recomputation=True) / peak
    return _throughput(job, _in_unit(row, share), f"peak {peak / 1e12:.0f} TFLOPS; recomputation counts")


def _throughput_ratio(row: PublishedRow) -> Predicted:
    """Ratio to the baseline.

    If the row states no number of ranks, at the one where the ratio is greatest, or least.
    """
    testbed = find_testbed(row)
    found: list[tuple[float, PublishedJob, PublishedJob]] = []
    reasons = []
    for world_size in _world_sizes(row, testbed):
        try:
            baseline = _jobs(row, testbed, world_size, is_baseline=True)[0]
            for job in _jobs(row, testbed, world_size):
                found.append((job.samples_per_s / baseline.samples_per_s, job, baseline))
        except NotPredictable as reason:
            reasons.append(reason)
    if not found:
        raise reasons[0]
    choose = min if re.search(r"\bmin", row.words("metric")) else max
    ratio, job, baseline = choose(found, key=lambda item: item[0])
    assumptions = [*job.assumptions, *(f"baseline: {text}" for text in baseline.system.assumptions)]
    if not row.world_size:
        assumptions.append(f"ranks not stated: {job.world_size} of {', '.join(map(str, testbed.world_sizes))}")
    return _gain(row, ratio, assumptions)


def _gain(row: PublishedRow, ratio: float, assumptions: list[str]) -> Predicted:
    """A ratio in the row's unit; gains and gaps in per cent are compared as ratios."""
    published = _published(row)
    if row.text("unit") != "%":
        return Predicted(value=ratio, kind=Kind.RATIO, assumptions=tuple(assumptions))
    if "gap" in row.words("metric") or "drop" in row.words("metric"):
        return Predicted(
            value=(1 - ratio) * 100,
            kind=Kind.RATIO,
            assumptions=tuple(assumptions),
            compared=ratio / (1 - published / 100),
        )
    if published > _DOUBTFUL_GAIN:
        assumptions.append("a gain above 100 % is read as a ratio: MiCS's literal 3.23 exceeds its maximum of 2.89")
        return Predicted(value=ratio * 100, kind=Kind.RATIO, assumptions=tuple(assumptions))
    return Predicted(
        value=(ratio - 1) * 100,
        kind=Kind.RATIO,
        assumptions=tuple(assumptions),
        compared=ratio / (1 + published / 100),
    )


def _overlap_drop(row: PublishedRow) -> Predicted:
    """Loss of MFU without an overlap of AMSP.

    "additional" is on top of the overlap of broadcasts (AMSP VI-D2).
    """
    testbed = find_testbed(row)
    job = _jobs(row, testbed, _world_sizes(row, testbed)[-1])[0]
    everything = {"gather", "reduce", "second_hop", "update"}
    before, after = everything, everything - {"update"}
    if "allreduce" in row.words("metric"):
        before, after = after, after - {"second_hop"}
    with_all, without = (
        make_job(row, dataclasses.replace(job.system, overlap=frozenset(overlap)), testbed, job.world_size)
        for overlap in (before, after)
    )
    return _gain(row, with_all.step_s / without.step_s, list(job.assumptions))


def _scaling(row: PublishedRow) -> Predicted:
    """Throughput of a rank at the larger number of ranks over that at the smaller one."""
    stated = re.search(r"(\d+)\s*(?:->|to)\s*(\d+)", row.words("metric"))
    testbed = find_testbed(row)
    last = row.world_size
    if stated:
        sizes = int(stated[1]), int(stated[2])
    elif last:
        sizes = min(testbed.world_sizes[0], last), last
    else:
        raise NotPredictable("the numbers of ranks are not stated")
    if last and stated and last != sizes[1]:
        raise NotPredictable(f"{last} ranks stated, and a metric of {sizes[0]} to {sizes[1]}")
    per_node = testbed.cluster.ranks_per_node
    one, many = (_jobs(_at(row, size, per_node), testbed, size)[0] for size in sizes)
    ratio = (many.samples_per_s / many.world_size) / (one.samples_per_s / one.world_size)
    return Predicted(value=_in_unit(row, ratio), kind=Kind.EFFICIENCY, assumptions=many.assumptions)


def _at(row: PublishedRow, world_size: int, per_node: int) -> PublishedRow:
    cells = {**row.cells, "total_gpus": str(world_size), "nodes": str(world_size // per_node)}
    return PublishedRow(cells)


def _runs(row: PublishedRow) -> Predicted:
    testbed = find_testbed(row)
    jobs = [job for size in _world_sizes(row, testbed) for job in _jobs_as_stated(row, testbed, size)]
    peak = max(map(peak_bytes, jobs))
    limit = jobs[0].job.cluster.device.memory_bytes
    assumptions = (*jobs[0].assumptions, f"needs {peak / 1e9:.1f} GB of {limit / 1e9:.1f} GB, without CUDA's context")
    return Predicted(value=float(all(map(fits, jobs))), kind=Kind.RUNS, assumptions=assumptions)


def _jobs_as_stated(row: PublishedRow, testbed: Testbed, world_size: int) -> list[PublishedJob]:
    """The trainings, with a node as partition where the row states none."""
    system = with_partition(
        systems_of(row.text("system"), row, testbed)[0],
        row.text("partition_config"),
        testbed.cluster.ranks_per_node,
        is_baseline=False,
    )
    return [make_job(row, system, testbed, world_size)]


def _smallest_partition(row: PublishedRow) -> Predicted:
    testbed = find_testbed(row)
    per_node = testbed.cluster.ranks_per_node
    system = systems_of(row.text("system"), row, testbed)[0]
    partition = per_node
    while partition <= 64 * per_node:
        job = make_job(row, dataclasses.replace(system, partition=partition), testbed, max(partition, per_node))
        if fits(job):
            value = partition / per_node if "node" in row.words("unit") else partition
            note = f"needs {peak_bytes(job) / 1e9:.1f} GB, without CUDA's context"
            return Predicted(value=float(value), kind=Kind.MEMORY, assumptions=(*job.assumptions, note))
        partition *= 2
    raise NotPredictable("no partition up to 64 nodes fits")


def _peak_memory(row: PublishedRow) -> Predicted:
    job = _one(row)
    return Predicted(value=peak_bytes(job) / 1e9, kind=Kind.MEMORY, assumptions=job.assumptions)


def _memory_ratio(row: PublishedRow) -> Predicted:
    """Ratio of the memory of a rank.

    It is that of states alone for rows without a length of samples (ZeRO++, figure 4).
    """
    testbed = find_testbed(row)
    world_size = _world_sizes(row, testbed)[-1]
    job, baseline = (_jobs(row, testbed, world_size, is_baseline=is_baseline)[0] for is_baseline in (False, True))
    if row.text("seq_len"):
        return Predicted(value=peak_bytes(job) / peak_bytes(baseline), kind=Kind.MEMORY, assumptions=job.assumptions)
    ratio = states_bytes(job, job.model.named_numel) / states_bytes(baseline, job.model.named_numel)
    metric = row.words("metric")
    value = 1 / ratio if re.search(r"dp\s*/|ddp\s*/", metric) else ratio
    return Predicted(value=value, kind=Kind.MEMORY, assumptions=("model states alone",))


def _model_states(row: PublishedRow) -> Predicted:
    numel = row.num_parameters
    if numel is None:
        raise NotPredictable("the model's size is not stated")
    return Predicted(
        value=_STATE_BYTES * numel / 1e9, kind=Kind.MEMORY, assumptions=("parameters by the name, 16 bytes each",)
    )


def _state_share(row: PublishedRow) -> Predicted:
    testbed = find_testbed(row)
    numel, world_size = row.num_parameters, row.world_size
    if numel is None or world_size is None:
        raise NotPredictable("the model's size or the number of ranks is not stated")
    stated = re.search(r"(\d+)\s*gb", f"{row.words('metric')} {row.words('gpu_type')}")
    memory_bytes = float(stated[1]) * 1e9 if stated else testbed.cluster.device.memory_bytes
    share = _STATE_BYTES * numel / world_size / memory_bytes
    return Predicted(value=_in_unit(row, share), kind=Kind.MEMORY, assumptions=("parameters by the name",))


def _collective(function: Callable[[PublishedRow, Testbed], collectives.Value], kind: Kind) -> Callable[..., Predicted]:
    def predicted(row: PublishedRow) -> Predicted:
        value = function(row, find_testbed(row))
        return Predicted(
            value=value.value, kind=kind, assumptions=value.assumptions, is_calibration=value.is_calibration
        )

    return predicted


def _ring(row: PublishedRow) -> Predicted:
    raise NotPredictable(
        f"`{row.text('system')}` is a ring of the paper's own, over messages from point to point, at a thirtieth of "
        "the bandwidth that the paper states; NCCL's collectives say nothing about it"
    )


_METRICS: tuple[tuple[str, Callable[[PublishedRow], Predicted]], ...] = (
    (r"^b_part|^b_all|effective bandwidth", _collective(collectives.bandwidth, Kind.COLLECTIVE)),
    (r"elapsed time\s*/|time ratio", _collective(collectives.hierarchical_share, Kind.RATIO)),
    (r"elapsed time.*all-gather|^time reduction", _ring),
    (r"c_all/c_mics", _collective(collectives.gather_cost_ratio, Kind.COLLECTIVE)),
    (r"smallest partition", _smallest_partition),
    (r"^runnable", _runs),
    (r"model-state memory", _model_states),
    (r"model-state share", _state_share),
    (r"memory ratio", _memory_ratio),
    (r"(max|peak).*memory", _peak_memory),
    (r"drop from disabling", _overlap_drop),
    (r"mfu reduction", _scaling),
    (r"scaling[ -]efficiency(?!-gain| gain)", _scaling),
    (r"^mfu", _mfu),
    (r"^tgs|tokens.*gpu.*s", _tgs),
    (r"(throughput|tflops|speed).*(ratio|gain|improvement|gap)|^speed-?up", _throughput_ratio),
    (r"fraction of.*peak", _peak_share),
    (r"tflops", _tflops),
)
