"""Do ranks measure, agree, measure once, and find what a job before has found?"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mics_strategy import ShardConfig, Topology
from mics_strategy.comm.communicator import SizeDispatch
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.route import NEVER, TunableCollective
from mics_strategy.comm.scratch import comm_layout
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.tuning import autotune
from mics_strategy.tuning.autotune import TuningResult, report
from mics_strategy.tuning.threshold import FLAT, SIZES_BYTES, SizeTiming, threshold_bytes
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.cuda_harness.streams import machine as current_machine
from tests.ranks import RankContext, RankPool, simulate

LOG = "mics_strategy.tuning.autotune"


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of one rank for one model."""

    results: list[TuningResult]
    thresholds: tuple[tuple[TunableCollective, int], ...]
    measured: list[str]
    warnings: list[str]


@contextmanager
def watched() -> Iterator[tuple[list[str], list[str]]]:
    """Collectives that are measured inside, and warnings about the cache."""
    measure, measured, warnings = autotune.benchmark, [], []

    def counted(collective: str, *args: Any) -> tuple[SizeTiming, ...]:
        measured.append(collective)
        return measure(collective, *args)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    listener = Listener()
    logging.getLogger(LOG).addHandler(listener)
    try:
        with mock.patch.object(autotune, "benchmark", counted):
            yield measured, warnings
    finally:
        logging.getLogger(LOG).removeHandler(listener)


def scopes_of(ctx: RankContext, preset: str = "zero3", **options: Any) -> Scopes:
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=ctx.ranks_per_node), **options)
    return resolve_scopes(config, config.topology, ctx.world_size)


def tuned_groups(scopes: Scopes) -> tuple[list[TuningResult], ProcessGroups]:
    """What is found for the groups of a model on the CPU, and the groups with it."""
    resources = CommResources(scopes.world_size, "cpu")
    results = autotune.autotune(scopes, resources)
    thresholds = {(result.collective, result.span): result.from_bytes for result in results}
    return results, ProcessGroups(scopes.with_tuning(thresholds), resources, seed=0)


def see(ctx: RankContext, cache: Path, presets: list[str], options: dict | None = None) -> list[Seen]:
    """What this rank sees of one model after another in one job."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for preset in presets:
            with watched() as (measured, warnings):
                results, groups = tuned_groups(scopes_of(ctx, preset, **(options or {})))
            seen.append(Seen(results, groups.scopes.two_stages.measured, measured, warnings))
            assert not groups.traffic_log.entries
    return seen


def calibrated(ranks: RankPool, cache: Path, presets: list[str], **options: Any) -> list[list[Seen]]:
    return ranks(4, see, cache, presets, options, ranks_per_node=2, calibrates=True)


def test_ranks_measure_agree_and_keep_what_they_found(ranks: RankPool, tmp_path: Path) -> None:
    found = calibrated(ranks, tmp_path, ["zero3", "zero3", "ddp"])
    assert [by_model == found[0] for by_model in found] == [True] * 4
    first, second, third = found[0]
    assert first.measured == ["all_gather", "reduce_scatter"]
    for result in first.results:
        assert [timing.full_bytes for timing in result.timings] == [*SIZES_BYTES[: len(result.timings)]]
        assert all(timing.flat_s > 0 < timing.hierarchical_s for timing in result.timings)
        assert result.from_bytes == threshold_bytes(result.timings, flat_in_doubt=False)
    # A second model of the job has the same, and measures nothing; another one only what is new.
    assert (second.measured, second.thresholds) == ([], first.thresholds)
    assert not any(result.was_measured for result in second.results)
    assert third.measured == ["all_reduce"]
    # Another job finds it on the disk.
    [[again]] = [found[:1] for found in calibrated(ranks, tmp_path, ["zero3"])[:1]]
    assert (again.measured, again.thresholds, again.warnings) == ([], first.thresholds, [])
    assert all(result.was_measured and not result.timings for result in again.results)


def test_a_damaged_cache_costs_a_measurement_and_a_line_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    calibrated(ranks, tmp_path, ["ddp"])
    [cache_file] = (tmp_path / "mics_strategy" / "tuning").iterdir()
    cache_file.write_text("{")
    found = calibrated(ranks, tmp_path, ["ddp"])
    assert [[seen.measured for seen in by_model] for by_model in found] == [[["all_reduce"]]] * 4
    assert [len(seen.warnings) for [seen] in found] == [1, 0, 0, 0]


def test_all_ranks_take_what_rank_0_knows(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(4, _see_apart, tmp_path, ranks_per_node=2, calibrates=True)
    assert found == [({"all_gather": 12345, "reduce_scatter": 12345}, [])] * 4


def _see_apart(ctx: RankContext, cache: Path) -> tuple[dict[str, int], list[str]]:
    """Only rank 0 finds something in its cache."""
    with mock.patch.object(autotune, "load_cached", return_value=12345 if ctx.rank == 0 else None):
        [seen] = see(ctx, cache / str(ctx.rank), ["zero3"])
    return {collective: from_bytes for (collective, _), from_bytes in seen.thresholds}, seen.measured


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("mics", {}),
        ("paro-iig", {}),
        ("zero3", {"hierarchical": True}),
        ("zero3", {"hierarchical": False}),
        ("zero3", {"hierarchical": 65536}),
        ("zero3", {"weight_codec": "int8", "grad_codec": "int8"}),
    ],
    ids=str,
)
def test_nothing_is_measured_where_nothing_is_to_be_decided(preset: str, options: dict) -> None:
    config = ShardConfig.preset(preset, **options)
    assert resolve_scopes(config, Topology(ranks_per_node=4), 8).untuned() == {}
    assert resolve_scopes(ShardConfig.preset("zero3"), Topology(ranks_per_node=8), 8).untuned() == {}
    assert resolve_scopes(ShardConfig.preset("zero3"), Topology(ranks_per_node=1), 8).untuned() == {}


def test_what_is_not_encoded_is_still_measured() -> None:
    scopes = resolve_scopes(ShardConfig.preset("zero3", weight_codec="int8"), Topology(ranks_per_node=4), 8)
    assert [*scopes.untuned().values()] == ["grad_reduce_scatter"]


def test_simulated_ranks_measure_nothing() -> None:
    def job(ctx: RankContext) -> bool:
        results, groups = tuned_groups(scopes_of(ctx))
        return results == [] and not isinstance(groups.param_comm, SizeDispatch)

    assert simulate(4, job, ranks_per_node=2) == [True] * 4


def _fake(ctx: RankContext) -> bool:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    results, groups = tuned_groups(scopes_of(replace(ctx, world_size=8, ranks_per_node=4)))
    dist.destroy_process_group()
    return results == [] and not isinstance(groups.param_comm, SizeDispatch)


def test_a_transport_that_moves_nothing_measures_nothing(ranks: RankPool) -> None:
    assert ranks(1, _fake, default_group=False, calibrates=True) == [True]


def _chosen(ctx: RankContext, from_bytes: int) -> list[tuple[str, bool]]:
    """Which of two transfers, of fewer bytes than `from_bytes` and of as many, goes in which way."""
    with mock.patch.object(autotune, "load_cached", return_value=from_bytes):
        _, groups = tuned_groups(scopes_of(ctx))
    both, found = groups.param_comm, []
    assert isinstance(both, SizeDispatch)
    for numel in (from_bytes // 16 - 1, from_bytes // 16):
        both.for_bytes(16 * numel).all_gather(torch.empty(4 * numel), torch.zeros(numel), "block").wait()
        axes = sorted(sent.axis for sent in groups.traffic_log.drain())
        routes = groups.scopes.route("param_all_gather", 16 * numel)
        assert routes is not None
        found.append(("+".join(axes), len(routes.stages) == 1))
    return found


def test_what_was_found_decides_how_a_tensor_travels(ranks: RankPool) -> None:
    expected = [("intra_node+inter_node", True), ("inter_node+intra_node", False)]
    assert ranks(4, _chosen, 1600, ranks_per_node=2, calibrates=True) == [expected] * 4


def test_what_is_never_hierarchical_has_one_communicator() -> None:
    scopes = resolve_scopes(ShardConfig.preset("zero3"), Topology(ranks_per_node=4), 8)
    never = scopes.with_tuning(dict.fromkeys(scopes.untuned(), NEVER))
    routes = never.routes("param_all_gather")
    assert routes is not None
    assert (routes.flat, len(routes.hierarchical.stages)) == (None, 1)
    assert comm_layout(never).num_communicators == comm_layout(scopes).num_communicators - 2


def _on_a_gpu(ctx: RankContext, machine: Machine) -> list[tuple[int, tuple[int, ...]]]:
    """Thresholds and measured sizes."""
    results = autotune.autotune(scopes_of(ctx, "zero3"), CommResources(ctx.world_size, machine.device))
    return [(result.from_bytes, tuple(timing.full_bytes for timing in result.timings)) for result in results]


def _timed(run: Callable[[], None], *_: Any, launch_s: float) -> float:
    """As if every collective took equally long, so that two stages take twice as long as one."""
    before = len(current_machine().launches)
    run()
    launched = len(current_machine().launches) - before
    assert launched in (4, 8)  # four in a row, of one stage or of two
    return launch_s * launched


@pytest.mark.parametrize(("launch_s", "sizes"), [(1e-5, (1024, 4096)), (1e-2, (1024,))], ids=["fast", "slow"])
def test_on_gpus_larger_tensors_are_measured_several_in_a_row_and_flat_in_doubt(
    launch_s: float, sizes: tuple[int, ...]
) -> None:
    """Slow ones are not, as one after another they would take long."""
    with (
        mock.patch.object(autotune, "SIZES_BYTES", (1024, 4096)),
        mock.patch.object(autotune, "backend_key", return_value="nccl"),
        mock.patch.object(autotune, "load_cached", return_value=None),
        mock.patch.object(autotune, "store_result"),
        mock.patch.object(autotune, "time_slowest_rank", partial(_timed, launch_s=launch_s)),
    ):
        _, found = simulate_gpus(4, _on_a_gpu, ranks_per_node=2, moves_data=True)
    assert found == [[(NEVER, sizes)] * 2] * 4


def test_the_report_says_what_was_found_and_how_to_pin_it() -> None:
    scopes = resolve_scopes(ShardConfig.preset("zero3"), Topology(ranks_per_node=4), 8)
    gathers, sums = [
        TuningResult(collective=collective, span=span, from_bytes=from_bytes, timings=timings)
        for ((collective, span), from_bytes, timings) in zip(
            scopes.untuned(), (16384, 65536), ((), (SizeTiming(1024, 1e-3, 2e-3, FLAT),)), strict=True
        )
    ]
    text = report([gathers, sums])
    assert "all-gathers over intra_node+inter_node of 16,384 B or more, measured by an earlier job\n" in text
    assert "reduce-scatters over intra_node+inter_node of 65,536 B or more, measured now\n" in text
    assert [line.split()[-1] for line in text.splitlines()[3:6]] == ["1,024", "1.00", "2.00"]
    assert "`hierarchical=65536` pins" in text
    assert "`hierarchical=True` pins" in report([replace(sums, from_bytes=0)])
    never = report([gathers, replace(sums, from_bytes=NEVER)])
    assert "reduce-scatters over intra_node+inter_node of no size, measured now\n" in never
    assert "`hierarchical=False` pins" in never
    assert report([replace(gathers, was_measured=False)]) == report([]) == ""
