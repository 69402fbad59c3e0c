"""Choice between coalesced collectives and those of one flat buffer.

One coalesced launch saves the copies between the parameters and the flat buffer, and costs the backend more work per
tensor. Which is faster depends on the tensors and the links. So both are timed in turn when a job starts, with tensors
of the model's own shapes, and the results are cached for later jobs.
"""

from __future__ import annotations

import dataclasses
import socket
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.zero_copy import coalesced_comm_for
from mics_strategy.errors import ConfigError
from mics_strategy.tuning import cache, coalesce_benchmark
from mics_strategy.tuning.autotune import backend_key
from mics_strategy.tuning.cache import TuningKey
from mics_strategy.tuning.coalesce_benchmark import REDUCE_SCATTER, Candidate, Measurement

if TYPE_CHECKING:
    from mics_strategy.comm.communicator import AnyCommunicator
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.config import ShardConfig
    from mics_strategy.engine.bucket import BucketSpec


def choose_coalescing(
    specs: list[list[BucketSpec]], config: ShardConfig, groups: ProcessGroups, device: torch.device
) -> list[list[BucketSpec]]:
    """Return the buckets with their choice of coalesced collectives.

    Collective where anything is measured.

    Args:
        specs: Buckets of every unit, the same on all ranks.
        config: Configuration; `coalesce` decides or asks for a measurement.
        groups: The process groups.
        device: Device of the tensors.

    Raises:
        ConfigError: On every rank: `coalesce=True`, but no bucket can be coalesced.
    """
    by_spec = {id(spec): _candidates(spec, config, groups) for unit_specs in specs for spec in unit_specs}
    candidates = {candidate.text: candidate for of_spec in by_spec.values() for candidate in of_spec}
    if config.coalesce is True and not candidates:
        raise ConfigError(
            "`coalesce=True`: no unit of this model can use coalesced collectives. They require a backend other than "
            "gloo, parameters or gradients that are sharded and not quantized, and first dimensions that are multiples "
            "of the ranks of `optimizer`. Use 'auto'."
        )
    if config.coalesce == "auto":
        faster = _benchmarked(candidates, groups, device)
    else:
        faster = set(candidates) if config.coalesce else set()

    def with_choice(spec: BucketSpec) -> BucketSpec:
        roles = {candidate.role for candidate in by_spec[id(spec)] if candidate.text in faster}
        return dataclasses.replace(
            spec,
            coalesce_all_gather=bool(roles - {REDUCE_SCATTER}),
            coalesce_reduce_scatter=REDUCE_SCATTER in roles,
        )

    return [[with_choice(spec) for spec in unit_specs] for unit_specs in specs]


def _candidates(spec: BucketSpec, config: ShardConfig, groups: ProcessGroups) -> list[Candidate]:
    """The collectives of a bucket that can be coalesced."""
    candidates = []
    gather_comm, gather_role = _all_gather_candidate(spec, groups)
    wire_dtype = config.wire_dtype_of(spec.master_dtype)
    grad_comm = groups.grad_comm if spec.trainable and spec.param_dtype == wire_dtype else None
    for comm, role, dtype in (
        (gather_comm, gather_role, spec.param_dtype),
        (grad_comm, REDUCE_SCATTER, wire_dtype),
    ):
        coalesced = coalesced_comm_for(comm, spec.layout, dtype.itemsize) if comm is not None else None
        if coalesced is not None:
            stages = coalesced.num_stages
            candidates.append(Candidate(role=role, layout=spec.layout, dtype=dtype, num_stages=stages))
    return candidates


def _all_gather_candidate(spec: BucketSpec, groups: ProcessGroups) -> tuple[AnyCommunicator | None, str]:
    """The communicator that gathers straight into the parameters, and its role."""
    if groups.scopes.params == 1:
        return (groups.trainable_placement if spec.trainable else groups.frozen_placement).sync_comm, "param_sync"
    return (
        (groups.secondary_comm, "secondary_all_gather")
        if groups.has_secondary
        else (groups.param_comm, "param_all_gather")
    )


def _benchmarked(candidates: dict[str, Candidate], groups: ProcessGroups, device: torch.device) -> set[str]:
    """The candidates that are faster coalesced.

    Results are those of this process, of earlier jobs, or of a measurement.
    """
    key = backend_key(groups.world_group.transport.group, device) if groups.world_group is not None else None
    if groups.world_group is None or key is None or not candidates:
        return set()
    in_process = _benchmarked_in_process.setdefault(dist.group.WORLD, {})
    spans = {text: groups.scopes.span_of(candidate.role) for text, candidate in candidates.items()}
    missing = [text for text in candidates if (key, text, spans[text]) not in in_process]
    if missing:
        hosts = gather_objects(socket.gethostname())[:: groups.scopes.ranks_per_node]
        tuning_keys = {
            text: TuningKey.for_this_job(text, spans[text], hosts, groups.scopes.ranks_per_node, key)
            for text in missing
        }
        loaded = [cache.load(tuning_keys[text]) for text in missing] if groups.rank == 0 else []
        cached = dict(zip(missing, groups.world_group.broadcast_object(loaded, 0), strict=True))
        measured = {
            text: coalesce_benchmark.benchmark(candidates[text], groups, groups.world_group, device)
            for text in missing
            if cached[text] is None
        }
        groups.traffic_log.drain()
        if groups.rank == 0:
            for text, measurement in measured.items():
                cache.store(tuning_keys[text], int(measurement.coalesces), [measurement])
            print(report({text: (candidates[text], measured.get(text), cached[text]) for text in missing}), flush=True)
        for text in missing:
            in_process[key, text, spans[text]] = measured[text].coalesces if text in measured else bool(cached[text])
    return {text for text in candidates if in_process[key, text, spans[text]]}


_benchmarked_in_process: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


def report(results: dict[str, tuple[Candidate, Measurement | None, int | None]]) -> str:
    """The choices of `coalesce='auto'`, and how to pin them, as text.

    Args:
        results: Candidate, measurement of this job if any, and cached result if any, by the candidate's text.
    """
    lines = ["mics_strategy chose for `coalesce='auto'` which tensors are sent in one launch, without a flat buffer:"]
    for candidate, measurement, cached in results.values():
        collective = "reduce-scatter" if candidate.role == REDUCE_SCATTER else "all-gather"
        size = f"{len(candidate.shapes)} tensors, {candidate.layout.full_numel * candidate.dtype.itemsize:,} B"
        if measurement is None:
            lines.append(f"  {collective} of {size}: {'one launch' if cached else 'flat'}, measured by an earlier job")
        else:
            choice = "one launch" if measurement.coalesces else "flat"
            times = f"{1e3 * measurement.coalesced_s:.2f} ms in one launch, {1e3 * measurement.flat_s:.2f} ms flat"
            lines.append(f"  {collective} of {size}: {choice}, measured now ({times})")
    lines.append(
        f"The choice is cached in {cache.CACHE_DIR} for the next job on the same nodes. `coalesce=True` or False "
        "pins it."
    )
    return "\n".join(lines)
