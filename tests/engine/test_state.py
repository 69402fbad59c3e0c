"""State dicts go from sharded to plain and back, at any world size."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import ShardConfig
from mics_strategy.errors import CheckpointError
from tests import models
from tests.engine.training import OPTIMIZERS, Run, assert_identical, assert_same, plain, start
from tests.ranks import RankContext, RankPool, raises_on_every_rank

CASES = pytest.mark.parametrize(
    "case", [models.mlp, models.conv_bn, models.tied, models.scalar, models.frozen], ids=lambda case: case.__name__
)
OTHERS = {
    "world 1": (1, ShardConfig()),
    "world 2": (2, ShardConfig()),
    "world 4, other scopes": (4, ShardConfig(params=1, grads=2, optimizer=4)),
    "world 4, partition 2": (4, ShardConfig(partition_size=2)),
}
others = pytest.mark.parametrize(("world_size", "config"), OTHERS.values(), ids=OTHERS)
State = tuple[dict[str, Tensor], dict[str, Any]]


def save(ctx: RankContext, run: Run) -> State:
    """Train and save."""
    training = start(ctx, run)
    for step in range(run.steps):
        training.step(step)
    return training.sharded.full_state_dict(), training.sharded.full_optimizer_state_dict(training.optimizer)


def load(ctx: RankContext, run: Run, state: State) -> tuple[State, dict[str, Tensor]]:
    """Load, save again, and train on."""
    training = start(ctx, run)
    training.step(7)  # so that there is something to overwrite
    training.sharded.load_full_state_dict(state[0])
    training.sharded.load_full_optimizer_state_dict(training.optimizer, state[1])
    again = training.sharded.full_state_dict(), training.sharded.full_optimizer_state_dict(training.optimizer)
    for step in range(run.steps, run.steps + 2):
        training.step(step)
    return again, training.parameters()


def _plain_state(run: Run, world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    case = run.case()
    model = case.build()
    optimizer = OPTIMIZERS[run.optimizer]([p for p in model.parameters() if p.requires_grad])
    _continue_plain(run, world_size, model, optimizer, range(run.steps))
    return model, optimizer


def _continue_plain(run: Run, world_size: int, model: Any, optimizer: Any, steps: range) -> None:
    case = run.case()
    for step in steps:
        for rank in range(world_size):
            (case.loss(model, case.batch(step, 0, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()


def _flat(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    entries = optimizer_state["state"].items()
    return {f"{i}.{key}": torch.as_tensor(value) for i, entry in entries for key, value in sorted(entry.items())}


@CASES
@pytest.mark.parametrize("preset", ["mics", "zero1", "paro-iig", "ddp"])
def test_state_dict_is_the_plain_models(ranks: RankPool, case: object, preset: str) -> None:
    run = Run(case=case, config=ShardConfig.preset(preset), steps=1, optimizer="adamw")
    (state, _), *rest = ranks(4, save, run, ranks_per_node=2)
    model = case().build()
    assert list(state) == list(model.state_dict())
    model.load_state_dict(state)
    assert_same(dict(model.named_parameters()), plain(run, 4).parameters)
    assert rest == [({}, {})] * 3


def test_tied_entries_stay_one_tensor(ranks: RankPool) -> None:
    state, _ = ranks(2, tied_is_one, Run(case=models.tied, config=ShardConfig()))
    assert state is True


def tied_is_one(ctx: RankContext, run: Run) -> bool:
    state = start(ctx, run).sharded.full_state_dict()
    return not state or state["head.weight"] is state["embedding.weight"]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw_fused", "adagrad"])
def test_optimizer_state_is_the_plain_optimizers(ranks: RankPool, optimizer: str) -> None:
    run = Run(case=models.scalar, config=ShardConfig.preset("paro-iig"), optimizer=optimizer)
    _, state = ranks(4, save, run, ranks_per_node=2)[0]
    model, plain_optimizer = _plain_state(run, 4)
    assert_same(_flat(state), _flat(plain_optimizer.state_dict()))
    plain_optimizer.load_state_dict(state)
    _continue_plain(run, 4, model, plain_optimizer, range(3, 4))


@others
@pytest.mark.parametrize("case", [models.tied, models.scalar], ids=["tied", "scalar"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_state_survives_loading_at_another_size(
    ranks: RankPool, case: object, optimizer: str, world_size: int, config: ShardConfig
) -> None:
    run = Run(case=case, config=ShardConfig(), optimizer=optimizer)
    state = ranks(2, save, run)[0]
    again, _ = ranks(world_size, load, run.replace(config=config), state)[0]
    assert_identical(again[0], state[0])
    assert_identical(_flat(again[1]), _flat(state[1]))


@others
def test_training_after_loading_equals_training_on(ranks: RankPool, world_size: int, config: ShardConfig) -> None:
    run = Run(case=models.scalar, config=ShardConfig(), optimizer="adamw")
    state = ranks(2, save, run)[0]
    model, optimizer = _plain_state(run, 2)
    _continue_plain(run, world_size, model, optimizer, range(3, 5))
    for _, parameters in ranks(world_size, load, run.replace(config=config), state):
        assert_same(parameters, {name: p.detach() for name, p in model.named_parameters()})


def load_only(ctx: RankContext, run: Run, state: dict[str, Tensor], is_strict: bool) -> Any:
    return start(ctx, run).sharded.load_full_state_dict(state, strict=is_strict)


def test_missing_and_unexpected_entries_are_named(ranks: RankPool) -> None:
    state = models.mlp().build().state_dict()
    state["other"] = state.pop("4.bias")
    run = Run(case=models.mlp, config=ShardConfig())
    found = ranks(2, load_only, run, state, False)[1]
    assert (found.missing_keys, found.unexpected_keys) == (["4.bias"], ["other"])
    raises_on_every_rank(lambda: ranks(2, load_only, run, state, True), RuntimeError, "4.bias")


def test_wrong_shape_is_refused(ranks: RankPool) -> None:
    state = models.mlp().build().state_dict() | {"4.bias": torch.zeros(4)}
    run = Run(case=models.mlp, config=ShardConfig())
    raises_on_every_rank(lambda: ranks(2, load_only, run, state, True), RuntimeError, "size mismatch.*4.bias|4.bias")


def load_other_optimizer(ctx: RankContext, run: Run) -> None:
    training = start(ctx, run)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    training.sharded.load_full_optimizer_state_dict(training.optimizer, other.state_dict())


def test_optimizer_state_of_another_model_is_refused(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig())
    raises_on_every_rank(
        lambda: ranks(2, load_other_optimizer, run), CheckpointError, "has 1 parameters, but this SGD has 10"
    )


def local_round_trip(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    """Through torch's own state dicts, which stay sharded."""
    training = start(ctx, run)
    training.step(0)
    model = {key: value.clone() for key, value in training.model.state_dict().items()}
    optimizer = training.optimizer.state_dict()
    fresh = start(ctx, run)
    fresh.model.load_state_dict(model)
    fresh.optimizer.load_state_dict(optimizer)
    for step in range(1, run.steps):
        fresh.step(step)
    return fresh.parameters()


@pytest.mark.parametrize("optimizer", ["momentum", "adamw_fused"])
def test_torchs_own_state_dicts_round_trip(ranks: RankPool, optimizer: str) -> None:
    run = Run(case=models.scalar, config=ShardConfig(), optimizer=optimizer)
    assert_same(ranks(2, local_round_trip, run)[1], plain(run, 2).parameters)


def compare(ctx: RankContext, run: Run) -> list[bool]:
    """Comparisons of a parameter with itself, with copies and with another shape.

    In one copy, one element of rank 1 differs.
    """
    model = start(ctx, run).model
    weight, *others = model.parameters()
    same, changed = weight.detach().clone(), weight.detach().clone()
    if ctx.rank == 1:
        changed.to_local().view(-1)[:1] += 1
    return [torch.equal(weight, other) for other in (weight, same, changed, others[0])]


@pytest.mark.parametrize("preset", ["zero3", "mics", "ddp"])
def test_comparison_of_parameters_uses_full_tensors(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset))
    found = ranks(2, compare, run)
    assert found[0][:2] == found[1][:2] == [True, True]
    assert found[0][2:] == found[1][2:] == [False, False]
