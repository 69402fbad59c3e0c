"""Where ranks sit is read from every launcher's environment; uneven and cyclic placements are refused everywhere."""

import os

import pytest

from mics_strategy import ConfigError, ShardConfig, Topology
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.setup.resolve import node_name, resolve_topology
from mics_strategy.scopes import resolve_scopes
from tests.ranks import RankContext, RankPool, raises_on_every_rank

LAUNCHERS = {"torchrun": "GROUP_RANK", "slurm": "SLURM_NODEID", "lightning": "NODE_RANK"}
TORCHRUN = ("GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


def ranks_per_node(ctx: RankContext, variable: str, nodes: list[int]) -> int:
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.environ[variable] = str(nodes[ctx.rank])
    return resolve_topology(ShardConfig(), gather_objects(node_name())).ranks_per_node


@pytest.mark.parametrize("variable", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize(("nodes", "expected"), [([0, 0, 0, 0], 4), ([0, 0, 1, 1], 2), ([0, 1, 2, 3], 1)])
def test_nodes_come_from_the_launcher(ranks: RankPool, variable: str, nodes: list[int], expected: int) -> None:
    assert ranks(4, ranks_per_node, variable, nodes) == [expected] * 4


def without_a_launcher(ctx: RankContext) -> int:
    for name in (*TORCHRUN, *LAUNCHERS.values()):
        os.environ.pop(name, None)
    return resolve_topology(ShardConfig(), gather_objects(node_name())).ranks_per_node


def test_without_a_launcher_the_ranks_of_a_host_are_a_node(ranks: RankPool) -> None:
    assert ranks(3, without_a_launcher) == [3] * 3


@pytest.mark.parametrize("variable", LAUNCHERS.values(), ids=LAUNCHERS)
def test_uneven_nodes_are_refused(ranks: RankPool, variable: str) -> None:
    message = "different numbers of ranks.*Start the same number"
    raises_on_every_rank(lambda: ranks(3, ranks_per_node, variable, [0, 0, 1]), ConfigError, message)


@pytest.mark.parametrize("variable", LAUNCHERS.values(), ids=LAUNCHERS)
def test_cyclic_placement_is_refused(ranks: RankPool, variable: str) -> None:
    message = "must be consecutive.*distribution=block"
    raises_on_every_rank(lambda: ranks(4, ranks_per_node, variable, [0, 1, 0, 1]), ConfigError, message)


def scope_of_params(ctx: RankContext, config: ShardConfig) -> int:
    return resolve_scopes(config, resolve_topology(config, gather_objects(node_name())), ctx.world_size).params


@pytest.mark.parametrize(("partition_size", "expected"), [("auto", 2), ("node", 2), ("world", 4), (1, 1), (4, 4)])
def test_the_word_partition_means_what_was_configured(ranks: RankPool, partition_size: object, expected: int) -> None:
    config = ShardConfig(partition_size=partition_size)
    assert ranks(4, scope_of_params, config, ranks_per_node=2) == [expected] * 4


def test_an_explicit_topology_outranks_the_environment(ranks: RankPool) -> None:
    config = ShardConfig(topology=Topology(ranks_per_node=4))
    assert ranks(4, scope_of_params, config, ranks_per_node=2) == [4] * 4
