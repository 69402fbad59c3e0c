"""Do process groups have what the user gave for the default group, and what their role requires?"""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.scratch import comm_layout
from mics_strategy.comm.transport import timeout_of
from mics_strategy.scopes import resolve_scopes
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
    # Default, which is that of control messages; gathers, first hops, second hops, shards, replicas.
    assert simulate(4, groups_after_each_model, ranks_per_node=2) == [[6, 6, 6]] * 4
    # One node: no second hops, no replicas; shards are in the default group.
    assert simulate(4, groups_after_each_model, ranks_per_node=4) == [[3, 3, 3]] * 4
    # Control messages have a group as well.
    assert ranks(4, groups_after_each_model, ranks_per_node=2) == [[7, 8, 9]] * 4


def test_every_group_of_nccl_is_used_when_a_model_is_sharded() -> None:
    with one_of_many(8) as machine:
        start(machine, config_of("mics", ranks_per_node=4))
        used = [name.split()[0] for kind, _, name in machine.log if kind == "collective"]
    roles = ["param_all_gather", "grad_reduce_scatter", "second_hop_all_reduce", "shard", "replicate"]
    assert used[-1 - len(roles)] == "default_pg"
    assert [name.split(".")[1] for name in used[-len(roles) :]] == roles


def groups_of(world_size: int, per_node: int, device: str, preset: str = "mics") -> ProcessGroups:
    topology = Topology(ranks_per_node=per_node)
    scopes = resolve_scopes(ShardConfig.preset(preset, topology=topology), topology, world_size)
    return ProcessGroups(scopes, CommResources(world_size, device), seed=0)


def count_groups(ctx: RankContext, per_node: int) -> list[tuple[str, int, int]]:
    """Number of communicators of each preset on 16 ranks: as the planner counts them, and as there are."""
    counts = []
    for preset in ShardConfig.PRESETS:
        dist.init_process_group("fake", rank=0, world_size=16)
        groups = groups_of(16, per_node, "cuda", preset)
        counts.append((preset, comm_layout(groups.scopes).num_communicators, groups.resources.num_groups))
        del groups
        dist.destroy_process_group()
    return counts


@pytest.mark.parametrize(("per_node", "largest"), [(16, 3), (8, 6), (1, 3)])
def test_the_planner_counts_the_groups_that_are_made(ranks: RankPool, per_node: int, largest: int) -> None:
    (counts,) = ranks(1, count_groups, per_node, default_group=False)
    assert [made for _, _, made in counts] == [planned for _, planned, _ in counts]
    assert max(made for _, _, made in counts) == largest


def gather_in_mesh(ctx: RankContext) -> tuple[list[bool], list[list[int]]]:
    """Whether each group for values on a GPU has gloo; and values on the CPU, gathered along the mesh."""
    dist.init_process_group("cpu:gloo,cuda:fake", rank=ctx.rank, world_size=ctx.world_size)
    groups = groups_of(ctx.world_size, ctx.ranks_per_node, "cuda")
    comms = (groups.param_comm, groups.grad_comm, groups.replica_comm)
    streamed = [transport.group for comm in comms if comm is not None for transport in comm.transports]
    gathered = []
    for group in groups.trainable_placement.device_mesh.get_all_groups():
        values = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(values, torch.tensor([ctx.rank]), group)
        gathered.append([int(value) for value in values])
    connected = ["gloo" in dist.get_backend_config(group) for group in streamed]
    dist.destroy_process_group()
    return connected, gathered


def test_groups_of_a_gpu_do_not_connect_cpus_except_those_of_the_mesh(ranks: RankPool) -> None:
    """A DTensor that a user has moved to the CPU can be gathered."""
    results = ranks(4, gather_in_mesh, ranks_per_node=2, default_group=False)
    assert results == [
        ([False] * 3, [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]) for rank in range(4)
    ]


def groups_made(ctx: RankContext, only_members: bool, rank: int) -> tuple[int, set[tuple[int, ...]]]:
    """Number of groups that one rank of 512 makes, and the ranks of those that it is in."""
    dist.init_process_group("fake", rank=rank, world_size=512)
    with (
        mock.patch("mics_strategy.comm.resources._ONLY_MEMBERS_MAKE_GROUPS", only_members),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        groups_of(512, 8, "cuda")
    members = {tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map}
    dist.destroy_process_group()
    return made.call_count, members


@pytest.mark.parametrize(("only_members", "count"), [(True, 5), (False, 3 * 64 + 2 * 8)])
def test_a_rank_makes_its_own_groups_alone(ranks: RankPool, only_members: bool, count: int) -> None:
    ((made, members),) = ranks(1, groups_made, only_members, 19, default_group=False)
    assert made == count
    assert members == {tuple(range(512)), tuple(range(16, 24)), tuple(range(3, 512, 8))}


def weights_after_a_step(ctx: RankContext, only_members: bool) -> list[list[list[float]]]:
    weights = []
    with mock.patch("mics_strategy.comm.resources._ONLY_MEMBERS_MAKE_GROUPS", only_members):
        for preset in ("zero3", "mics"):  # all ranks by local rank, 0 2 1 3; and by node
            torch.manual_seed(0)
            model = nn.Linear(8, 4)
            config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=ctx.ranks_per_node))
            shard(model, config)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.full((2, 8), float(ctx.rank))).square().sum().backward()
            optimizer.step()
            weights.append(model.weight.full_tensor().tolist())
    return weights


def test_groups_that_only_members_make_train_as_those_that_all_ranks_make(ranks: RankPool) -> None:
    only_members, all_ranks = (ranks(4, weights_after_a_step, only, ranks_per_node=2) for only in (True, False))
    assert only_members == all_ranks


def close_groups(ctx: RankContext) -> list[str]:
    dist.init_process_group("fake", rank=0, world_size=8)
    groups_of(8, 4, "cpu").resources.close()
    left = [group.group_desc for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    return left


def test_the_default_group_outlives_the_models_that_share_it(ranks: RankPool) -> None:
    ((first, *others),) = ranks(1, close_groups, default_group=False)
    assert first == "default_pg"
    assert len(others) == 1  # of the replicas, which only DTensors use
