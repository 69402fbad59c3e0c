"""Which buckets travel as several tensors in one launch, and which as one flat tensor?

One launch saves the copies between the parameters and the flat form, and costs the backend more work for each tensor.
Which is faster depends on the tensors and the links, so both ways are timed when a job starts, by turns, with tensors
of the model's own shapes, and what was found is kept for later jobs.
"""

from __future__ import annotations

import dataclasses
import socket
import weakref
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.config import ShardConfig
from mics_strategy.engine.bucket import BucketSpec
from mics_strategy.engine.zero_copy_gather import coalesced_comm_for
from mics_strategy.errors import ConfigError
from mics_strategy.tuning import cache, coalesce_benchmark
from mics_strategy.tuning.autotune import backend_key
from mics_strategy.tuning.cache import TuningKey
from mics_strategy.tuning.coalesce_benchmark import REDUCE_SCATTER, Candidate, Measurement


def choose_coalescing(
    specs: list[list[BucketSpec]], config: ShardConfig, groups: ProcessGroups, device: torch.device
) -> list[list[BucketSpec]]:
    """The same buckets, with what is coalesced of each. Collective where something is measured.

    Args:
        specs: Of every unit, the same on all ranks.
        config: Says whether.
        groups: The process groups.
        device: Of the tensors.

    Raises:
        ConfigError: On every rank: it is asked for, and no bucket can be.
    """
    asked = {id(spec): _candidates(spec, config, groups) for of_unit in specs for spec in of_unit}
    questions = {question.text: question for of_spec in asked.values() for question in of_spec}
    if config.coalesce is True and not questions:
        raise ConfigError(
            "`coalesce=True`: no unit can be moved so. It takes another backend than gloo, parameters or gradients "
            "that are sharded and not encoded, and first dimensions that are multiples of the ranks of `optimizer`. "
            "Use 'auto'."
        )
    if config.coalesce == "auto":
        yes = _benchmarked(questions, groups, device)
    else:
        yes = set(questions) if config.coalesce else set()

    def decided(spec: BucketSpec) -> BucketSpec:
        purposes = {question.role for question in asked[id(spec)] if question.text in yes}
        return dataclasses.replace(
            spec,
            coalesce_all_gather=bool(purposes - {REDUCE_SCATTER}),
            coalesce_reduce_scatter=REDUCE_SCATTER in purposes,
        )

    return [[decided(spec) for spec in of_unit] for of_unit in specs]


def _candidates(spec: BucketSpec, config: ShardConfig, groups: ProcessGroups) -> list[Candidate]:
    """What of a bucket can be coalesced."""
    found = []
    gathers, purpose = _all_gather_candidate(spec, groups)
    wire_dtype = config.wire_dtype_of(spec.master_dtype)
    sums = groups.grad_comm if spec.trainable and spec.param_dtype == wire_dtype else None
    for across, for_what, dtype in ((gathers, purpose, spec.param_dtype), (sums, REDUCE_SCATTER, wire_dtype)):
        coalesced = coalesced_comm_for(across, spec.layout, dtype.itemsize) if across is not None else None
        if coalesced is not None:
            stages = coalesced.num_stages
            found.append(Candidate(role=for_what, layout=spec.layout, dtype=dtype, num_stages=stages))
    return found


def _all_gather_candidate(spec: BucketSpec, groups: ProcessGroups) -> tuple[AnyCommunicator | None, str]:
    """What gathers a bucket into the parameters themselves, and leaves nothing of the flat form to be kept."""
    if groups.scopes.params == 1:
        return (groups.trainable_placement if spec.trainable else groups.frozen_placement).sync_comm, "param_sync"
    return (
        (groups.secondary_comm, "secondary_all_gather")
        if groups.has_secondary
        else (groups.param_comm, "param_all_gather")
    )


def _benchmarked(questions: dict[str, Candidate], groups: ProcessGroups, device: torch.device) -> set[str]:
    """Those that are faster in one launch: as found before by this process, by jobs before, or now."""
    mover = backend_key(groups.world_group.transport.group, device) if groups.world_group is not None else None
    if groups.world_group is None or mover is None or not questions:
        return set()
    known = _known.setdefault(dist.group.WORLD, {})
    spans = {text: groups.scopes.span_of(question.role) for text, question in questions.items()}
    new = [text for text in questions if (mover, text, spans[text]) not in known]
    if new:
        hosts = gather_objects(socket.gethostname())[:: groups.scopes.ranks_per_node]
        links = {
            text: TuningKey.for_this_job(text, spans[text], hosts, groups.scopes.ranks_per_node, mover) for text in new
        }
        recalled = [cache.load(links[text]) for text in new] if groups.rank == 0 else []
        kept = dict(zip(new, groups.world_group.broadcast_object(recalled, 0), strict=True))
        answers = {
            text: coalesce_benchmark.benchmark(questions[text], groups, groups.world_group, device)
            for text in new
            if kept[text] is None
        }
        groups.traffic_log.drain()
        if groups.rank == 0:
            for text, answer in answers.items():
                cache.store(links[text], int(answer.coalesces), [answer])
            print(report({text: (questions[text], answers.get(text), kept[text]) for text in new}), flush=True)
        for text in new:
            known[mover, text, spans[text]] = answers[text].coalesces if text in answers else bool(kept[text])
    return {text for text in questions if known[mover, text, spans[text]]}


_known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


def report(found: dict[str, tuple[Candidate, Measurement | None, int | None]]) -> str:
    """What was decided, and how to pin it, as text."""
    lines = ["mics_strategy decided by `coalesce='auto'` which tensors travel in one launch, without a flat form:"]
    for question, answer, kept in found.values():
        what = "sum" if question.role == REDUCE_SCATTER else "gather"
        size = f"{len(question.shapes)} tensors, {question.layout.full_numel * question.dtype.itemsize:,} B"
        if answer is None:
            lines.append(f"  {what} of {size}: {'one launch' if kept else 'flat'}, measured by a job before")
        else:
            chosen = "one launch" if answer.coalesces else "flat"
            times = f"{1e3 * answer.coalesced_s:.2f} ms in one launch, {1e3 * answer.flat_s:.2f} ms flat"
            lines.append(f"  {what} of {size}: {chosen}, measured now ({times})")
    lines.append(f"It is kept in {cache.CACHE_DIR} for the next job on the same nodes. `coalesce=True` or False pins it.")
    return "\n".join(lines)
