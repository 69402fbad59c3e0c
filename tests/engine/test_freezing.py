"""Parameters that are frozen, unfrozen and given to the optimizer during training."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mics_strategy import ShardConfig
from mics_strategy.errors import ConfigError, LifecycleError
from tests import models
from tests.engine.counting import CountC10d, Kind, planned_kinds
from tests.engine.loops import Loop, Seen, assert_same_loop
from tests.engine.training import OPTIMIZERS, Run, presets, start
from tests.ranks import RankContext, RankPool

PRESETS = ("ddp", "zero1", "zero2", "mics", "paro-iig")
RUNS = [Run(case=models.mlp, config=config, accumulation=2) for config in presets(PRESETS)]
ADAMW = [run.replace(optimizer="adamw") for run in RUNS]
# Units of the model are "2" and "3"; "0" and "4" are the root's.


def freeze(loop: Loop, *prefixes: str) -> None:
    """These, and no others."""
    loop.model.requires_grad_(True)
    for parameter in loop.parameters(*prefixes) if prefixes else []:
        parameter.requires_grad_(False)


# -- frozen for a while -------------------------------------------------------------------------------------


def frozen_for_some_steps(loop: Loop) -> Seen:
    """A unit, all but the head, parts of units, the root's: frozen, and trained again."""
    made = loop.optimizer()
    for step, frozen in enumerate([(), ("2.",), ("0.", "2.", "3."), (), ("3.up", "2.down"), ("0.", "4."), ()]):
        freeze(loop, *frozen)
        loop.step(step, made)
    return [loop.values()]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    ("runs", "is_declared"), [(RUNS, False), (ADAMW, True)], ids=["momentum-undeclared", "adamw-declared"]
)
def test_parameters_may_be_frozen_for_some_steps(ranks: RankPool, runs: list[Run], is_declared: bool) -> None:
    assert_same_loop(ranks, 4, [run.replace(signal=is_declared) for run in runs], frozen_for_some_steps)


def frozen_within_a_window(loop: Loop) -> Seen:
    """Some parameters train in the first of two micro-steps, others in the second."""
    made = loop.optimizer()
    for step, frozen in enumerate([("2.up", "0."), ("2.", "3.down")] * 2):
        freeze(loop, *(frozen if step < 2 else ()))
        loop.micro_step(step, 0)
        freeze(loop, *(frozen if step >= 2 else ()))
        loop.micro_step(step, 1)
        made.step()
        made.zero_grad()
    return [loop.values()]


@pytest.mark.parametrize("is_declared", [False, True], ids=["undeclared", "declared"])
def test_parameters_may_be_frozen_for_a_micro_step(ranks: RankPool, is_declared: bool) -> None:
    assert_same_loop(ranks, 4, [run.replace(signal=is_declared) for run in RUNS], frozen_within_a_window)


def frozen_between_backward_and_step(loop: Loop) -> Seen:
    """What has a gradient takes the step, frozen or not."""
    made = loop.optimizer()
    for step, frozen in enumerate([("0.", "2."), (), ("3.",)]):
        loop.backward(step)
        freeze(loop, *frozen)
        made.step()
        made.zero_grad()
    return [loop.values()]


def frozen_with_gradients_left(loop: Loop) -> Seen:
    """Gradients are not cleared: those of frozen parameters stay and are used."""
    made = loop.optimizer()
    for step, frozen in enumerate([(), ("0.", "2."), ("2.",), ()]):
        freeze(loop, *frozen)
        loop.backward(step)
        made.step()
    return [loop.grads(), loop.values()]


def frozen_between_forward_and_backward(loop: Loop) -> Seen:
    """The graph is there, the gradient is not wanted any more.

    Or it is wanted, and the graph lacks it.
    """
    made = loop.optimizer()
    for step, frozen in enumerate([("0.", "2."), (), ("3.",)]):
        losses = [loop.loss(step, 0, rank) for rank in loop.ranks]
        freeze(loop, *frozen)
        for loss in losses:
            loss.backward()
        made.step()
        made.zero_grad()
    return [loop.values()]


@pytest.mark.parametrize(
    "body",
    [frozen_between_backward_and_step, frozen_with_gradients_left, frozen_between_forward_and_backward],
    ids=lambda body: body.__name__,
)
def test_freezing_acts_when_it_does_on_the_plain_model(ranks: RankPool, body: object) -> None:
    assert_same_loop(ranks, 4, RUNS, body)


def reductions(ctx: RankContext, run: Run) -> tuple[Counter[Kind], Counter[Kind]]:
    """Sent in a step in which unit "2" is frozen, and planned without that unit."""
    training = start(ctx, run)
    training.step(0)
    training.model[2].requires_grad_(False)
    with CountC10d() as counted:
        training.step(1)
    plan = training.sharded.plan
    of_gradients = [
        c for c in plan.collectives if c.unit != "2" and (c.phase == "second_hop" or c.collective == "reduce_scatter")
    ]
    return counted.carried, planned_kinds(type(plan)(collectives=tuple(of_gradients), num_micro_steps=1))


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", [*PRESETS, "zero3"])
def test_a_frozen_unit_sends_no_gradients(ranks: RankPool, preset: str) -> None:
    for sent, planned in ranks(
        4, reductions, Run(case=models.mlp, config=ShardConfig.preset(preset)), ranks_per_node=2
    ):
        assert sent == planned
        assert sent


# -- given to the optimizer later ---------------------------------------------------------------------------


def added_later(loop: Loop, clearer: str) -> Seen:
    """Every parameter has gradients all along.

    Some have them, uncleared or not, long before they are stepped on.
    """
    made = loop.optimizer("4.")
    for step in range(5):
        if step == 2:
            made.add_param_group({"params": loop.parameters("3."), "lr": 0.02})
        if step == 3:
            made.add_param_group({"params": loop.parameters("0.", "2."), "lr": 0.005})
        loop.backward(step)
        made.step()
        (made if clearer == "optimizer" else loop.model).zero_grad()
    return [loop.values()]


@pytest.mark.parametrize(("runs", "clearer"), [(RUNS, "optimizer"), (ADAMW, "model")], ids=["momentum", "adamw"])
def test_parameters_may_be_added_to_the_optimizer_later(ranks: RankPool, runs: list[Run], clearer: str) -> None:
    assert_same_loop(ranks, 4, runs, added_later, clearer)


def added_within_a_window(loop: Loop) -> Seen:
    made = loop.optimizer("4.")
    for step in range(3):
        loop.micro_step(step, 0)
        if step == 1:
            made.add_param_group({"params": loop.parameters("0.", "2.", "3."), "lr": 0.02})
        loop.micro_step(step, 1)
        made.step()
        loop.model.zero_grad()
    return [loop.values()]


def test_parameters_may_be_added_between_micro_steps(ranks: RankPool) -> None:
    assert_same_loop(ranks, 4, RUNS, added_within_a_window)


def unfrozen_from_the_head_down(loop: Loop) -> Seen:
    """Frozen before the first forward, unfrozen with a group for each layer."""
    loop.model.requires_grad_(False)
    made = None
    for step, layer in enumerate(["4.", "3.", "2.", "0.", ""]):
        added = [parameter.requires_grad_(True) for parameter in loop.parameters(layer) if layer]
        if made is None:
            made = OPTIMIZERS[loop.run.optimizer](added)
        elif added:
            made.add_param_group({"params": added, "lr": 0.05 / step})
        loop.step(step, made)
    return [loop.values()]


def test_a_model_may_be_unfrozen_from_the_head_down(ranks: RankPool) -> None:
    assert_same_loop(ranks, 4, RUNS, unfrozen_from_the_head_down)


def foreign_group_for_a_while(loop: Loop) -> Seen:
    """A group that is refused in the middle of training, and taken back."""
    made = loop.optimizer()
    loop.step(0, made)
    loop.backward(1)
    if loop.sharded is not None:
        made.add_param_group({"params": nn.Linear(2, 2).parameters()})
        with pytest.raises(ConfigError, match=r"Parameter 0 of group 1 of SGD, shape \(2, 2\), belongs to no"):
            made.step()
        del made.param_groups[1]
    made.step()
    made.zero_grad()
    loop.step(2, made)
    return [loop.values()]


def test_training_goes_on_after_a_refused_group_is_taken_back(ranks: RankPool) -> None:
    assert_same_loop(ranks, 4, RUNS, foreign_group_for_a_while)


# -- frozen before `shard()` --------------------------------------------------------------------------------


def unfreeze(ctx: RankContext, runs: list[Run], prefix: str) -> list[str]:
    """Train with what was frozen when the model was sharded: what each run says."""
    said = []
    for run in runs:
        training = start(ctx, run)
        for name, parameter in training.model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or name.startswith(prefix))
        with pytest.raises(LifecycleError) as caught:
            training.step(0)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("prefix", "first"),
    [
        ("embedding", "embedding.weight"),
        ("blocks.0.", "blocks.0.norm1.weight"),
        ("blocks.1.", "blocks.1.qkv.weight"),
        ("blocks.1.down.weight", "blocks.1.down.weight"),
    ],
    ids=["beside-trained-ones", "a-whole-unit", "the-rest-of-a-unit", "one-of-a-unit"],
)
def test_unfreezing_what_was_frozen_when_sharded_is_refused(ranks: RankPool, prefix: str, first: str) -> None:
    runs = [Run(case=models.frozen, config=config) for config in presets(PRESETS)]
    for said in ranks(4, unfreeze, runs, prefix, ranks_per_node=2, timeout_s=20.0):
        assert said == [said[0]] * len(runs)
        assert f"`{first}` was frozen when the model was sharded" in said[0]
        assert "Unfreeze it before `shard()`" in said[0]


def train_what_was_frozen_by_hand(ctx: RankContext, run: Run) -> tuple[bool, bool]:
    """An optimizer over all parameters does not change frozen ones."""
    training = start(ctx, run)
    training.optimizer = SGD(training.model.parameters(), lr=0.1, weight_decay=0.5)
    before = training.parameters()
    training.step(0)
    after = training.parameters()
    frozen = [name for name, p in training.model.named_parameters() if not p.requires_grad]
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    return any(moved[name] for name in frozen), all(moved[name] for name in before if name not in frozen)


def test_an_optimizer_over_all_parameters_leaves_frozen_ones_alone(ranks: RankPool) -> None:
    for preset in PRESETS:
        run = Run(case=models.frozen, config=ShardConfig.preset(preset))
        assert ranks(2, train_what_was_frozen_by_hand, run) == [(False, True)] * 2


def count_while_freezing(
    ctx: RankContext, run: Run, frozen: tuple[str, ...]
) -> list[tuple[Counter[Kind], Counter[Kind]]]:
    """Issued and planned collectives before, while and after parameters are frozen.

    Those of the third step.
    """
    found = []
    training = start(ctx, run)
    for prefixes in ((), frozen, ()):
        for name, parameter in training.model.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes) if prefixes else True)
        for step in range(3):
            with CountC10d() as counted:
                training.step(step)
        found.append((counted.kinds, planned_kinds(training.sharded.plan)))
    return found


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "mics", "paro-iig"])
@pytest.mark.parametrize(
    "frozen", [("blocks.1.", "head"), ("embedding", "blocks.0."), ("blocks.0.up", "blocks.2.norm1")]
)
def test_gradients_of_frozen_parameters_are_neither_sent_nor_planned(
    ranks: RankPool, frozen: tuple[str, ...], preset: str
) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), accumulation=2)
    for found in ranks(4, count_while_freezing, run, frozen, ranks_per_node=2):
        for issued, planned in found:
            assert issued == planned
        (with_all, _), (with_few, _), _ = found
        assert with_few.total() < with_all.total() or with_few == with_all


def gathered_in_backward(ctx: RankContext, run: Run) -> list[set[str]]:
    """Units with planned all-gathers in the backward.

    Before, and while the first ones are frozen.
    """
    training, found = start(ctx, run), []
    for prefixes in ("nothing", ("embedding", "blocks.0.")):
        for name, parameter in training.model.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))
        for step in range(3):
            training.step(step)
        planned = [p for p in training.sharded.plan.collectives if p.phase == "backward"]
        found.append({p.unit for p in planned if p.collective == "all_gather"})
    return found


def test_units_outside_of_the_backward_are_not_planned_for_it(ranks: RankPool) -> None:
    for before, while_frozen in ranks(2, gathered_in_backward, Run(case=models.transformer, config=ShardConfig())):
        assert "blocks.0" in before
        assert "blocks.0" not in while_frozen
