"""Prediction of one public training run.

Pure.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.papers.job import PublishedJob, PublishedModel, make_job
from benchmarks.papers.row import PublishedRow
from benchmarks.papers.states import fits, peak_bytes, states_bytes
from benchmarks.papers.testbed import NotPredictable, megatron_flop
from benchmarks.planners.cells import checked, is_unstated, stated_recompute
from benchmarks.planners.compute import (
    Arithmetic,
    describe_run,
    owners_broadcasts_s,
    with_arithmetic,
    with_timed_recompute,
)
from benchmarks.planners.hardware import has_fp8, testbed_of, with_attention
from benchmarks.planners.models import RunModel, model_of_run
from benchmarks.planners.systems import Degrees, degrees_of, system_of_run
from mics_strategy.errors import ConfigError
from mics_strategy.planner.simulator import compute_seconds, step_seconds

if TYPE_CHECKING:
    from benchmarks.papers.systems import System
    from benchmarks.papers.testbed import Testbed
    from mics_strategy.planner.cluster import Device
    from mics_strategy.planner.recompute import Recompute

_OFFLOADS = ("gb200", "gb300", "gh200")  # to a host by NVLink, in place of recomputation
# Every how many layers one keeps its activations, where recomputation is selective: torchtitan's keeps every second
# product, IBM's skips some of the layers.
_KEPT_LAYERS = (2, 3, 4, 8)
# Systems whose configurations recompute a dense model on several GPUs. NeMo AutoModel: `activation_checkpointing` of
# all such files that its docs/performance-summary.mdx names.
_RECOMPUTING = r"automodel"
# Words of a system, its scopes or its precision, and what they stand for, which is not modelled.
_NOT_MODELLED = (
    (r"(?<!no )(?<!without )(?<!activation )offload", "offload of model states"),
    (r"qlora|\bnf4\b|bitsandbytes|\b4-?bit\b", "a base model in 4 bits"),
)
_LIKELY_FILL = 0.85  # of a device's memory, for a choice that is not stated: people leave a margin
_LIKELY_TOKENS = 16_384  # of a micro-batch that is not stated


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """The prediction of a run.

    Attributes:
        value: In the row's unit.
        step_s: Seconds of a step.
        peak_bytes: Bytes of a rank's memory by the same model.
        fits: Whether they fit into the device.
        waiting: Share of the step in which the device waits for collectives, or is slowed by them.
        assumptions: Assumptions for what the row does not state, and about the system.
    """

    value: float
    step_s: float
    peak_bytes: float
    fits: bool
    waiting: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as read from its row.

    Attributes:
        row: Row.
        model: Model.
        degrees: Ranks of what is not data parallel.
        testbed: Test-bed, its nodes those of data parallelism: a rank is a group of tensor parallelism.
        system: System.
        tokens: Tokens of a sequence.
        num_ranks: Ranks of data parallelism.
        arithmetic: Dtype, kernels and recomputation.
    """

    row: PublishedRow
    model: RunModel
    degrees: Degrees
    testbed: Testbed
    system: System
    tokens: int
    num_ranks: int
    arithmetic: Arithmetic


def predict_run(row: PublishedRow) -> PredictedRun:
    """Predict the value of a row.

    Raises:
        NotPredictable: With the reason.
    """
    try:
        run = read_run(row)
        job, micro_batch, num_micro_steps = _job(run)
        timed = with_timed_recompute(job.job)
        step_s = step_seconds(timed) + owners_broadcasts_s(timed, run.system.name)
    except ConfigError as error:
        raise NotPredictable(str(error)) from error
    samples_per_s = micro_batch * num_micro_steps * run.num_ranks / step_s
    return PredictedRun(
        value=_in_unit(run, job, samples_per_s, step_s),
        step_s=step_s,
        peak_bytes=peak_bytes(job),
        fits=fits(job) or _is_offloaded(job),
        waiting=max(0.0, 1 - compute_seconds(timed) / step_s),
        assumptions=tuple(dict.fromkeys((*run.model.assumptions, *job.assumptions))),
    )


def _is_offloaded(job: PublishedJob) -> bool:
    """Whether the host of a Grace system takes the activations that do not fit beside the states."""
    device = job.job.cluster.device
    return device.name.startswith(_OFFLOADS) and states_bytes(job, job.model.description.numel) < device.memory_bytes


def read_run(row: PublishedRow) -> Run:
    """Read a row.

    Raises:
        NotPredictable: It states too little, or something that the planner has no model of.
    """
    row = checked(row)
    degrees = degrees_of(row)
    for number, noun in (
        (degrees.pipeline, "pipeline parallelism"),
        (degrees.context, "context parallelism"),
        (degrees.expert, "expert parallelism"),
    ):
        if number > 1:
            raise NotPredictable(f"{noun} over {number} ranks is not modelled")
    words = f"{row.words('system')}, {row.words('partition_config')}, {row.words('precision')}"
    for pattern, noun in _NOT_MODELLED:
        if re.search(pattern, words):
            raise NotPredictable(f"{noun} is not modelled")
    model, testbed = model_of_run(row), testbed_of(row)
    per_node, tensor = testbed.cluster.ranks_per_node, degrees.tensor
    if per_node % tensor:
        raise NotPredictable(f"tensor parallelism over {tensor} ranks does not divide the {per_node} of a node")
    num_ranks = testbed.cluster.world_size // tensor
    device = with_attention(testbed.cluster.device, row)
    cluster = dataclasses.replace(testbed.cluster, device=device, ranks_per_node=per_node // tensor)
    return Run(
        row=row,
        model=model,
        degrees=degrees,
        testbed=dataclasses.replace(testbed, cluster=cluster),
        system=system_of_run(row, num_ranks, per_node // tensor),
        tokens=row.tokens("seq_len") or _length(row) or testbed.tokens,
        num_ranks=num_ranks,
        arithmetic=_arithmetic(row, tensor, device),
    )


def _arithmetic(row: PublishedRow, tensor: int, device: Device) -> Arithmetic:
    arithmetic = Arithmetic.of(row, tensor)
    if arithmetic.is_fp8 and not has_fp8(device):
        raise NotPredictable(
            f"`precision` is `{row.text('precision')}`, and there are no fp8 products on {device.name}. Write bf16 or "
            "fp16, or name another device."
        )
    return arithmetic


def _length(row: PublishedRow) -> int | None:
    """Tokens of a sequence, as in "8192" or "8k"."""
    in_k = re.fullmatch(r"(\d+)\s*k", row.words("seq_len"))
    return int(in_k[1]) * 1024 if in_k else row.count("seq_len")


def _job(run: Run) -> tuple[PublishedJob, int, int]:
    """The training, its micro-batch and its micro-steps."""
    batch, num_micro_steps = _batch(run)
    if not batch and is_unstated(run.row, "seq_len"):
        raise NotPredictable("neither the batch nor the length of its samples is stated")
    tries, is_stated, notes = _recomputations(run)
    batches = [batch] if batch else _likely_batches(run)
    if not batch:
        notes = (f"micro-batch not stated: the largest that fits, at most {_LIKELY_TOKENS} tokens", *notes)
    for size in batches:
        for recompute in tries:
            job = _make(run, size, num_micro_steps or 1, recompute)
            share = 1.0 if is_stated else _LIKELY_FILL
            is_last = (size, recompute) == (batches[-1], tries[-1])
            if is_last or (fits(job) and peak_bytes(job) <= share * job.job.cluster.device.memory_bytes):
                return dataclasses.replace(job, assumptions=(*notes, *job.assumptions)), size, num_micro_steps or 1
    raise NotPredictable("no micro-batch can be tried")


def _recomputations(run: Run) -> tuple[list[Recompute], bool, tuple[str, ...]]:
    """What may be recomputed, the likeliest first; whether it is stated; and notes on it."""
    row, device = run.row, run.testbed.cluster.device
    words = row.words("activation_ckpt")
    is_selective = "sel" in words or words == "op"
    stated = None if is_selective else stated_recompute(row)
    is_open = stated is None and not is_selective
    is_known = is_open and row.world_size != 1 and bool(re.search(_RECOMPUTING, row.words("system")))
    stated = True if is_known else stated
    tries: list[Recompute] = [False, True] if stated is None else [stated]
    if is_selective:
        every = re.search(r"(?:1/|every )(\d+)", words)
        tries = [1 / int(every[1])] if every and int(every[1]) else [1 - 1 / kept for kept in _KEPT_LAYERS]
    notes: tuple[str, ...] = ()
    if device.name.startswith(_OFFLOADS):
        tries = tries[:1]
        notes = ("activations that do not fit are offloaded to the host under the compute",)
    elif is_selective and len(tries) > 1:
        notes = ("selective recomputation: one of so many layers keeps its activations, as many as fit",)
    elif is_known or len(tries) > 1:
        kind = "as in the system's configurations" if is_known else "none, where it fits"
        notes = (f"recomputation not stated: {kind}",)
    return tries, stated is not None, notes


def _make(run: Run, micro_batch: int, num_micro_steps: int, recompute: Recompute) -> PublishedJob:
    description = describe_run(run.model, run.tokens, run.arithmetic)
    shape = run.model.shape
    flop = tuple(megatron_flop(shape, run.tokens, recomputes=recomputes) for recomputes in (False, True))
    model = PublishedModel(
        description=description, flop=(flop[0], flop[1]), named_numel=description.numel, assumptions=()
    )
    cells = {
        **run.row.cells,
        "micro_batch": str(micro_batch),
        "grad_accum_steps": str(num_micro_steps),
        "activation_ckpt": "y" if recompute else "n",
        "precision": "fp32" if run.arithmetic.is_fp32 else "bf16 mixed",
    }
    job = make_job(PublishedRow(cells), run.system, run.testbed, run.num_ranks, model)
    recomputing = dataclasses.replace(job.job, recompute=recompute)
    return dataclasses.replace(job, job=with_arithmetic(recomputing, run.model, run.tokens, run.arithmetic))


def _batch(run: Run) -> tuple[int, int]:
    """Samples of a forward on a rank, and forwards of a step; 0 where they are not stated."""
    row, tokens = run.row, run.tokens
    in_tokens = row.tokens("micro_batch")
    size = max(1, in_tokens // tokens) if in_tokens else row.count("micro_batch") or 0
    steps = row.count("grad_accum_steps") or 0
    total = (row.tokens("global_batch") or 0) // tokens or row.count("global_batch") or 0
    if total and size and not steps:
        steps = max(1, round(total / (size * run.num_ranks)))
    if total and not size:
        size = max(1, round(total / (max(steps, 1) * run.num_ranks))) if steps else 0
    if total and not size and not steps and total <= run.num_ranks:
        size, steps = 1, 1
    return size, steps


def _likely_batches(run: Run) -> list[int]:
    largest = max(1, _LIKELY_TOKENS // run.tokens)
    return [largest // 2**n for n in range(largest.bit_length()) if largest // 2**n]


def _in_unit(run: Run, job: PublishedJob, samples_per_s: float, step_s: float) -> float:
    """The value of a row's metric.

    Raises:
        NotPredictable: The metric is not modelled.
    """
    row = run.row
    words = f"{row.words('metric')} {row.words('unit')}"
    num_gpus = run.num_ranks * run.degrees.tensor
    is_each = re.search(r"gpu|device|rank|tgs|chip", words)
    per = num_gpus if is_each else 1
    if "mfu" in words:
        mfu = job.model.flop[0] * samples_per_s / num_gpus / job.peak_flop_per_s
        return mfu * 100 if "%" in row.words("unit") or "percent" in words or (row.value or 0) > 1.5 else mfu
    if "flop" in words:
        return job.model.flop[0] * samples_per_s / num_gpus / (1e15 if "pflop" in words else 1e12)
    if "token" in words or "tgs" in words:
        return samples_per_s * run.tokens / per / (1e3 if re.search(r"\bk ?tok", words) else 1)
    if re.search(r"sample|sequence|seq/", words):
        return samples_per_s / per
    if re.search(r"ms\b|millisecond", words):
        return step_s * 1e3
    if re.search(r"step|iter|second|^time", words):
        is_rate = re.search(r"(steps?|it|iterations?)/s", words)
        if not is_rate and not is_unstated(row, "unit") and not re.search(r"\b(s|secs?|seconds?)\b", row.words("unit")):
            raise NotPredictable(f"`unit` is `{row.text('unit')}`, no unit of time. Write s, ms or steps/s.")
        return 1 / step_s if is_rate else step_s
    raise NotPredictable(f"metric `{row.text('metric')}` in `{row.text('unit')}` is not modelled")
