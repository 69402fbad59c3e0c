"""Every gradient is the mean over all ranks, in any training loop."""

import pytest

from mics_strategy import ShardConfig
from tests import models
from tests.engine import patterns
from tests.engine.patterns import Pattern, play
from tests.engine.training import Run, assert_same
from tests.ranks import RankPool

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

BACKWARDS = (
    patterns.two_micro_steps,
    patterns.one_backward_of_two_forwards,
    patterns.two_forwards_then_their_backwards,
    patterns.two_forwards_then_the_last_backward_first,
    patterns.two_backwards_of_one_graph,
    patterns.another_micro_step_between_two_backwards_of_one_graph,
    patterns.backward_of_the_first_layers_only,
    patterns.backward_of_the_first_layers_then_of_all,
    patterns.loss_from_an_inner_layer_and_the_last,
    patterns.loss_from_an_inner_layer_on_the_first_rank,
    patterns.a_forward_that_is_thrown_away,
    patterns.evaluation_between_forward_and_backward,
    patterns.inference_between_forward_and_backward,
)
WINDOWS = (
    patterns.read_between,
    patterns.read_after_every_backward,
    patterns.cleared_by_optimizer,
    patterns.zeroed_by_optimizer,
    patterns.cleared_by_model,
    patterns.zeroed_by_model,
    patterns.cleared_and_left,
    patterns.cleared_without_reading,
    patterns.cleared_in_every_second_parameter,
    patterns.cleared_in_every_second_parameter_after_reading,
    patterns.cleared_in_every_second_parameter_and_left,
    patterns.halved_in_place,
    patterns.replaced_by_user,
    patterns.set_by_user_before,
    patterns.set_by_user_only,
)
PENALTIES = (
    patterns.penalised,
    patterns.penalised_in_a_backward_of_its_own,
    patterns.penalised_after_reading,
    patterns.penalised_and_cleared,
)
MICS = ShardConfig(partition_size=2)  # of four ranks: two hops over one buffer
ZERO2 = ShardConfig.preset("zero2")  # reduced to shards, parameters whole
ZEROPP = ShardConfig.preset("zeropp-hpz")  # the backward gathers from another copy than the forward
IIG = ShardConfig.preset("paro-iig")  # two buffers of different size

backwards = pytest.mark.parametrize("pattern", BACKWARDS, ids=lambda pattern: pattern.__name__)
windows = pytest.mark.parametrize("pattern", WINDOWS, ids=lambda pattern: pattern.__name__)
penalties = pytest.mark.parametrize("pattern", PENALTIES, ids=lambda pattern: pattern.__name__)


def _check(ranks: RankPool, run: Run, pattern: Pattern, world_size: int) -> None:
    results = ranks(world_size, play, run, pattern, ranks_per_node=2)
    for grads, expected in results:
        assert_same(grads, expected)


@backwards
def test_backward_through_a_secondary_copy(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.transformer, config=ZEROPP), pattern, 4)


@pytest.mark.wide(every=5)
@backwards
def test_backward_through_unsharded_parameters(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.transformer, config=ShardConfig()), pattern, 2)


@backwards
def test_backward_with_two_hops(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.transformer, config=IIG), pattern, 4)


@pytest.mark.wide(every=5)
@backwards
def test_backward_through_parameters_that_are_not_sharded(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.transformer, config=ZERO2), pattern, 2)


@pytest.mark.wide(every=5)
@windows
def test_window_with_one_buffer(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.tied, config=MICS), pattern, 4)


@windows
def test_window_with_two_buffers(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.tied, config=IIG), pattern, 4)


@pytest.mark.wide(every=5)
@windows
def test_window_without_sharding(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.tied, config=ShardConfig.preset("ddp")), pattern, 2)


@pytest.mark.wide(every=5)
@windows
def test_window_of_tiny_parameters(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.scalar, config=ShardConfig.preset("zero1")), pattern, 2)


@penalties
@pytest.mark.parametrize("preset", ["mics", "zero1", "ddp"])
def test_penalty_on_sharded_parameters_is_added(ranks: RankPool, pattern: Pattern, preset: str) -> None:
    _check(ranks, Run(case=models.scalar, config=ShardConfig.preset(preset)), pattern, 2)


@penalties
def test_penalty_on_sharded_parameters_is_added_across_two_hops(ranks: RankPool, pattern: Pattern) -> None:
    _check(ranks, Run(case=models.mlp, config=IIG), pattern, 4)
