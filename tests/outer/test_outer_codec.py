"""Outer steps that send quantized differences, and outer steps of a backend with streams."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import Codec, ConfigError, ShardConfig, Sharded, shard
from tests.engine.training import distance, wholes
from tests.outer.plain import Net, Rounds, batch, loss_of, optimizers_of, train_islands
from tests.outer.test_outer_steps import LAYOUTS, check, config_of, train
from tests.ranks import RankContext, RankPool, simulate

ROUNDS = Rounds(every=2, steps=4, optimizer="sgd", lr=1.0, momentum=0.0)
BOUND = {"int8": 0.02, "int4": 0.3}  # of the norm; a uniform error of half a step in the worst place
Found = list[tuple[dict[str, Tensor], list[Any]]]


def train_in_fp32(ctx: RankContext, config: ShardConfig, handles: list[Sharded] | None = None) -> Found:
    """Parameters after each step, those of the beginning first, and the step's traffic; also the handle if asked."""
    model = Net().float()
    sharded = shard(model, config, units=[nn.Linear])
    if handles is not None:
        handles.append(sharded)
    (optimizer,) = optimizers_of(ROUNDS.optimizer, model)
    found: Found = [(wholes(dict(model.named_parameters())), [])]
    for step in range(ROUNDS.steps):
        loss_of(model, batch(step, 0, ctx.rank).float(), 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((wholes(dict(model.named_parameters())), [*sharded.traffic()]))
    return found


def sent_between(found: Found) -> int:
    return sum(row.sent_bytes for _, rows in found for row in rows if row.axis == "inter_node")


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mics", "ddp"])
def test_islands_average_what_is_decoded(ranks: RankPool, name: str, codec: str) -> None:
    exact = ranks(4, train_in_fp32, config_of(name, ROUNDS, 2))
    found = ranks(4, train_in_fp32, config_of(name, ROUNDS, 2, outer_codec=Codec(bits=int(codec[3:]), block_size=32)))
    start, first = found[0][0][0], found[0][ROUNDS.every][0]
    expected = {key: value - start[key] for key, value in exact[0][ROUNDS.every][0].items() if key != "frozen"}
    changed = {key: first[key] - start[key] for key in expected}
    assert 1e-5 < distance(changed, expected) < BOUND[codec]
    for rank_found, rank_exact in zip(found, exact, strict=True):
        for step, (values, rows) in enumerate(rank_found):
            assert all(
                (row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows if step > 1
            )
            if step % ROUNDS.every == 0:  # the same bits on all islands
                assert all(torch.equal(value, found[0][step][0][key]) for key, value in values.items())
        assert 0 < sent_between(rank_found) < sent_between(rank_exact)  # blocks pad so small a model


def send_wide(ctx: RankContext, config: ShardConfig) -> int:
    """Bytes between islands in one outer step of two large matrices."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    sharded = shard(model, config, units=[nn.Linear])
    model(torch.ones(1, 128)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return sum(row.sent_bytes for row in sharded.traffic() if row.axis == "inter_node")


def test_four_bits_are_an_eighth_of_the_bytes(ranks: RankPool) -> None:
    rounds = Rounds(every=1, steps=1)
    exact, int8, int4 = (
        ranks(4, send_wide, config_of("mics", rounds, 2, outer_codec=codec))[0] for codec in ("none", "int8", "int4")
    )
    assert exact == 2 * 128 * 128 * 4 // 2  # a rank's half of the parameters, once to the other of two islands
    assert 0.25 < int8 / exact < 0.26
    assert 0.125 < int4 / exact < 0.135


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("name", ["mics", "ddp"])
def test_a_stream_takes_outer_steps_as_threads_do(ranks: RankPool, name: str, codec: str) -> None:
    config = config_of(name, ROUNDS, 2, outer_codec=codec)
    by_threads = ranks(4, train_in_fp32, config)
    for found, expected in zip(simulate(4, train_in_fp32, config, ranks_per_node=2), by_threads, strict=True):
        for (values, rows), (other_values, other_rows) in zip(found, expected, strict=True):
            assert [(row.axis, row.sent_bytes) for row in rows] == [(row.axis, row.sent_bytes) for row in other_rows]
            for key, value in values.items():
                torch.testing.assert_close(value, other_values[key], rtol=0, atol=1e-6)


def test_outer_steps_on_a_stream_are_those_of_plain_torch() -> None:
    rounds, islands = Rounds(every=3, steps=6), LAYOUTS["2x2"]
    found = simulate(4, train, config_of("mics", rounds, 2), rounds, ranks_per_node=2)
    check(found, train_islands(rounds, islands), islands)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outer_codec": "int8"}, "Set `outer_every`, or remove `outer_codec`"),
        ({"outer_codec": Codec(bits=4, feedback=True), "outer_every": 2}, "with nothing to keep what they lose"),
        ({"outer_codec": Codec(bits=8, differences=True), "outer_every": 2}, "differences=False"),
        (
            {
                "outer_codec": Codec(bits=8, block_size=96),
                "grad_codec": Codec(bits=8, block_size=4096),
                "outer_every": 2,
            },
            "`grad_codec` of 4096, `outer_codec` of 96 values",
        ),
    ],
)
def test_a_codec_of_outer_steps_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardConfig.preset("mics", **fields)
