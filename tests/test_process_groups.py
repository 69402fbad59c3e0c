"""Do process groups have what the user gave for the default group, and what their role requires?"""

from datetime import timedelta

import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.transport import timeout_of
from tests.cuda_harness.runs import config_of, one_of_many, start
from tests.ranks import RankContext, RankPool, simulate


def timeouts_of_all_groups(ctx: RankContext) -> set[float]:
    timeout = timedelta(seconds=23)
    dist.init_process_group("gloo", rank=ctx.rank, world_size=ctx.world_size, timeout=timeout)
    sharded = shard(nn.Linear(4, 4), ShardConfig.preset("mics", topology=Topology(ranks_per_node=ctx.ranks_per_node)))
    ours = sharded._groups
    groups = [
        transport.group for transport in ours.resources._transports
    ] + ours.trainable_placement.device_mesh.get_all_groups()
    assert len(groups) > 5
    found = {timeout_of(group, "cpu").total_seconds() for group in groups}
    del sharded, ours, groups
    dist.destroy_process_group()
    return found


def test_every_group_has_the_timeout_that_the_user_gave(ranks: RankPool) -> None:
    assert ranks(4, timeouts_of_all_groups, ranks_per_node=2, default_group=False) == [{23.0}] * 4


def groups_after_each_model(ctx: RankContext) -> list[int]:
    config = ShardConfig.preset("mics", topology=Topology(ranks_per_node=ctx.ranks_per_node))
    return [shard(nn.Linear(4, 4), config)._groups.resources.num_groups for _ in range(3)]


def test_models_share_groups(ranks: RankPool) -> None:
    """All of them elsewhere than on gloo; there each model all-reduces in a group of its own."""
    # Default, control, gathers, first hops, second hops, shards, replicas.
    assert simulate(4, groups_after_each_model, ranks_per_node=2) == [[7, 7, 7]] * 4
    # One node: no second hops, no replicas; messages to all ranks are those to all shards.
    assert simulate(4, groups_after_each_model, ranks_per_node=4) == [[4, 4, 4]] * 4
    assert ranks(4, groups_after_each_model, ranks_per_node=2) == [[7, 8, 9]] * 4


def test_every_group_of_nccl_is_used_when_a_model_is_sharded() -> None:
    with one_of_many(8) as machine:
        start(machine, config_of("mics", ranks_per_node=4))
        used = [name for kind, _, name in machine.log if kind == "collective" and name.startswith("mics.")]
    roles = ["control", "param_all_gather", "grad_reduce_scatter", "second_hop_all_reduce", "shard", "replicate"]
    assert [name.split(".")[1] for name in used[-len(roles) :]] == roles
