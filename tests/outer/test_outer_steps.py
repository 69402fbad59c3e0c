"""Do islands compute what plain torch computes in one process, and send what is planned?"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, Sharded, Topology, finish_delayed, shard
from tests.engine.training import wholes
from tests.outer.plain import (
    Net,
    Rounds,
    average_islands,
    batch,
    loss_of,
    optimizers_of,
    train_islands,
)
from tests.ranks import RankContext, RankPool

FIELDS: dict[str, dict[str, Any]] = {
    "mics": {"name": "mics"},
    "zero1": {"name": "paro-nni"},
    "ddp": {"name": "ddp"},
    "hpz": {"name": "mics", "secondary_params": 1},
    "rest": {"name": "paro-nii", "second_hop": "micro_step", "overlap": "none"},
}
LAYOUTS = {"2x2": [range(2), range(2, 4)], "4x1": [range(1), range(1, 2), range(2, 3), range(3, 4)]}


def config_of(name: str, rounds: Rounds, per_node: int, **fields: Any) -> ShardConfig:
    return ShardConfig.preset(topology=Topology(ranks_per_node=per_node), **FIELDS[name], **rounds.fields, **fields)


def start(config: ShardConfig, rounds: Rounds) -> tuple[nn.Module, Sharded, torch.optim.Optimizer]:
    """The model, its handle and the first of its optimizers; the others are an attribute of the model."""
    model = Net()
    sharded = shard(model, config, units=[nn.Linear])
    first, *others = optimizers_of(rounds.optimizer, model)
    model.other_optimizers = others
    return model, sharded, first


def run_step(ctx: RankContext, rounds: Rounds, trained: tuple[nn.Module, Sharded, Any], step: int) -> None:
    model, sharded, optimizer = trained
    model.left_out = rounds.layer_left_out(step)
    for micro in range(rounds.accumulation):
        loss_of(model, batch(step, micro, ctx.rank), rounds.accumulation).backward()
    if rounds.clip is not None:
        sharded.clip_grad_norm_(rounds.clip)
    for each in (optimizer, *model.other_optimizers):
        each.step()
    model.zero_grad()


def train(ctx: RankContext, config: ShardConfig, rounds: Rounds) -> list[tuple[dict[str, Tensor], list[Any]]]:
    """Parameters of this rank's island after each step, and the step's traffic."""
    trained, found = start(config, rounds), []
    for step in range(rounds.steps):
        run_step(ctx, rounds, trained, step)
        found.append((wholes(dict(trained[0].named_parameters())), [*trained[1].traffic()]))
    if rounds.finishes:
        assert not finish_delayed(trained[1])  # no gradients wait
        found.append((wholes(dict(trained[0].named_parameters())), []))
    return found


def check(found: list[Any], expected: list[list[dict[str, Tensor]]], islands: list[range], atol: float = 1e-12) -> None:
    for step, by_island in enumerate(expected):
        for ranks, values in zip(islands, by_island, strict=True):
            for rank in ranks:
                for name, value in values.items():
                    torch.testing.assert_close(
                        found[rank][step][0][name], value, rtol=0, atol=atol, msg=f"{name} {step}"
                    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("name", "layout"), [*((name, "2x2") for name in FIELDS), ("mics", "4x1"), ("ddp", "4x1")])
def test_islands_train_as_plain_torch_in_one_process(ranks: RankPool, name: str, layout: str, optimizer: str) -> None:
    islands, rounds = LAYOUTS[layout], Rounds(every=3, steps=7, optimizer=optimizer, accumulation=2, clip=0.5)
    found = ranks(4, train, config_of(name, rounds, len(islands[0])), rounds)
    check(found, train_islands(rounds, islands), islands)


@pytest.mark.parametrize("name", ["mics", "zero1", "ddp"])
def test_a_layer_without_gradients_in_the_last_step_takes_the_outer_step(ranks: RankPool, name: str) -> None:
    islands, rounds = LAYOUTS["2x2"], Rounds(every=2, steps=6, leaves_out=True)
    check(ranks(4, train, config_of(name, rounds, 2), rounds), train_islands(rounds, islands), islands)


@pytest.mark.parametrize(("name", "optimizer", "every"), [("mics", "two", 2), ("zero1", "muon", 3), ("ddp", "two", 1)])
def test_an_outer_step_comes_behind_the_last_optimizer(ranks: RankPool, name: str, optimizer: str, every: int) -> None:
    """Muon's own arithmetic is in bfloat16, where equal gradients but for rounding may differ by a digit."""
    islands, rounds = LAYOUTS["2x2"], Rounds(every=every, steps=7, optimizer=optimizer)
    config = config_of(name, rounds, 2, optimizer_layout="tensors" if optimizer == "muon" else "rows")
    found = ranks(4, train, config, rounds)
    check(found, train_islands(rounds, islands), islands, atol=1e-3 if optimizer == "muon" else 1e-12)


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
@pytest.mark.parametrize("name", ["mics", "ddp"])
def test_an_outer_sgd_of_rate_1_averages_parameters(ranks: RankPool, name: str, layout: str) -> None:
    islands, rounds = LAYOUTS[layout], Rounds(every=1, steps=4, lr=1.0, momentum=0.0)
    found = ranks(4, train, config_of(name, rounds, len(islands[0])), rounds)
    check(found, average_islands(rounds, islands), islands)


@pytest.mark.parametrize("name", FIELDS)
def test_sent_bytes_are_planned_and_leave_the_island_in_outer_steps_alone(ranks: RankPool, name: str) -> None:
    rounds = Rounds(every=3, steps=6)
    for rank_found in ranks(4, train, config_of(name, rounds, 2), rounds):
        for step, (_, rows) in enumerate(rank_found):
            if step:  # a plan is of steps that follow one of the same order
                assert all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)
            between = [row for row in rows if row.axis == "inter_node"]
            assert [row.collective for row in between] == ["all_reduce"] * ((step + 1) % 3 == 0)


def train_scaled(ctx: RankContext, config: ShardConfig, rounds: Rounds) -> list[tuple[dict[str, Tensor], float]]:
    """With a gradient scaler; in skipped steps the last rank alone overflows."""
    model, sharded, optimizer = start(config, rounds)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100), []
    for step in range(rounds.steps):
        loss = loss_of(model, batch(step, 0, ctx.rank), 1)
        is_inf = step in rounds.skipped and ctx.rank == ctx.world_size - 1
        scaler.scale(loss * float("inf") if is_inf else loss).backward()
        if rounds.clip is not None:
            scaler.unscale_(optimizer)
            sharded.clip_grad_norm_(rounds.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((wholes(dict(model.named_parameters())), scaler.get_scale()))
    return found


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_all_islands_skip_a_step_in_which_one_overflows(ranks: RankPool, layout: str, clip: float | None) -> None:
    islands = LAYOUTS[layout]
    rounds = Rounds(every=2, steps=7, skipped=(1, 4), clip=clip)
    found = ranks(4, train_scaled, config_of("mics", rounds, len(islands[0])), rounds)
    check(found, train_islands(rounds, islands), islands)
    assert [[scale for _, scale in of_rank] for of_rank in found] == [[256.0, *[128.0] * 3, *[64.0] * 3]] * 4


def report_of(ctx: RankContext, config: ShardConfig, rounds: Rounds) -> str:
    return str(start(config, rounds)[1].report())


def test_the_summary_at_start_names_the_algorithm_and_its_bytes(ranks: RankPool) -> None:
    rounds = Rounds(every=3, steps=4)
    config = config_of("mics", rounds, 2)
    sent = sum(row.sent_bytes for row in ranks(4, train, config, rounds)[0][2][1] if row.axis == "inter_node")
    text = ranks(4, report_of, config, rounds)[0]
    assert (
        f"2 islands of 2 ranks step alone; every 3 steps an outer step sends {sent / 1e3:.3g} kB. This is not the "
        "algorithm of synchronous training." in text
    )
    assert "optimizer states over 2 of 4 ranks (2 nodes of 2)." in text
    off = ranks(4, report_of, config.replace(outer_every=0, outer_lr=0.7, outer_momentum=0.5), rounds)[0]
    assert "island" not in off


def averaged_in_bf16(ctx: RankContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters before and after an outer step of rate 1."""
    rounds = Rounds(every=2, steps=2, lr=1.0, momentum=0.0)
    model = Net().bfloat16()
    shard(model, config_of("mics", rounds, 1), units=[nn.Linear])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        loss_of(model, batch(0, 0, ctx.rank).bfloat16(), 1).backward()
        before = {name: p - 0.1 * p.grad for name, p in wholes_with_grads(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return before, wholes(dict(model.named_parameters()))


def wholes_with_grads(model: nn.Module) -> dict[str, Tensor]:
    """Whole trained parameters, with whole gradients. Collective."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values, grads = wholes(dict(named)), wholes({name: p.grad for name, p in named.items()})
    for name, value in values.items():
        value.grad = grads[name]
    return values


def test_parameters_in_bf16_are_averaged_to_two_roundings(ranks: RankPool) -> None:
    found = ranks(4, averaged_in_bf16)
    for name in found[0][0]:
        mean = torch.stack([before[name].float() for before, _ in found]).mean(0)
        for _, after in found:
            torch.testing.assert_close(after[name].float(), mean, rtol=2**-6, atol=1e-3)
            assert torch.equal(after[name], found[0][1][name])
