"""What outer steps do not support is refused by name, on every rank."""

from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import Codec, ConfigError, MiCSError, ShardConfig, Topology, finish_delayed, shard
from tests.outer.plain import Net, Rounds, batch, loss_of
from tests.outer.test_outer_steps import config_of, run_step, start
from tests.ranks import RankContext, RankPool

NODES = Topology(ranks_per_node=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outer_every": -1}, "`outer_every=-1` is not a number of optimizer steps. Use 1 or more"),
        ({"outer_every": True}, "`outer_every=True` is not"),
        ({"outer_every": 3, "outer_lr": 0.0}, "`outer_lr=0.0` is not a positive number. Use 0.7"),
        ({"outer_every": 3, "outer_lr": float("inf")}, "`outer_lr=inf` is not"),
        ({"outer_every": 3, "outer_momentum": 1.0}, "`outer_momentum=1.0` is not a number from 0 to below 1"),
        ({"outer_lr": 0.5}, "`outer_lr=0.5` counts for outer steps, and `outer_every=0` takes none"),
        ({"outer_fragments": 2}, "`outer_fragments=2` counts for outer steps, and `outer_every=0` takes none"),
        ({"outer_delay": 2}, "`outer_delay=2` counts for outer steps, and `outer_every=0` takes none"),
        ({"outer_alpha": 0.2}, "`outer_alpha=0.2` counts for outer steps, and `outer_every=0` takes none"),
        ({"outer_every": 3, "outer_fragments": 0}, "`outer_fragments=0` is not a number. Use 1 or more"),
        ({"outer_every": 3, "outer_fragments": True}, "`outer_fragments=True` is not a number"),
        ({"outer_every": 3, "outer_fragments": 4}, "`outer_fragments=4` are more than the 3 steps of a round"),
        ({"outer_every": 3, "outer_delay": -1}, "`outer_delay=-1` is not a number. Use 0 or more"),
        ({"outer_every": 3, "outer_delay": 3}, "`outer_delay=3` ends an outer step when the next one has started"),
        ({"outer_every": 3, "outer_delay": 1, "outer_alpha": 1.0}, "`outer_alpha=1.0` is not a number from 0 to below"),
        ({"outer_every": 3, "outer_alpha": 0.2}, "`outer_alpha=0.2` counts for outer steps that are delayed"),
        ({"outer_every": 3, "outer_delay": 1, "second_hop": "delayed"}, "`outer_every=3` lets nodes step alone"),
        ({"outer_every": 3, "preset": "auto"}, "`params='auto'` chooses scopes"),
        ({"outer_every": 3, "grad_codec": Codec(bits=8, feedback=True)}, "`grad_codec` has feedback"),
        ({"outer_every": 3, "weight_codec": Codec(bits=8, differences=True)}, "`weight_codec` encodes differences"),
    ],
)
def test_a_configuration_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ShardConfig.preset(fields.pop("preset", "mics"), **fields)
    assert words in str(refused.value)


def sharded_with(ctx: RankContext, name: str, fields: dict[str, Any]) -> str:
    try:
        shard(Net(), ShardConfig.preset(name, **{"outer_every": 3, "topology": NODES, **fields}), units=[nn.Linear])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("zero3", {}, "`params` is sharded over 4 ranks, more than the 2 of a node"),
        ("zero1", {}, "`optimizer` is sharded over 4 ranks"),
        ("mics", {"partition_size": 4}, "`params` is sharded over 4 ranks"),
        ("mics", {"topology": Topology(ranks_per_node=4)}, "all 4 ranks of this job are on one node"),
        ("mics", {"grad_codec": "int8"}, "`grad_codec='int8'` has nothing to encode"),
        (
            "mics",
            {"outer_every": 9, "outer_fragments": 7},
            "of which 6 have trained parameters. Use 6 fragments or fewer",
        ),
    ],
)
def test_a_job_is_refused_on_every_rank(ranks: RankPool, name: str, fields: dict[str, Any], words: str) -> None:
    assert all(words in message for message in ranks(4, sharded_with, name, fields))


def test_a_leaf_switch_is_an_island_where_there_are_several(ranks: RankPool) -> None:
    topology = Topology(ranks_per_node=1, nodes_per_switch=2)
    assert ranks(4, sharded_with, "mics", {"topology": topology, "partition_size": 2}) == [""] * 4
    (message, *_) = ranks(4, sharded_with, "zero3", {"topology": topology})
    assert "each leaf switch step without the others" in message


def refused_in_training(ctx: RankContext, what: str) -> str:
    """What a rank raises."""
    rounds = Rounds(every=2, steps=3)
    trained = model, sharded, _ = start(config_of("mics", rounds, 2), rounds)
    run_step(ctx, rounds, trained, 0)
    try:
        if what == "second":
            run_step(ctx, rounds, trained, 1)
            torch.optim.SGD([model.scale], lr=0.1).step()
        elif what == "one less":
            torch.optim.SGD([model.scale], lr=0.1).step()
            for step in range(1, 3):
                run_step(ctx, rounds, trained, step)
        elif what == "frozen":
            model.scale.requires_grad_(False)
            run_step(ctx, rounds, trained, 1)
        elif what == "partial":
            state = sharded.full_state_dict()
            whole = sharded.internals.groups.island.job_group.broadcast_object(state, 0)
            model.load_state_dict(whole)  # a whole one begins a round
            run_step(ctx, rounds, trained, 1)
            run_step(ctx, rounds, trained, 2)
            model.load_state_dict({"scale": whole["scale"]}, strict=False)  # behind an outer step
            run_step(ctx, rounds, trained, 3)
            model.load_state_dict({"scale": whole["scale"]}, strict=False)
    except MiCSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("second", "2 stepped behind one backward, 1 before"),
        ("one less", "1 optimizers stepped behind one backward, and 2 before"),
        ("frozen", "`scale` was frozen after `shard()`"),
        ("partial", "was loaded 1 steps after an outer step"),
    ],
)
def test_a_loop_is_refused_on_every_rank(ranks: RankPool, what: str, words: str) -> None:
    assert all(words in message for message in ranks(4, refused_in_training, what))


def refused_in_flight(ctx: RankContext, what: str) -> str:
    """What a rank raises."""
    rounds = Rounds(every=3, steps=3, fragments=2, delay=1)
    trained = model, sharded, _ = start(config_of("mics", rounds, 2), rounds)
    run_step(ctx, rounds, trained, 0)
    try:
        if what == "gradients":
            loss_of(model, batch(0, 0, ctx.rank), 1).backward()
            finish_delayed(sharded)
        elif what == "frozen":
            model.scale.requires_grad_(False)
            for step in range(1, 5):
                run_step(ctx, rounds, trained, step)
        elif what == "one less":
            torch.optim.SGD([model.scale], lr=0.1).step()
            for step in range(1, 5):
                run_step(ctx, rounds, trained, step)
    except MiCSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("gradients", "LifecycleError: `finish_delayed()` was called between a backward and its optimizer step"),
        ("frozen", "`scale` was frozen after `shard()`"),
        ("one less", "1 optimizers stepped behind one backward, and 2 before"),
    ],
)
def test_a_streaming_loop_is_refused_on_every_rank(ranks: RankPool, what: str, words: str) -> None:
    assert [message for message in ranks(4, refused_in_flight, what) if words not in message] == []


def test_the_end_of_a_training_is_behind_the_same_step(ranks: RankPool) -> None:
    """The islands step alone until their first fragment is due."""
    found = ranks(4, finish_apart)
    assert all("was called 1 steps into a round on rank 0, and after other numbers on other ranks" in m for m in found)


def finish_apart(ctx: RankContext) -> str:
    rounds = Rounds(every=5, steps=3, delay=1)
    trained = _, sharded, _ = start(config_of("mics", rounds, 2), rounds)
    for step in range(1 + ctx.rank // 2):
        run_step(ctx, rounds, trained, step)
    try:
        finish_delayed(sharded)
    except MiCSError as error:
        return str(error)
    return ""


def loads_between(ctx: RankContext) -> list[float]:
    """The scale after an outer step of rate 1 on parameters that were loaded before it, and by how much it moved."""
    rounds = Rounds(every=2, steps=4, lr=1.0, momentum=0.0)
    trained = model, _, _ = start(config_of("ddp", rounds, 2), rounds)
    run_step(ctx, rounds, trained, 0)
    model.load_state_dict({name: torch.full_like(value, 5.0) for name, value in Net().state_dict().items()})
    found = []
    for step in range(2):
        loss_of(model, batch(step, 0, ctx.rank), 1).backward()
        trained[2].step()
        trained[2].zero_grad()
        found.append(model.scale.full_tensor().item())
    return found


def test_a_loaded_state_dict_begins_a_round(ranks: RankPool) -> None:
    found = ranks(4, loads_between)
    assert len({second for _, second in found}) == 1
    assert all(4.9 < value < 5.1 for values in found for value in values)
