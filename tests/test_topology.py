"""Do scopes hold the ranks that they should, in the order that makes every stage contiguous?"""

import re
from itertools import combinations

import pytest

from mics_strategy import ShardConfig, Topology
from mics_strategy.errors import ConfigError
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import (
    LINKS,
    Axis,
    RankLocation,
    Span,
    Switches,
    topology_from_locations,
    topology_of,
)

WORLDS = [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (12, 6), (12, 4), (16, 4), (24, 8), (32, 8), (64, 8)]
worlds = pytest.mark.parametrize(("world", "per_node"), WORLDS, ids=[f"{w}-by-{n}" for w, n in WORLDS])


def _degrees(world: int, per_node: int) -> list[int]:
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return [d for d in divisors if per_node % d == 0 or d % per_node == 0]


def _scopes(params: int, grads: int, optimizer: int, world: int, per_node: int) -> Scopes:
    config = ShardConfig(params=params, grads=grads, optimizer=optimizer)
    return resolve_scopes(config, Topology(ranks_per_node=per_node), world)


def _chains(world: int, per_node: int) -> list[Scopes]:
    """Every pair of nesting degrees of a world."""
    degrees = _degrees(world, per_node)
    pairs = [(a, b) for a in degrees for b in degrees if b % a == 0]
    return [_scopes(a, a, b, world, per_node) for a, b in pairs]


@worlds
def test_axes_multiply_to_the_world(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        assert scopes.span(1, world).size == world


@worlds
def test_no_axis_straddles_nodes(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        for axis in scopes.axes:
            inside = axis.stride * axis.size <= per_node
            assert inside or axis.stride % per_node == 0
            assert axis.name.startswith("intra_node" if inside else "inter_node")


@worlds
def test_every_rank_is_in_one_group_of_a_span(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        for inner, outer in [(1, scopes.params), (scopes.params, scopes.optimizer), (scopes.optimizer, world)]:
            groups = scopes.span(inner, outer).groups(world)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            assert {len(group) for group in groups} == {outer // inner}


@worlds
def test_members_stand_in_the_order_of_their_index(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        span = scopes.span(1, scopes.optimizer)
        for rank in range(world):
            members = span.group_ranks(rank)
            assert [span.index(member) for member in members] == list(range(len(members)))
            assert members[span.index(rank)] == rank


@worlds
def test_scope_is_consecutive_ranks(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        for rank in range(world):
            first = rank - rank % scopes.optimizer
            assert sorted(scopes.span(1, scopes.optimizer).group_ranks(rank)) == [
                *range(first, first + scopes.optimizer)
            ]


@worlds
def test_shard_of_the_larger_scope_is_a_contiguous_piece_of_the_smaller_ones(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        small, large = scopes.span(1, scopes.params), scopes.span(1, scopes.optimizer)
        between = scopes.span(scopes.params, scopes.optimizer)
        for rank in range(world):
            assert large.index(rank) == small.index(rank) * between.size + between.index(rank)


@worlds
def test_gather_over_the_difference_concatenates_in_order(world: int, per_node: int) -> None:
    for scopes in _chains(world, per_node):
        large, between = scopes.span(1, scopes.optimizer), scopes.span(scopes.params, scopes.optimizer)
        for rank in range(world):
            pieces = [large.index(member) for member in between.group_ranks(rank)]
            assert pieces == list(range(pieces[0], pieces[0] + between.size))


def test_index_is_local_rank_major() -> None:
    span = _scopes(8, 8, 8, 8, 4).span(1, 8)
    assert span.group_ranks(0) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert span.name == "intra_node+inter_node"


def test_span_by_hand() -> None:
    span = Span(axes=(Axis(name="a", size=2, stride=1), Axis(name="b", size=3, stride=4)))
    assert span.group_ranks(5) == [0, 4, 8, 1, 5, 9]
    assert span.index(9) == 5


def test_three_scopes_cut_named_axes() -> None:
    scopes = _scopes(2, 8, 16, 32, 8)
    assert [(axis.name, axis.size, axis.stride) for axis in scopes.axes] == [
        ("intra_node.0", 2, 1),
        ("intra_node.1", 4, 2),
        ("inter_node.0", 2, 8),
        ("inter_node.1", 2, 16),
    ]


def test_depth_of_a_scope_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="No scope of 3 ranks"):
        _scopes(2, 2, 4, 8, 4).depth(3)


@worlds
def test_words_mean_numbers_of_ranks(world: int, per_node: int) -> None:
    words = {"node": per_node, "auto": per_node, "world": world}
    for word, size in words.items():
        scopes = resolve_scopes(ShardConfig(partition_size=word), Topology(ranks_per_node=per_node), world)
        assert (scopes.params, scopes.grads, scopes.optimizer) == (size, size, size)


@pytest.mark.parametrize(
    ("options", "world", "per_node", "message"),
    [
        ({"partition_size": 3}, 8, 4, "`partition_size=3` does not divide the 8 ranks"),
        ({"partition_size": 16}, 8, 4, "`partition_size=16` does not divide"),
        ({"partition_size": 3}, 12, 4, "`partition_size=3` straddles nodes of 4 ranks"),
        ({"partition_size": 6}, 12, 4, "`partition_size=6` straddles"),
        ({"params": 6, "grads": 6, "optimizer": 12}, 12, 4, "`params=6` straddles"),
        ({"params": 2, "grads": 3, "optimizer": 6}, 6, 6, "2 and 3 ranks do not nest"),
        ({"params": 8, "grads": 8, "optimizer": 12}, 24, 4, "8 and 12 ranks do not nest"),
        ({"params": "world"}, 8, 4, "`optimizer` is sharded over 4 ranks, coarser than `params` over 8"),
        ({"grads": "world"}, 8, 4, "coarser than `grads`"),
        ({"optimizer": "none"}, 8, 4, "coarser than `params`"),
        ({"secondary_params": 3}, 8, 4, "`secondary_params=3` does not divide"),
        ({"secondary_params": "world"}, 8, 4, "`secondary_params` is sharded over 8 ranks, more than `params` over 4"),
        ({"params": "none", "secondary_params": 2}, 8, 4, "more than `params` over 1"),
        ({"params": 6, "grads": 6, "optimizer": 6, "secondary_params": 4}, 12, 12, "4 and 6 ranks do not nest"),
        ({}, 6, 4, "`ranks_per_node=4` does not divide the 6 ranks"),
    ],
)
def test_scope_that_does_not_fit_is_refused(options: dict, world: int, per_node: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_scopes(ShardConfig(**options), Topology(ranks_per_node=per_node), world)


@worlds
def test_every_nesting_chain_is_accepted(world: int, per_node: int) -> None:
    for a, b in combinations(_degrees(world, per_node), 2):
        nests = b % a == 0
        degrees = _degrees(world, per_node)
        assert a in degrees
        if nests:
            assert _scopes(a, a, b, world, per_node).optimizer == b
        else:
            with pytest.raises(ConfigError, match="do not nest"):
                _scopes(a, a, b, world, per_node)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", None])
def test_topology_refuses_what_is_not_a_number_of_ranks(value: object) -> None:
    with pytest.raises(ConfigError, match="ranks_per_node"):
        Topology(ranks_per_node=value)


def _places(nodes: str) -> list[RankLocation]:
    return [RankLocation(node=node) for node in nodes]


@pytest.mark.parametrize(("nodes", "size"), [("a", 1), ("aabb", 2), ("bbaa", 2), ("abcd", 1), ("aaaa", 4)])
def test_places_make_a_topology(nodes: str, size: int) -> None:
    assert topology_from_locations(_places(nodes)) == Topology(ranks_per_node=size)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("aab", "different numbers of ranks (a: 2, b: 1)"),
        ("abb", "different numbers of ranks"),
        ("abab", "must be consecutive"),
        ("abba", "must be consecutive"),
        ("aabbcbcc", "different numbers"),
        ("aabbcdcd", "must be consecutive"),
    ],
)
def test_uneven_or_cyclic_placement_is_refused(nodes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        topology_from_locations(_places(nodes))


SWITCHES = [(12, 2, 3), (8, 2, 2), (48, 4, 3), (24, 4, 2), (6, 2, 3), (6, 2, 1), (6, 1, 3), (64, 8, 4)]
switches = pytest.mark.parametrize(("world", "per_node", "nodes"), SWITCHES, ids=str)


def _switch_scopes(world: int, per_node: int, nodes: int) -> list[Scopes]:
    """Every pair of nesting degrees that straddle neither nodes nor switches."""
    per_switch, topology = per_node * nodes, Topology(ranks_per_node=per_node, nodes_per_switch=nodes)
    degrees = [d for d in _degrees(world, per_node) if per_switch % d == 0 or d % per_switch == 0]
    pairs = [(a, b) for a in degrees for b in degrees if b % a == 0]
    return [resolve_scopes(ShardConfig(params=a, grads=a, optimizer=b), topology, world) for a, b in pairs]


@switches
def test_no_axis_mixes_links_and_links_slow_down(world: int, per_node: int, nodes: int) -> None:
    for scopes in _switch_scopes(world, per_node, nodes):
        for axis in scopes.axes:
            end = axis.stride * axis.size
            if axis.link == "intra_node":
                assert end <= per_node
            elif axis.link == "inter_node":
                assert axis.stride >= per_node
                assert end <= per_node * nodes
            else:
                assert axis.stride >= per_node * nodes
        assert [axis.link for axis in scopes.axes] == sorted((axis.link for axis in scopes.axes), key=LINKS.index)
        assert scopes.span(1, world).size == world


@switches
def test_a_span_splits_into_one_part_for_each_link(world: int, per_node: int, nodes: int) -> None:
    for scopes in _switch_scopes(world, per_node, nodes):
        span = scopes.span(1, world)
        parts = span.split_by_link()
        assert tuple(axis for part in parts for axis in part.axes) == span.axes
        assert [{axis.link for axis in part.axes} for part in parts] == [
            {link} for link in LINKS if any(axis.link == link for axis in span.axes)
        ]
        for rank in range(world):
            for part in parts:
                members = part.group_ranks(rank)
                link = part.axes[0].link
                assert (len({member // per_node for member in members}) == 1) == (link == "intra_node")
                is_under_one = len({member // (per_node * nodes) for member in members}) == 1
                assert is_under_one == (link != "inter_switch")


@switches
def test_shards_stay_contiguous_over_switches(world: int, per_node: int, nodes: int) -> None:
    for scopes in _switch_scopes(world, per_node, nodes):
        small, large = scopes.span(1, scopes.params), scopes.span(1, scopes.optimizer)
        between = scopes.span(scopes.params, scopes.optimizer)
        for rank in range(world):
            assert large.index(rank) == small.index(rank) * between.size + between.index(rank)


def test_switches_name_axes() -> None:
    config = ShardConfig(params=2, grads=8, optimizer=48)
    scopes = resolve_scopes(config, Topology(ranks_per_node=4, nodes_per_switch=6), 48)
    assert [(axis.name, axis.size, axis.stride) for axis in scopes.axes] == [
        ("intra_node.0", 2, 1),
        ("intra_node.1", 2, 2),
        ("inter_node.0", 2, 4),
        ("inter_node.1", 3, 8),
        ("inter_switch", 2, 24),
    ]
    assert scopes.span(1, 48).group_ranks(0)[:8] == [0, 24, 8, 32, 16, 40, 4, 28]


@pytest.mark.parametrize(
    ("nodes_per_switch", "links"),
    [
        (0, ["intra_node", "inter_node"]),
        (1, ["intra_node", "inter_switch"]),
        (2, ["intra_node", "inter_node", "inter_switch"]),
        (4, ["intra_node", "inter_node"]),
        (16, ["intra_node", "inter_node"]),
    ],
)
def test_one_node_under_each_switch_and_one_switch_over_all_are_two_levels(
    nodes_per_switch: int, links: list[str]
) -> None:
    topology = Topology(ranks_per_node=2, nodes_per_switch=nodes_per_switch)
    assert [axis.name for axis in resolve_scopes(ShardConfig(), topology, 8).axes] == links


@pytest.mark.parametrize(
    ("options", "world", "nodes", "message"),
    [
        ({"partition_size": 4}, 12, 3, "`partition_size=4` straddles switches of 3 nodes, 6 ranks. Use 1, 2, 6, 12."),
        ({"partition_size": 3}, 12, 3, "`partition_size=3` straddles nodes of 2 ranks"),
        ({"params": 4, "grads": 2, "optimizer": 12}, 12, 3, "`params=4` straddles switches"),
        ({}, 10, 2, "`nodes_per_switch=2` does not divide the 5 nodes of this job"),
        ({}, 6, 2, "and use 1, 3; or 0, which counts all links between nodes as equal."),
    ],
)
def test_scopes_and_jobs_that_straddle_switches_are_refused(
    options: dict, world: int, nodes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_scopes(ShardConfig(**options), Topology(ranks_per_node=2, nodes_per_switch=nodes), world)


@pytest.mark.parametrize("value", [-1, True, 2.0, "4", None])
def test_topology_refuses_what_is_not_a_number_of_nodes(value: object) -> None:
    for make in (lambda: Topology(ranks_per_node=2, nodes_per_switch=value), lambda: Switches(nodes_per_switch=value)):
        with pytest.raises(ConfigError, match="nodes_per_switch"):
            make()


def test_a_mapping_is_a_topology_or_switches_over_nodes_to_be_found() -> None:
    assert topology_of({"ranks_per_node": 8}) == Topology(ranks_per_node=8)
    assert topology_of({"ranks_per_node": 8, "nodes_per_switch": 4}) == Topology(ranks_per_node=8, nodes_per_switch=4)
    assert topology_of({"nodes_per_switch": 4}) == Switches(nodes_per_switch=4)
    for fields in ({}, {"ranks": 8}, {"nodes_per_switch": 4, "rails": 8}):
        with pytest.raises(ConfigError, match=r"has unknown keys, or none\. Use ranks_per_node and nodes_per_switch"):
            topology_of(fields)


def test_thresholds_are_measured_wherever_several_links_are_crossed() -> None:
    topology = Topology(ranks_per_node=2, nodes_per_switch=2)
    scopes = resolve_scopes(ShardConfig.preset("paro-iig"), topology, 8)
    spans = {(collective, span.name) for collective, span in scopes.untuned()}
    assert spans == {("all_gather", "inter_node+inter_switch"), ("reduce_scatter", "inter_node+inter_switch")}
