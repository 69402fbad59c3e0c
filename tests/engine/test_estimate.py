"""Estimated memory of a job equals the memory that its ranks allocate."""

from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import Codec, ConfigError, ShardConfig, Topology, shard
from mics_strategy.estimate import MemoryEstimate, estimate_memory
from tests import models
from tests.ranks import RankContext, RankPool, simulate

CONFIGS = [
    ShardConfig.preset("mics", partition_size=2),
    ShardConfig.preset("zero3", param_dtype="bfloat16"),
    ShardConfig.preset("zeropp-hpz"),
    ShardConfig.preset("zero1", reduce_dtype="bfloat16"),
    ShardConfig.preset("paro-nig", prefetch=2),
    ShardConfig.preset("ddp"),
]


def allocated(ctx: RankContext, config: ShardConfig) -> tuple[dict[str, int], int]:
    """What a real job of two nodes of two ranks holds, and the bytes of Adam's states."""
    case = models.transformer()
    model = case.build()
    sharded = shard(model, config.replace(topology=Topology(ranks_per_node=2)), units=case.units)
    optimizer = torch.optim.AdamW(model.parameters())
    case.loss(model, case.batch(0, 0, ctx.rank)).backward()
    optimizer.step()
    states = [
        value.to_local() for state in optimizer.state.values() for value in (state["exp_avg"], state["exp_avg_sq"])
    ]
    return sharded.memory.bytes_by_purpose, sum(each.numel() * each.itemsize for each in states)


STAGING = ("workspaces", "all-gather staging buffers", "gradient staging buffers")


def estimated(config: ShardConfig) -> MemoryEstimate:
    case = models.transformer()
    with torch.device("meta"):
        model = type(case.build())()
    return estimate_memory(model, config, num_nodes=2, ranks_per_node=2, units=case.units)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.params}-{config.grads}-{config.optimizer}")
def test_estimated_memory_equals_allocated_memory(ranks: RankPool, config: ShardConfig) -> None:
    """All purposes except those in which gloo differs from a GPU.

    Messages need other workspaces than a GPU's collectives. Threads
    of gloo need a flat buffer for each first hop in flight, where a stream needs one for all.
    """
    expected = estimated(config)
    by_purpose = expected.bytes_by_purpose
    for found, bytes_of_states in ranks(4, allocated, config, ranks_per_node=2):
        own, other = ({k: v for k, v in each.items() if v and k not in STAGING} for each in (found, by_purpose))
        assert own == other
        streams_bytes = by_purpose.get("all-gather staging buffers", 0)
        assert found.get("all-gather staging buffers", 0) <= config.prefetch * streams_bytes
        assert found.get("gradient staging buffers", 0) >= by_purpose.get("gradient staging buffers", 0)
        assert bytes_of_states <= 8 * expected.num_trained <= 1.3 * bytes_of_states  # odd rows are padded


@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda config: f"{config.params}-{config.grads}")
def test_estimated_buffers_equal_those_of_a_backend_with_streams(config: ShardConfig) -> None:
    """All purposes but workspaces: on the CPU sums are not the backend's own."""
    expected = {k: v for k, v in estimated(config).bytes_by_purpose.items() if v and k != "workspaces"}
    for found, _ in simulate(4, allocated, config, ranks_per_node=2):
        assert {k: v for k, v in found.items() if v and k != "workspaces"} == expected


@pytest.mark.parametrize("links", ["slow", "all"])
def test_estimated_residuals_equal_allocated_ones(ranks: RankPool, links: str) -> None:
    feedback, differences = Codec(bits=4, feedback=True), Codec(bits=4, differences=True)
    config = ShardConfig.preset("paro-iig", grad_codec=feedback, weight_codec=differences, codec_links=links)
    expected = estimated(config).bytes_by_purpose
    assert expected["error feedback"] > 0
    for found, _ in ranks(4, allocated, config, ranks_per_node=2):
        assert {k: v for k, v in found.items() if v and k not in STAGING} == {
            k: v for k, v in expected.items() if v and k not in STAGING
        }


def test_a_model_of_many_ranks_needs_little_time_and_no_memory() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(32)))
    found = estimate_memory(model, ShardConfig.preset("mics"), num_nodes=64, ranks_per_node=8)
    assert found.bytes_by_purpose["master shards"] >= 32 * 4096 * 4096 * 4 // 8
    assert found.total_bytes() - found.total_bytes(0) == 8 * found.num_trained
    assert found.scopes.world_size == 512


def test_impossible_estimates_are_refused() -> None:
    with pytest.raises(ConfigError, match="without values"):
        estimate_memory(nn.Linear(2, 2), ShardConfig.preset("mics"), num_nodes=1, ranks_per_node=2)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Give a preset"):
        estimate_memory(model, ShardConfig.preset("auto"), num_nodes=1, ranks_per_node=2)
