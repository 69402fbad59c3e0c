"""Leaf switches as a third level, and three nodes: does training stay plain, and does each link carry its bytes?

Simulated: two switches of three nodes of two ranks. Real: two switches of two nodes of two ranks, and three nodes of
two ranks.
"""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mics_strategy import Codec, ConfigError, ShardConfig, Topology, load_checkpoint, save_checkpoint
from mics_strategy.comm.route import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.plan import BucketPlan, StepOrder, UnitPlan, plan_step
from mics_strategy.engine.setup.resolve import resolve_topology
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import LINKS, Switches
from tests import models
from tests.checkpoint.test_matrix import state_of
from tests.engine.chains import chains
from tests.engine.counting import CountC10d, planned_kinds
from tests.engine.test_coalesce import counted, even
from tests.engine.training import (
    Outcome,
    Run,
    Training,
    assert_identical,
    assert_same,
    distance,
    plain,
    start,
    train,
    train_without_reading,
)
from tests.ranks import RankContext, RankPool, raises_on_every_rank, simulate

SIMULATED = Topology(ranks_per_node=2, nodes_per_switch=3)  # 12 ranks
REAL = Topology(ranks_per_node=2, nodes_per_switch=2)  # 8 ranks
THREE_NODES = Topology(ranks_per_node=2)  # 6 ranks
PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "paro-iig", "paro-igg", "paro-nii", "zeropp-hpz")
INT8 = Codec(bits=8, block_size=32)


def configs_under(topology: Topology, per_switch: int) -> list[ShardConfig]:
    """Every preset, with partitions of a node, of a switch; and other ways to send."""
    chosen = [ShardConfig.preset(preset, topology=topology) for preset in PRESETS]
    for preset in ("mics", "paro-iig", "zeropp-hpz"):
        chosen.append(ShardConfig.preset(preset, topology=topology, partition_size=per_switch))
    chosen.append(ShardConfig(params=2, grads=per_switch, optimizer="world", topology=topology))
    for hierarchical in (False, 1 << 40, True):
        chosen.append(ShardConfig.preset("zero3", topology=topology, hierarchical=hierarchical))
        chosen.append(ShardConfig.preset("ddp", topology=topology, hierarchical=hierarchical))
    return chosen


def counting(ctx: RankContext) -> AbstractContextManager[CountC10d | None]:
    """Counts what goes to torch on real ranks; simulated ones are threads, which it cannot tell apart."""
    return nullcontext() if dist.get_backend() == "threaded" else CountC10d()


def is_as_planned(training: Training, counted: CountC10d | None) -> bool:
    """Whether a step sent what was planned, on each axis and in all."""
    rows = training.sharded.traffic()
    is_equal = all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)
    return is_equal and (counted is None or counted.kinds == planned_kinds(training.sharded.plan))


def train_and_compare(ctx: RankContext, configs: list[ShardConfig]) -> list[tuple[bool, dict[str, torch.Tensor]]]:
    """Whether the steps after the first sent what was planned; and the parameters."""
    found = []
    for config in configs:
        training, as_planned = start(ctx, Run(case=models.scalar, config=config, accumulation=2)), True
        for step in range(2):
            with counting(ctx) as counted:
                training.step(step)
            as_planned &= step == 0 or is_as_planned(training, counted)
        found.append((as_planned, training.parameters()))
    return found


def check(found: list[list[tuple[bool, dict[str, torch.Tensor]]]], configs: list[ShardConfig], world: int) -> None:
    expected = plain(Run(case=models.scalar, config=configs[0], accumulation=2, steps=2), world).parameters
    for of_rank in found:
        for config, (as_planned, parameters) in zip(configs, of_rank, strict=True):
            assert as_planned, config
            assert_same(parameters, expected)


@pytest.mark.wide(every=7)
@pytest.mark.parametrize("config", configs_under(SIMULATED, 6), ids=lambda c: f"{c.params}-{c.grads}-{c.optimizer}")
def test_two_switches_of_three_nodes_train_as_plain_and_send_the_plan(config: ShardConfig) -> None:
    check(simulate(12, train_and_compare, [config], ranks_per_node=2), [config], 12)


@pytest.mark.slow
def test_every_preset_on_two_switches_of_two_nodes(ranks: RankPool) -> None:
    configs = configs_under(REAL, 4)
    check(ranks(8, train_and_compare, configs, ranks_per_node=2), configs, 8)


def test_presets_on_two_switches_of_two_nodes(ranks: RankPool) -> None:
    configs = [*(ShardConfig.preset(preset, topology=REAL) for preset in ("zero3", "ddp"))]
    configs.append(ShardConfig.preset("paro-iig", partition_size=4, topology=REAL))
    check(ranks(8, train_and_compare, configs, ranks_per_node=2), configs, 8)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("nodes_per_switch", [0, 1, 3, 8])
def test_three_nodes_train_as_plain_and_send_the_plan(ranks: RankPool, nodes_per_switch: int) -> None:
    """With one node under each switch, all links between nodes are slow ones; with all, none is."""
    topology = Topology(ranks_per_node=2, nodes_per_switch=nodes_per_switch)
    presets = ("ddp", "zero2", "zero3", "mics", "zeropp-hpz") if nodes_per_switch == 0 else ("zero3", "paro-iig")
    configs = [ShardConfig.preset(preset, topology=topology) for preset in presets]
    check(ranks(6, train_and_compare, configs, ranks_per_node=2), configs, 6)


def calibrated(ctx: RankContext, config: ShardConfig) -> tuple[bool, set[str], dict[str, torch.Tensor]]:
    """A training whose thresholds are measured: whether it sends the plan, the spans, and the parameters."""
    training, as_planned = start(ctx, Run(case=models.mlp, config=config)), True
    for step in range(2):
        with counting(ctx) as counted:
            training.step(step)
        as_planned &= step == 0 or is_as_planned(training, counted)
    measured = training.sharded._groups.scopes.two_stages.measured
    return as_planned, {f"{collective} {span.name}" for (collective, span), _ in measured}, training.parameters()


@pytest.mark.slow
def test_thresholds_are_measured_over_three_levels(ranks: RankPool) -> None:
    config = ShardConfig.preset("paro-igg", topology=REAL)
    expected = plain(Run(case=models.mlp, config=config, steps=2), 8).parameters
    for as_planned, spans, parameters in ranks(8, calibrated, config, ranks_per_node=2, calibrates=True):
        assert as_planned
        assert spans == {"reduce_scatter intra_node+inter_node+inter_switch", "all_gather inter_node+inter_switch"}
        assert_same(parameters, expected)


@pytest.mark.parametrize("preset", ["zero3", "paro-igg"])
def test_coalesced_collectives_have_three_stages_as_well(preset: str) -> None:
    """In one launch a stage, where a backend other than gloo has it."""
    config = ShardConfig.preset(preset, topology=REAL, coalesce=True)
    run = Run(case=even, config=config, steps=2, accumulation=2)
    with counted() as calls:
        outcomes = simulate(8, train_alike, run, ranks_per_node=2)
    trace = plain(run, 8)
    for outcome in outcomes:
        assert_same(outcome.grads[-1], trace.grads[-1])
        assert_same(outcome.parameters, trace.parameters)
    assert calls["reduce_scatter_coalesced"] % 3 == 0 < calls["reduce_scatter_coalesced"]


def train_alike(ctx: RankContext, run: Run) -> Outcome:
    return train(ctx, run)


def link_bytes(ctx: RankContext, config: ShardConfig) -> tuple[Counter[str], Counter[str]]:
    """Bytes that this rank's messages carry to other nodes and switches in a step, and those of the plan."""
    training, sent, send = start(ctx, Run(case=models.mlp, config=config)), Counter(), dist.ProcessGroup.send
    training.step(0)

    def counted(group: Any, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        other = dist.get_process_group_ranks(group)[target]
        is_far = other // 2 != ctx.rank // 2, other // 4 != ctx.rank // 4
        sent[LINKS[sum(is_far)]] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return send(group, tensors, target, tag)

    with mock.patch.object(dist.ProcessGroup, "send", counted):
        training.step(1)
    planned: Counter[str] = Counter()
    for p in training.sharded.plan.collectives:
        if p.unit != "(usage)":  # by the backend, over all links
            planned[p.axis.partition(".")[0]] += p.sent_bytes
    return sent, planned


def test_messages_cross_the_links_that_the_plan_names(ranks: RankPool) -> None:
    """By the ranks of every message; inside a node ranks may read one another's memory instead."""
    config = ShardConfig.preset("zero3", topology=REAL)
    for sent, planned in ranks(8, link_bytes, config, ranks_per_node=2):
        assert {link: sent[link] for link in LINKS[1:]} == {link: planned[link] for link in LINKS[1:]}
        assert planned["inter_switch"] < planned["inter_node"] < planned["intra_node"]


NUMEL = 64 * 27 * 64  # of a unit: divisible by every number of ranks below


def planned_by_link(scopes: Scopes) -> Counter[tuple[str, str]]:
    """Bytes by collective and link of a step of one unit that is gathered once."""
    layout = make_layout([("weight", torch.Size((64 * 27, 64)))], scopes.optimizer)
    options = dict.fromkeys(("param_dtype", "wire_dtype", "sum_dtype"), torch.float32)
    unit = UnitPlan(name="unit", slot=0, buckets=(BucketPlan(layout=layout, trainable=True, **options),))
    plan = plan_step((unit,), scopes, StepOrder(forward=(0,), backward=(0,), num_micro_steps=1))
    found: Counter[tuple[str, str]] = Counter()
    for p in plan.collectives:
        if p.unit != "(usage)":
            links = {name.partition(".")[0] for name in p.axis.split("+")}
            assert len(links) == 1, p
            found[p.collective, *links] += p.sent_bytes
    return found


def formula(scopes: Scopes, per_switch: int) -> Counter[tuple[str, str]]:
    """The same by closed formulas.

    A collective from scopes of a to scopes of b ranks, of M bytes, sends M a / i (1 - i / o) over the links that lead
    from i to o ranks, a <= i < o <= b; an all-reduce twice as much. Source: MiCS (arXiv:2205.00119) section 3.3, once
    for each level.
    """
    bounds = {"intra_node": (1, scopes.ranks_per_node), "inter_node": (scopes.ranks_per_node, per_switch)}
    bounds["inter_switch"] = per_switch, scopes.world_size
    p, g, os, world, unit = scopes.params, scopes.grads, scopes.optimizer, scopes.world_size, 4 * NUMEL
    found: Counter[tuple[str, str]] = Counter()

    def add(full: float, small: int, large: int, shares: dict[str, int]) -> None:
        for link, (low, high) in bounds.items():
            inner, outer = max(low, small), min(high, large)
            if inner < outer:
                for collective, times in shares.items():
                    found[collective, link] += times * full * small / inner * (1 - inner / outer)

    add(unit, 1, p, {ALL_GATHER: 1})
    add(unit / p, p, os, {ALL_GATHER: 1})
    add(unit, 1, g, {REDUCE_SCATTER: 1})
    add(unit / g, g, os, {REDUCE_SCATTER: 1})
    reaching = [link for link, (low, high) in bounds.items() if max(low, os) < min(high, world)]
    for link in reaching:  # the slowest stage is one all-reduce, the others are a reduce-scatter and an all-gather
        low, high = max(bounds[link][0], os), min(bounds[link][1], world)
        share = unit / os * os / low * (1 - low / high)
        names = (ALL_REDUCE, ALL_REDUCE) if link == reaching[-1] else (REDUCE_SCATTER, ALL_GATHER)
        for name in names:
            found[name, link] += share
    return found


@pytest.mark.parametrize(
    ("switches", "nodes", "per_node"), [(2, 3, 2), (2, 2, 2), (3, 2, 1), (3, 3, 3), (2, 4, 8), (4, 1, 2), (1, 3, 2)]
)
def test_each_link_carries_the_bytes_of_the_formula_for_every_chain(switches: int, nodes: int, per_node: int) -> None:
    world, per_switch, count = switches * nodes * per_node, nodes * per_node, 0
    topology = Topology(ranks_per_node=per_node, nodes_per_switch=nodes)
    for config in chains(switches * nodes, per_node):
        degrees = {config.params, config.grads, config.optimizer}
        if config.secondary_params != "none" or any(d % per_switch and per_switch % d for d in degrees):
            continue
        scopes = resolve_scopes(config.replace(topology=topology, hierarchical=True), topology, world)
        count += 1
        assert planned_by_link(scopes) == pytest.approx(formula(scopes, per_switch)), config
    assert count > 3


SLOW_CODECS = {
    "zero3": dict(weight_codec=INT8, grad_codec=INT8),
    "zeropp": dict(weight_codec=INT8, grad_codec=INT8, codec_links="slow"),
    "ddp": dict(grad_codec=INT8),
    "mics": dict(grad_codec=INT8),
    "paro-iig": dict(weight_codec=INT8, grad_codec=INT8),
}


def train_quantized(ctx: RankContext, run: Run) -> tuple[dict, dict, bool, Counter[tuple[str, torch.dtype]]]:
    """First gradients, parameters, whether the plan was sent, and its bytes by link and dtype."""
    training = start(ctx, run)
    training.backward(0)
    training.sharded.internals.engine.finish_gradients()
    first = training.grads()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.sharded.traffic()
    with counting(ctx) as counted:
        training.step(1)
    by_link: Counter[tuple[str, torch.dtype]] = Counter()
    for p in training.sharded.plan.collectives:
        if p.unit != "(usage)":
            by_link[p.axis.partition(".")[0].partition("+")[0], p.dtype] += p.sent_bytes
    return first, training.parameters(), is_as_planned(training, counted), by_link


def check_quantized(found: list[Any], run: Run, world: int) -> None:
    first, parameters, _, _ = found[0]
    for other in found:
        assert_identical(other[0], first)
        assert_identical(other[1], parameters)
        assert other[2]
    assert 1e-5 < distance(first, plain(run, world).grads[0]) < 0.06
    by_link = found[0][3]
    far = {dtype for link, dtype in by_link if link != "intra_node"}
    assert far == ({torch.uint8} if run.config.secondary_params == "none" else far)
    assert torch.uint8 in far
    assert torch.uint8 not in {dtype for link, dtype in by_link if link == "intra_node"}


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("preset", SLOW_CODECS)
def test_codecs_encode_all_that_leaves_a_node_and_nothing_else(preset: str) -> None:
    config = ShardConfig.preset(preset, topology=SIMULATED, **SLOW_CODECS[preset])
    run = Run(case=models.mlp, config=config, steps=2, optimizer="sgd")
    check_quantized(simulate(12, train_quantized, run, ranks_per_node=2), run, 12)


@pytest.mark.slow
@pytest.mark.parametrize("links", ["slow", "all"])
@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_messages_and_backends_train_equally_on_three_levels(ranks: RankPool, preset: str, links: str) -> None:
    """Real ranks send point to point, simulated ones by torch's collectives."""
    options = SLOW_CODECS[preset] | {"codec_links": links}
    run = Run(case=models.mlp, config=ShardConfig.preset(preset, topology=REAL, **options), steps=2)
    real = ranks(8, train_quantized, run, ranks_per_node=2)
    for one, other in zip(real, simulate(8, train_quantized, run, ranks_per_node=2), strict=True):
        assert_identical(one[1], other[1])
        assert one[2]
        assert other[2]


def resume(ctx: RankContext, run: Run, path: Path, saves: bool) -> dict[str, torch.Tensor]:
    """Job: what a training saves, or loads."""
    training = start(ctx, run)
    training.step(0)
    if saves:
        save_checkpoint(path, training.sharded, [training.optimizer])
    else:
        load_checkpoint(path, training.sharded, [training.optimizer])
    return state_of(training)


@pytest.mark.slow
def test_a_checkpoint_of_three_levels_is_read_on_two_and_on_three_nodes(ranks: RankPool, tmp_path: Path) -> None:
    config = ShardConfig.preset("paro-iig", partition_size=4, topology=REAL)
    of_switches = Run(case=models.mlp, config=config, optimizer="adamw")
    [expected, *_] = ranks(8, resume, of_switches, tmp_path / "of eight", True, ranks_per_node=2)
    nodes = of_switches.replace(config=ShardConfig.preset("zero3", topology=THREE_NODES))
    for found in ranks(6, resume, nodes, tmp_path / "of eight", False, ranks_per_node=2):
        assert_identical({name: found[name] for name in expected}, expected)
    [expected, *_] = ranks(6, resume, nodes, tmp_path / "of six", True, ranks_per_node=2)
    for found in ranks(8, resume, of_switches, tmp_path / "of six", False, ranks_per_node=2):
        assert_identical({name: found[name] for name in expected}, expected)


def test_switches_may_be_stated_over_nodes_that_are_found() -> None:
    config = ShardConfig(topology={"nodes_per_switch": 2})
    assert config.topology == Switches(nodes_per_switch=2)
    assert resolve_topology(config, ["a", "a", "b", "b"]) == Topology(ranks_per_node=2, nodes_per_switch=2)
    assert ShardConfig(topology={"ranks_per_node": 2, "nodes_per_switch": 2}).topology == REAL


def test_unfilled_switches_are_refused_on_all_ranks(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset("mics", topology=REAL))
    message = r"`nodes_per_switch=2` does not divide the 3 nodes.*use 1, 3"
    raises_on_every_rank(lambda: ranks(6, train_without_reading, run, ranks_per_node=2), ConfigError, message)
