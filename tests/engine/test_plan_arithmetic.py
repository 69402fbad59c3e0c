"""The plan equals the formulas of the papers.

A unit that is still in its slot is not gathered again: with more units than slots, the last ones of a forward are still
there when the backward begins, and the first ones when the next micro-step begins. `DISTINCT` units of one depth never
share a slot, so they show the formulas; `SHARED` ones show the rule.
"""

import pytest
import torch

from mics_strategy import ShardConfig, Topology
from mics_strategy.comm.route import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.plan import BucketPlan, Plan, StepOrder, UnitPlan, plan_step
from mics_strategy.scopes import Scopes, resolve_scopes
from tests.engine.chains import chains

NUMEL = 64 * 64 * 64  # of a unit: divisible by every number of ranks below
SINGLE = 0, 0  # both units in one slot: everything travels every time
OWN_SLOTS = 0, 1  # a slot each: gathered once per step


def _bucket(ranks: int, name: str = "u0", **changes: object) -> BucketPlan:
    options = dict.fromkeys(("param_dtype", "wire_dtype", "sum_dtype"), torch.float32) | {"trainable": True} | changes
    return BucketPlan(layout=make_layout([(f"{name}.weight", torch.Size((NUMEL // 64, 64)))], ranks), **options)


def _scopes(preset: str, world: int = 8, per_node: int = 4, **options: object) -> Scopes:
    """Collectives in one stage each, which is what the papers' formulas count."""
    config = ShardConfig.preset(preset, hierarchical=False, **options)
    return resolve_scopes(config, Topology(ranks_per_node=per_node), world)


def _plan(scopes: Scopes, slots: tuple[int, ...], micro_steps: int = 1, **bucket: object) -> Plan:
    units = tuple(
        UnitPlan(name=f"u{i}", slot=slot, buckets=(_bucket(scopes.optimizer, f"u{i}", **bucket),))
        for i, slot in enumerate(slots)
    )
    order = tuple(range(len(slots)))
    return plan_step(units, scopes, StepOrder(forward=order, backward=order[::-1], num_micro_steps=micro_steps))


def _sent(plan: Plan, collective: str, axis: str | None = None) -> int:
    planned = [p for p in plan.collectives if p.unit != "(usage)" and axis in (None, p.axis)]
    return sum(p.sent_bytes for p in planned if p.collective == collective)


def _count(plan: Plan, collective: str) -> int:
    return sum(p.collective == collective and p.unit != "(usage)" for p in plan.collectives)


MODEL = 2 * NUMEL * 4  # bytes of the two units


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("world", [4, 8])
def test_zero3_all_gathers_for_forward_and_backward_and_reduces_once(world: int, micro_steps: int) -> None:
    """3 (n-1) M / n, less the all-gathers of the unit that is still in the slot.

    Source: MiCS (arXiv:2205.00119) section 2.3.
    """
    plan = _plan(_scopes("zero3", world), SINGLE, micro_steps)
    share = (world - 1) * MODEL // world
    assert _sent(plan, REDUCE_SCATTER) == micro_steps * share
    resident = share // 2 * (2 * micro_steps - 1)  # not at the beginning: the step has changed it
    assert _sent(plan, ALL_GATHER) == 2 * micro_steps * share - resident
    assert _sent(plan, ALL_REDUCE) == 0


def test_zero3_with_a_slot_for_every_unit_all_gathers_once_per_step() -> None:
    plan = _plan(_scopes("zero3"), OWN_SLOTS, 3)
    assert _sent(plan, ALL_GATHER) == 7 * MODEL // 8


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_mics_second_hop_sends_an_all_reduce_of_the_shard(micro_steps: int) -> None:
    """A replication group sends 2 (M/p) (n-p) / n.

    All p groups together send 2 M (n-p) / n. Source: MiCS (arXiv:2205.00119) section 3.4.
    """
    plan = _plan(_scopes("mics"), SINGLE, micro_steps)
    assert _sent(plan, ALL_REDUCE, "inter_node") == 2 * (MODEL // 4) * (8 - 4) // 8


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_mics_reduces_inside_the_partition_in_every_micro_step(micro_steps: int) -> None:
    plan = _plan(_scopes("mics"), SINGLE, micro_steps)
    assert _sent(plan, REDUCE_SCATTER, "intra_node") == micro_steps * 3 * MODEL // 4
    assert _sent(plan, REDUCE_SCATTER) == _sent(plan, REDUCE_SCATTER, "intra_node")


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("preset", [p for p in ShardConfig.PRESETS if p.startswith("paro-")])
def test_paro_volumes_per_rank(preset: str, micro_steps: int) -> None:
    """Table 3 as corrected: M = 4 ranks a node, N = 8, g = 2.

    Gathers of one unit, which is always in its slot.
    """
    scopes = _scopes(preset)
    plan = _plan(scopes, (0,), micro_steps)
    model, world = NUMEL * 4, 8
    p, g, o = scopes.params, scopes.grads, scopes.optimizer
    assert _sent(plan, ALL_GATHER) == model * (p - 1) // p + model // p * (o // p - 1) * p // o
    first, second = model * (g - 1) // g, model // g * (o // g - 1) * g // o
    assert _sent(plan, REDUCE_SCATTER) == micro_steps * first + second
    assert _sent(plan, ALL_REDUCE) == 2 * (model // o) * (world // o - 1) * o // world


@pytest.mark.parametrize("preset", ["paro-iig", "mics", "zero3"])
def test_only_scopes_beyond_the_node_use_links_between_nodes(preset: str) -> None:
    axes = {p.axis for p in _plan(_scopes(preset), SINGLE).collectives if p.unit != "(usage)"}
    expected = {"paro-iig": {"intra_node", "inter_node"}, "mics": {"intra_node", "inter_node"}}
    assert axes == expected.get(preset, {"intra_node+inter_node"})


def test_step_by_hand() -> None:
    """Two units in one slot, two micro-steps, MiCS on 2 nodes of 4."""
    plan = _plan(_scopes("mics"), SINGLE, 2)
    moments = [(p.micro_step, p.phase, p.collective, p.unit) for p in plan.collectives]
    assert moments == [
        (0, "forward", ALL_GATHER, "u0"),
        (0, "forward", ALL_GATHER, "u1"),
        (0, "backward", ALL_GATHER, "u0"),
        (0, "backward", REDUCE_SCATTER, "u1"),
        (0, "backward", REDUCE_SCATTER, "u0"),
        (1, "forward", ALL_GATHER, "u1"),
        (1, "backward", ALL_GATHER, "u0"),
        (1, "backward", REDUCE_SCATTER, "u1"),
        (1, "backward", REDUCE_SCATTER, "u0"),
        (1, "second_hop", ALL_REDUCE, "(usage)"),
        (1, "second_hop", ALL_REDUCE, "u1"),
        (1, "second_hop", ALL_REDUCE, "u0"),
    ]


def test_parameters_are_synchronized_once_per_step_before_the_first_use() -> None:
    plan = _plan(_scopes("paro-iig"), SINGLE, 3)
    updates = [
        (p.unit, p.phase, p.micro_step)
        for p in plan.collectives
        if (p.collective, p.axis) == (ALL_GATHER, "inter_node")
    ]
    assert updates == [("u0", "forward", 0), ("u1", "forward", 0)]


def test_second_hop_of_every_micro_step_sends_it_every_time() -> None:
    scopes, units = _scopes("mics"), (UnitPlan(name="u", slot=0, buckets=(_bucket(4),)),)
    shape = StepOrder(forward=(0,), backward=(0,), num_micro_steps=3, second_hop_every_backward=True)
    assert _count(plan_step(units, scopes, shape), ALL_REDUCE) == 3


def test_frozen_units_are_gathered_and_never_reduced() -> None:
    plan = _plan(_scopes("paro-iig"), SINGLE, 1, trainable=False)
    assert _count(plan, REDUCE_SCATTER) + _count(plan, ALL_REDUCE) == 0
    assert {p.axis for p in plan.collectives} == {"intra_node"}


def test_frozen_model_exchanges_no_used_parameter_map() -> None:
    assert not any(p.unit == "(usage)" for p in _plan(_scopes("mics"), SINGLE, 1, trainable=False).collectives)


def test_unit_entered_twice_is_reduced_once() -> None:
    scopes, units = _scopes("mics"), tuple(UnitPlan(name=n, slot=0, buckets=(_bucket(4, n),)) for n in "ab")
    shape = StepOrder(forward=(0, 1, 0), backward=(0, 1, 0), num_micro_steps=1)
    assert _count(plan_step(units, scopes, shape), REDUCE_SCATTER) == 2


def test_bytes_follow_the_dtypes() -> None:
    wide = _plan(_scopes("zero3"), SINGLE)
    narrow = _plan(_scopes("zero3"), SINGLE, param_dtype=torch.bfloat16, wire_dtype=torch.bfloat16)
    assert 2 * _sent(narrow, ALL_GATHER) == _sent(wide, ALL_GATHER)
    assert 2 * _sent(narrow, REDUCE_SCATTER) == _sent(wide, REDUCE_SCATTER)


@pytest.mark.parametrize("preset", ["ddp", "zero3", "mics", "paro-iig"])
def test_one_rank_plans_nothing(preset: str) -> None:
    assert _plan(_scopes(preset, 1, 1), SINGLE, 3).collectives == ()


def test_totals_and_table_show_every_byte() -> None:
    plan = _plan(_scopes("paro-iig"), SINGLE, 2)
    by_axis = [plan.sent_bytes(axis) for axis in {p.axis for p in plan.collectives}]
    assert plan.sent_bytes() == sum(by_axis) == sum(p.sent_bytes for p in plan.collectives)
    rows = [float(line.split()[-1]) for line in plan.table().splitlines()[1:]]
    assert sum(rows) == pytest.approx(plan.sent_bytes() / 1e6, abs=0.001 * len(rows))


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("secondary", [1, 2, 4])
def test_zeropp_gathers_inside_the_secondary_scope_after_the_first_forward(secondary: int, micro_steps: int) -> None:
    """PaRO's table 3, row ZeRO++: forward (N-1) M / N, backward (S-1) M / S; forwards of later micro-steps as well.

    All units share a slot.
    """
    units = 0, 0, 0
    plan = _plan(_scopes("zeropp-hpz", secondary_params=secondary), units, micro_steps)
    gathers = [p for p in plan.collectives if p.collective == ALL_GATHER]
    first, later = gathers[: len(units)], gathers[len(units) :]
    unit = NUMEL * 4
    assert all(p.phase == "forward" and p.size == 8 and p.sent_bytes == unit * 7 // 8 for p in first)
    assert all(p.size == secondary and p.sent_bytes == unit * (secondary - 1) // secondary for p in later)
    num_passes = 2 * micro_steps - 1  # after the first forward; each finds one unit in the slot
    assert len(later) == ((len(units) - 1) * num_passes if secondary > 1 else 0)


def test_zeropp_needs_no_link_between_nodes_in_the_backward() -> None:
    plan = _plan(_scopes("zeropp-hpz"), SINGLE)
    assert {p.axis for p in plan.collectives if p.collective == ALL_GATHER and p.phase == "backward"} == {"intra_node"}


def _formula(scopes: Scopes, num_units: int, micro_steps: int) -> dict[str, float]:
    """Elements that one rank sends per step, in sizes of a unit.

    All units share a slot.

    They are the all-gathers of forward and backward, less those of units still in the slot, the first hop, the second
    hop and the parameter synchronization.

    Source:
        MiCS (arXiv:2205.00119) section 3.2, all-gather in a partition group, and section 3.4, 2-hop gradient
        synchronization; PaRO (arXiv:2310.06003) table 3, corrected; AMSP (arXiv:2311.00257), communication cost of the
        optimizer step by sharding factors.
    """
    p, g, os, n, copy = scopes.params, scopes.grads, scopes.optimizer, scopes.world_size, scopes.secondary
    forward = num_units * micro_steps - (micro_steps - 1)
    backward = (num_units - 1) * micro_steps
    return {
        "gather": num_units * (p - 1) / p + (forward - num_units + backward) * (copy - 1) / copy,
        "update": num_units * (os // p - 1) / os,
        "first hop": micro_steps * num_units * (g - 1) / g,
        "second scatter": num_units * (os // g - 1) / os,
        "second reduce": num_units * 2 * (n // os - 1) / n,
    }


@pytest.mark.parametrize("topology", [(1, 4), (2, 2), (4, 1), (2, 4), (4, 4), (2, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_every_chain_sends_the_bytes_of_the_formulas(topology: tuple[int, int], micro_steps: int) -> None:
    nodes, per_node = topology
    for config in chains(nodes, per_node):
        scopes = resolve_scopes(config.replace(hierarchical=False), config.topology, nodes * per_node)
        plan = _plan(scopes, (0, 0, 0), micro_steps)
        expected = _formula(scopes, 3, micro_steps)
        unit = NUMEL * 4
        gathers = expected["gather"] + expected["update"]
        assert _sent(plan, ALL_GATHER) == pytest.approx(gathers * unit), config
        scatters = expected["first hop"] + expected["second scatter"]
        assert _sent(plan, REDUCE_SCATTER) == pytest.approx(scatters * unit), config
        assert _sent(plan, ALL_REDUCE) == pytest.approx(expected["second reduce"] * unit), config
