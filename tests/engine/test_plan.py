"""Issued traffic of a step equals the plan.

Counted below the engine, at torch's dispatcher.
"""

from collections import Counter

import pytest

from mics_strategy import ShardConfig
from mics_strategy.engine.traffic import TrafficRow, TrafficRows
from tests import models
from tests.engine.counting import CountC10d, Kind, planned_kinds
from tests.engine.training import Run, root_only, start
from tests.ranks import RankContext, RankPool

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

Counts = tuple[Counter[Kind], Counter[Kind], tuple[TrafficRow, ...]]


def count_steps(ctx: RankContext, run: Run) -> list[Counts]:
    """Issued, planned and reported collectives of the second step."""
    training, found = start(ctx, run), []
    for step in range(2):
        with CountC10d() as counted:
            training.step(step)
        assert not any(name.startswith("functional") for name in counted.names)
        found.append((counted.kinds, planned_kinds(training.sharded.plan), training.sharded.traffic()))
    return found[1:]


def _check(found: list[list[Counts]]) -> None:
    for by_step in found:
        for issued, planned, _ in by_step:
            assert issued == planned
            assert planned


@pytest.mark.parametrize("preset", [p for p in ShardConfig.PRESETS if p.startswith("paro-")])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_preset_sends_what_was_planned(ranks: RankPool, preset: str, accumulation: int) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), accumulation=accumulation)
    _check(ranks(4, count_steps, run, ranks_per_node=2))


@pytest.mark.parametrize(
    "case", [models.mlp, models.tied, models.frozen, models.scalar, models.shared], ids=lambda case: case.__name__
)
@pytest.mark.parametrize("preset", ["mics", "zero2"])
def test_every_model_sends_what_was_planned(ranks: RankPool, preset: str, case: object) -> None:
    _check(ranks(2, count_steps, Run(case=case, config=ShardConfig.preset(preset), accumulation=2)))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": "none"},
        {"prefetch": 3},
        {"second_hop": "micro_step"},
        {"param_dtype": "bfloat16"},
        {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
        {"reduce_dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["mics", "paro-iig"])
def test_every_option_sends_what_was_planned(ranks: RankPool, preset: str, options: dict) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset, **options), accumulation=2)
    _check(ranks(4, count_steps, run, ranks_per_node=2))


@pytest.mark.parametrize("preset", ["ddp", "zero1", "mics", "paro-iig"])
def test_declared_boundary_changes_when_and_not_what(ranks: RankPool, preset: str) -> None:
    config = ShardConfig.preset(preset)
    _check(ranks(4, count_steps, Run(case=models.mlp, config=config, accumulation=2, signal=True), ranks_per_node=2))


@pytest.mark.parametrize("preset", ["ddp", "mics", "zero3", "paro-iig"])
def test_report_shows_planned_and_issued_traffic(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset), accumulation=2, steps=2)
    [(issued, _, rows)] = ranks(4, count_steps, run, ranks_per_node=2)[0]
    assert sum(row.sent_bytes for row in rows) == issued.total()
    for row in rows:
        assert (row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "mics", "paro-iig"])
def test_one_rank_calls_no_collective(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.tied, config=ShardConfig.preset(preset), accumulation=2, clip=0.1)
    assert ranks(1, count_a_full_step, run) == [Counter()]


def count_a_full_step(ctx: RankContext, run: Run) -> Counter[str]:
    """A step with everything a loop does around it."""
    training = start(ctx, run)
    with CountC10d() as counted:
        training.backward(0)
        training.sharded.clip_grad_norm_(1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.model.eval()
        training.loss(1)
    return counted.names


def plans_before_and_after(ctx: RankContext, run: Run) -> tuple[Counter[Kind], Counter[Kind]]:
    training = start(ctx, run)
    before = planned_kinds(training.sharded.plan)
    for step in range(2):
        training.step(step)
    return before, planned_kinds(training.sharded.plan)


@pytest.mark.parametrize("case", [models.mlp, models.transformer, models.frozen], ids=lambda case: case.__name__)
@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig", "ddp"])
def test_plan_is_known_before_the_first_step(ranks: RankPool, case: object, preset: str) -> None:
    before, after = ranks(2, plans_before_and_after, Run(case=case, config=ShardConfig.preset(preset)))[0]
    assert before == after


def count_second_hop(ctx: RankContext, run: Run) -> dict[str, int]:
    """All-reduces after each event of a step.

    A flat model of one unit, so nothing else is one.
    """
    training, counts = start(ctx, run), {}
    training.step(0)
    events = {
        "backward": lambda: training.backward(1),
        "read": lambda: next(training.model.parameters()).grad,
        "read again": lambda: [p.grad for p in training.model.parameters()],
        "clip": lambda: training.sharded.internals.engine.finish_gradients(),
        "step": training.optimizer.step,
        "zero_grad": training.optimizer.zero_grad,
    }
    for name, event in events.items():
        with CountC10d() as counted:
            event()
        counts[name] = counted.names["allreduce_"]
    return counts


@pytest.mark.parametrize(("preset", "per_node"), [("ddp", 4), ("mics", 2)])
def test_second_hop_waits_for_the_first_reader(ranks: RankPool, preset: str, per_node: int) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset), accumulation=3, units=root_only)
    counts = ranks(4, count_second_hop, run, ranks_per_node=per_node)[0]
    assert counts == {"backward": 0, "read": 2, "read again": 0, "clip": 0, "step": 0, "zero_grad": 0}


def count_step_alone(ctx: RankContext, run: Run) -> list[int]:
    training = start(ctx, run)
    training.step(0)  # the first one also agrees on an order
    counts = []
    training.backward(1)
    for event in (training.optimizer.step, training.optimizer.zero_grad):
        with CountC10d() as counted:
            event()
        counts.append(counted.names.total())
    return counts


def test_optimizer_step_finishes_unread_gradients(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset("ddp"), accumulation=3, units=root_only)
    assert ranks(2, count_step_alone, run)[0] == [2, 0]


def step_after_an_interrupted_forward(ctx: RankContext, run: Run) -> list[Counts]:
    """The very first forward raises in its middle."""
    training = start(ctx, run)
    handle = training.model.blocks[1].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        training.loss(0)
    handle.remove()
    found = []
    for step in range(3):
        with CountC10d() as counted:
            training.step(step)
        found.append((counted.kinds, planned_kinds(training.sharded.plan), training.sharded.traffic()))
    return found[1:]


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def test_interrupted_first_forward_leaves_the_plan_right(ranks: RankPool) -> None:
    _check(ranks(2, step_after_an_interrupted_forward, Run(case=models.transformer, config=ShardConfig())))


def step_after_a_forward_without_backward(ctx: RankContext, run: Run) -> list[Counts]:
    training = start(ctx, run)
    training.loss(0)
    found = []
    for step in range(3):
        with CountC10d() as counted:
            training.step(step)
        found.append((counted.kinds, planned_kinds(training.sharded.plan), training.sharded.traffic()))
    return found[1:]


def test_sanity_check_forward_leaves_the_plan_right(ranks: RankPool) -> None:
    _check(ranks(2, step_after_a_forward_without_backward, Run(case=models.transformer, config=ShardConfig())))


def steps_with_evaluation(ctx: RankContext, run: Run) -> tuple[TrafficRow, ...]:
    training = start(ctx, run)
    for step in range(3):
        training.step(step)
        training.model.eval()
        training.loss(9)
        training.model.train()
    training.step(3)
    return training.sharded.traffic()


def test_a_report_is_printed_as_a_table() -> None:
    row = TrafficRow(
        axis="intra_node", collective="all_gather", planned_count=6, count=6, planned_bytes=1768, sent_bytes=768
    )
    assert f"{TrafficRows([row])}" == (
        "axis        collective  calls  planned B  sent B\nintra_node  all_gather      6      1,768     768"
    )


def test_report_of_a_step_leaves_evaluation_out(ranks: RankPool) -> None:
    for row in ranks(2, steps_with_evaluation, Run(case=models.transformer, config=ShardConfig()))[0]:
        assert row.count <= row.planned_count
