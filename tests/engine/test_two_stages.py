"""Large tensors in two stages and small ones in one: same training, as planned."""

from collections import Counter

import pytest

from mics_strategy import ShardConfig, shard
from mics_strategy.engine.plan import Plan
from mics_strategy.engine.traffic import TrafficRow
from mics_strategy.errors import ConfigError
from tests import models
from tests.engine.counting import CountC10d, Kind, planned_kinds
from tests.engine.training import Run, assert_same_training, plain, start, train
from tests.ranks import RankContext, RankPool, raises_on_every_rank

PRESETS = ("ddp", "zero1", "zero2", "zero3", "zeropp-hpz", "paro-nig", "paro-ngg", "paro-gng")
BOTH_AXES, STAGES = "intra_node+inter_node", ("intra_node", "inter_node")
NUM_STEPS, FROM_BYTES = 2, 4096


def sizes_of(ctx: RankContext, run: Run) -> list[int]:
    """Bytes of every tensor that goes in two stages where all do."""
    plan = start(ctx, run).sharded.plan
    return sorted({p.full_bytes for p in plan.collectives if p.axis == "intra_node"})


def test_units_have_sizes_on_either_side(ranks: RankPool) -> None:
    """So that the number is one that tells tensors apart."""
    run = Run(case=models.transformer, config=ShardConfig.preset("zero3", hierarchical=True))
    sizes = ranks(4, sizes_of, run, ranks_per_node=2)[0]
    assert sizes[0] < FROM_BYTES <= sizes[-1]


def run_of(preset: str, from_bytes: int = FROM_BYTES, **options: object) -> Run:
    config = ShardConfig.preset(preset, hierarchical=from_bytes, **options)
    return Run(case=models.transformer, config=config, accumulation=2, steps=NUM_STEPS)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("world_size", "per_node"), [(4, 2), (8, 4)])
def test_training_equals_plain_training(ranks: RankPool, preset: str, world_size: int, per_node: int) -> None:
    run = run_of(preset)
    assert_same_training(ranks(world_size, train, run, ranks_per_node=per_node), plain(run, world_size))


Counts = tuple[Counter[Kind], Counter[Kind], tuple[TrafficRow, ...], set[tuple[str, str]]]


def count(ctx: RankContext, run: Run) -> Counts:
    """Issued, planned and reported traffic of the second step, and its axes."""
    training = start(ctx, run)
    for step in range(NUM_STEPS):
        with CountC10d() as counted:
            training.step(step)
    plan: Plan = training.sharded.plan
    axes = {(p.collective, p.axis) for p in plan.collectives if p.unit != "(usage)"}
    return counted.kinds, planned_kinds(plan), training.sharded.traffic(), axes


@pytest.mark.parametrize("from_bytes", [1, FROM_BYTES, 1 << 40])
@pytest.mark.parametrize("preset", PRESETS)
def test_issued_traffic_equals_the_plan_with_any_threshold(ranks: RankPool, preset: str, from_bytes: int) -> None:
    for issued, planned, rows, _ in ranks(4, count, run_of(preset, from_bytes), ranks_per_node=2):
        assert issued == planned
        assert planned
        assert all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)


@pytest.mark.parametrize("narrow", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_issued_traffic_in_narrow_dtypes_equals_the_plan(ranks: RankPool, preset: str, narrow: str) -> None:
    for issued, planned, _, _ in ranks(4, count, run_of(preset, **{narrow: "bfloat16"}), ranks_per_node=2):
        assert issued == planned


def test_a_threshold_between_the_unit_sizes_uses_both_algorithms(ranks: RankPool) -> None:
    by_number = {n: ranks(4, count, run_of("zero3", n), ranks_per_node=2)[0][3] for n in (1, FROM_BYTES, 1 << 40)}
    kinds = ("all_gather", "reduce_scatter")
    in_stages, directly = {(k, axis) for k in kinds for axis in STAGES}, {(k, BOTH_AXES) for k in kinds}
    assert by_number == {1: in_stages, FROM_BYTES: in_stages | directly, 1 << 40: directly}


def test_all_gathers_are_bitwise_equal_with_either_algorithm(ranks: RankPool) -> None:
    """Losses of the first step depend on all-gathers only, not on reductions."""
    losses = {
        n: [outcome.losses[0] for outcome in ranks(4, train, run_of("zero3", n), ranks_per_node=2)]
        for n in (1, FROM_BYTES, 1 << 40)
    }
    assert losses[1] == losses[FROM_BYTES] == losses[1 << 40]


def of_other_ranks(ctx: RankContext) -> None:
    model = models.mlp().build()
    shard(model, ShardConfig.preset("zero3", hierarchical=65536 if ctx.rank != 2 else 65537))


def test_a_rank_with_another_number_is_refused(ranks: RankPool) -> None:
    match = "`hierarchical` differs between ranks: 65536 on rank 0, 65537 on rank 2"
    raises_on_every_rank(lambda: ranks(4, of_other_ranks, ranks_per_node=2), ConfigError, match)


def printed(ctx: RankContext, cache: str) -> list[str]:
    """What a rank prints when it shards two models."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setattr("builtins.print", lambda *text, **_: lines.extend(map(str, text)))
        for _ in range(2):
            shard(models.mlp().build(), "zero3")
    return lines


def test_rank_0_prints_measurements_once(ranks: RankPool, tmp_path: object) -> None:
    first, *others = ranks(4, printed, str(tmp_path), ranks_per_node=2, calibrates=True)
    assert others == [[]] * 3
    [text] = first
    assert "hierarchical" in text
    assert "measured now" in text


def test_training_with_measured_thresholds_is_planned_and_right(ranks: RankPool, tmp_path: object) -> None:
    run = run_of("zero3").replace(config=ShardConfig.preset("zero3"))
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert_same_training(ranks(4, train, run, ranks_per_node=2, env=env, calibrates=True), plain(run, 4))
    for issued, planned, _, _ in ranks(4, count, run, ranks_per_node=2, env=env, calibrates=True):
        assert issued == planned
