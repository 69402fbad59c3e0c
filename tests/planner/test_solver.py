"""Does the solver find what brute force finds, and say why every other point lost?"""

import contextlib
import dataclasses
import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from mics_strategy.config import ShardConfig
from mics_strategy.engine.plan import Plan
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.planner import solver
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.certainty import CERTAINTIES, certainty
from mics_strategy.planner.choice import fastest_of_systems, plan, reasons, simulate
from mics_strategy.planner.cluster import Cluster, Link
from mics_strategy.planner.flips import communicators_decide, flips
from mics_strategy.planner.model import ParameterShape
from mics_strategy.planner.simulator import Job, step_seconds
from mics_strategy.planner.solver import Point, solve
from mics_strategy.planner.space import Space, TieOrder, advised_presets
from mics_strategy.planner.upgrades import concessions, upgrades
from mics_strategy.planner.workload import Workload
from tests.planner.jobs import tiny_cluster, workload

FREE = {"micro_batch": "auto", "recompute": "auto"}
EQUAL = 0.01  # by which times count as equal; see the solver's page
CODECS = (("none", "none"), ("int8", "int8"))


def limited(memory_bytes: float, **changes: Any) -> Cluster:
    sizes = {"memory_bytes": round(memory_bytes), "communicator_bytes": changes.pop("communicator_bytes", 600_000_000)}
    cluster = tiny_cluster(**changes)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **sizes))


CLUSTERS = {
    "large memory": lambda: limited(1e10),
    "memory for part of the points": lambda: limited(4.2e9),
    "one node": lambda: limited(1e10, nodes=1, ranks_per_node=4),
    "fast network": lambda: tiny_cluster(inter_node=tiny_cluster().intra_node),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("codecs", [CODECS[:1], CODECS], ids=["lossless", "int8"])
def test_the_choice_is_as_fast_as_the_best_of_all_points(cluster: Callable[[], Cluster], codecs: Any) -> None:
    solution = solve(workload(**FREE), cluster(), Space(codecs=codecs))
    best_s = min(step_seconds(point.job) for point in solution.fitting)
    chosen = solution.frontier[0]
    assert chosen.step_s is not None
    assert best_s <= chosen.step_s <= best_s * (1 + EQUAL) * (1 + solution.gap)


def test_of_equal_points_that_with_least_traffic_between_nodes_is_chosen() -> None:
    """ZeRO-3 over 128 ranks, the simplest, would send ten times as much between nodes for 0.2 % of the step."""
    training = Workload(model=describe_model("llama-7b", 4096), global_batch=1024, micro_batch=1, recompute=False)
    solution = solve(training, Cluster.preset("dgx-a100", nodes=16), Space())
    zero3 = next(p for p in solution.fitting if p.job.scopes.params == p.job.scopes.grads == 128)
    chosen = solution.frontier[0]
    assert zero3.step_s is not None
    assert chosen.step_s is not None
    assert zero3.step_s < chosen.step_s * (1 + EQUAL)
    assert chosen.job.scopes.params == 8


def test_the_reason_against_an_equal_point_is_what_decided() -> None:
    def order(*first: int, share: int = 10, grads: int = 2, memory_bytes: int = 10**10) -> TieOrder:
        doublings, complexity, gathered = first
        return TieOrder(
            doublings=doublings,
            complexity=complexity,
            gathered=gathered,
            memory_share=share,
            grads=grads,
            memory_bytes=memory_bytes,
        )

    chosen = order(30, 2, 8)
    reasons_of = {
        order(33, 1, 8, memory_bytes=1): "sends about 8 times as much between nodes",
        order(30, 3, 8, memory_bytes=1): "more kinds of groups",
        order(30, 2, 16, memory_bytes=1): "from 16 ranks instead of 8",
        order(30, 2, 8, grads=8, memory_bytes=1): "shards gradients over 8 ranks for less than 1% of the memory",
        order(30, 2, 8, share=30, grads=1, memory_bytes=3 * 10**10): "needs 20 GB more",
    }
    for other, reason in reasons_of.items():
        assert other > chosen
        assert reason in other.reason_against(chosen)


@pytest.mark.parametrize("product", ["rtx4090-2x", "p4d.24xlarge", "g5.48xlarge"])
def test_the_few_gradients_of_adapters_stay_whole(product: str) -> None:
    """Principle 3 of PaRO, and its advice by the share of trained parameters."""
    described = describe_model("llama-7b", 2048)
    adapters = ParameterShape(name="lora", shape=(4096, 32))
    frozen = [tuple(dataclasses.replace(p, is_trained=False) for p in unit.parameters) for unit in described.units]
    units = tuple(
        dataclasses.replace(unit, parameters=(*parameters, adapters) if unit.is_layer else parameters)
        for unit, parameters in zip(described.units, frozen, strict=True)
    )
    training = Workload(
        model=dataclasses.replace(described, units=units), global_batch=64, master_dtype="bfloat16", recompute=False
    )
    choice = plan(training, Cluster.preset(product, nodes=16 // Cluster.preset(product, nodes=1).ranks_per_node))
    assert choice.step.job.scopes.grads == 1
    assert "0.06% of the parameters are trained, for which PaRO advises paro-nnn, " in choice.table()
    assert "PaRO advises" not in plan(workload(**FREE), tiny_cluster()).table()


def test_every_preset_of_paro_is_advised_for_some_share_of_trained_parameters() -> None:
    shares = {share: {*advised_presets(share)} for share in (1.0, 0.1, 0.01)}
    triples = {f"paro-{a}{b}{c}" for a in "nig" for b in "nig" for c in "nig"}
    assert shares[1.0] | shares[0.1] == set(ShardConfig.PRESETS) & triples
    assert shares[0.01] < shares[0.1] > shares[1.0]
    assert all(name[6] == "n" for name in shares[0.01])
    assert {"paro-ini", "paro-ing", "paro-gng", "paro-gig"} == shares[0.1] - shares[1.0]


def test_nothing_is_sent_between_nodes_where_there_is_one() -> None:
    solution = solve(workload(**FREE), tiny_cluster(nodes=1, ranks_per_node=4), Space())
    assert {solver.tie_order(point, 0, {}).doublings for point in solution.fitting} == {0}


def test_no_point_of_the_answer_is_beaten_in_time_and_memory() -> None:
    training = Workload(model=describe_model("llama-7b", 2048), global_batch=2048)
    _, *others = solve(training, Cluster.preset("p4d.24xlarge", nodes=128), Space()).frontier
    assert len(others) > 1
    for larger, smaller in pairwise(others):
        assert larger.memory.total_bytes > smaller.memory.total_bytes
        assert larger.step_s is not None
        assert smaller.step_s is not None
        assert larger.step_s < smaller.step_s


def test_traffic_of_all_micro_steps_decides_between_equal_points() -> None:
    """Whole parameters and ZeRO-3: the second gathers in each micro-step, and sends more the smaller they are."""
    solution = solve(workload(global_batch=64, **FREE), tiny_cluster(), Space())
    sharded = [p for p in solution.fitting if scopes_of(p) == (4, 4, 4) and not p.job.recompute]
    by_batch = {
        p.job.micro_batch: solver.tie_order(p, 0, {}).doublings for p in sharded if not p.job.scopes.has_secondary
    }
    assert by_batch[1] == by_batch[2] + 1 == by_batch[4] + 2


def test_points_as_fast_as_predictions_are_sure_are_marked() -> None:
    choice = plan(workload(**FREE), tiny_cluster())
    interval = choice.step.certainty.interval
    rows = choice.to_json()["rejected"]
    assert {row["is_within"] for row in rows} == {True, False}
    for row in rows:
        is_near = row["step_s"] is not None and row["step_s"] <= choice.step.step_s * (1 + interval)
        assert row["is_within"] == is_near
    assert f"were predicted within {interval:.0%}" in choice.table()
    chosen, second = choice.solution.frontier
    assert f"no   {chosen.step_s:.4g}" in choice.table()
    assert f"no  ~{second.step_s:.4g}" in choice.table()


@pytest.mark.parametrize(("waiting", "index"), [(0.0, 0), (0.19, 0), (0.2, 1), (0.39, 1), (0.4, 2), (1.0, 2)])
def test_steps_that_wait_longer_are_less_certain(waiting: float, index: int) -> None:
    assert certainty(waiting) is CERTAINTIES[index]
    assert [kind.half for kind in CERTAINTIES] == sorted(kind.half for kind in CERTAINTIES)
    text = CERTAINTIES[-1].text(1.0)
    assert text.startswith(
        "expect 0.81 to 1.19 s: half of 17 public runs that wait as long were predicted within 19%; "
    )
    assert text.endswith("2 in 10 took over 3 times as long, here over 3.2 s")


def test_a_choice_that_is_not_the_fastest_says_why() -> None:
    said = "Steps within 1% count as equal: of these, the choice sends least between nodes"
    choice = plan(workload(**FREE), tiny_cluster())
    first, second = choice.solution.frontier
    for share, is_said in ((1.0, False), (0.995, True)):
        frontier = (first, dataclasses.replace(second, step_s=share * choice.step.step_s))
        shown = dataclasses.replace(choice, solution=dataclasses.replace(choice.solution, frontier=frontier))
        assert (said in shown.table()) == is_said


def test_a_choice_that_another_latency_turns_says_so() -> None:
    slow = tiny_cluster(nodes=4)
    choice = plan(workload(**FREE), slow)
    (text,) = flips(choice)
    assert "With 2 times the latency (20 us between nodes), 4/4/8 with micro-batches of" in text
    assert scopes_of(choice.solution.frontier[0]) == (1, 2, 8)
    patient = dataclasses.replace(slow, inter_node=Link(bytes_per_s=1e8, latency_s=1e-4, source="a test"))
    assert [*flips(plan(workload(**FREE), patient))] == []


def test_points_that_communicators_alone_keep_out_are_named() -> None:
    small = limited(3.5e9)  # too little for seven communicators of 600 MB, and enough for five
    choice = plan(workload(**FREE), small)
    (text,) = communicators_decide(choice)
    assert "too large only because each communicator counts with 600 MB" in text
    best = next(p for p in choice.solution.too_large if scopes_of(p) == (1, 2, 4) and p.job.micro_batch == 2)
    assert dict((id(p), r) for p, r in reasons(choice))[id(best)].endswith("GB too large, by its communicators alone")
    stated = plan(workload(**FREE), limited(3.5e9, communicator_bytes=10**8))
    assert [*communicators_decide(stated)] == []
    assert stated.step.memory.by_kind["communicators"] % 10**8 == 0
    assert stated.step.step_s < choice.step.step_s
    assert float(text.split("would take ")[1].split()[0]) == pytest.approx(stated.step.step_s, rel=0.02)


def test_what_is_given_up_helps_for_more_than_is_uncertain() -> None:
    """Only where the step waits for more than its computation, and only what is not yet given up."""
    slow = tiny_cluster(inter_node=Link(bytes_per_s=1e7, latency_s=1e-5, source="a test"))
    choice = plan(workload(**FREE), slow)
    found = concessions(choice, Space())
    assert {"gradients sent in INT8", "gradients sent and added in bfloat16"} <= {change.name for change in found}
    assert all((change.speedup(choice) or 0.0) > 1 + choice.step.certainty.interval for change in found)
    assert all(change.choice and change.choice.step.memory.total_bytes < 10**10 for change in found)
    exact = {change.name for change in concessions(choice, Space(codecs=CODECS))}
    assert not any("INT8" in name for name in exact)
    assert concessions(plan(workload(**FREE), tiny_cluster(inter_node=tiny_cluster().intra_node)), Space()) == ()


def test_less_memory_of_optimizer_states_is_offered_where_it_decides() -> None:
    training = Workload(model=describe_model("llama-7b", 2048), global_batch=64)
    home = dataclasses.replace(Cluster.preset("rtx4090-2x", nodes=2), ranks_per_node=4)
    choice = plan(training, home)
    fastest = concessions(choice, Space())[0]
    assert fastest.name == "Adam with states of 8 bits"
    assert fastest.choice is not None
    assert fastest.choice.step.job.workload.optimizer_state_bytes == 2


def test_no_step_is_faster_than_its_bound() -> None:
    for point in solve(workload(**FREE), tiny_cluster(), Space(codecs=CODECS)).fitting:
        assert step_seconds(point.job) >= point.bound_s * (1 - 1e-9), point.job.config


def test_the_answer_is_the_same_each_time() -> None:
    first, second = (plan(workload(**FREE), tiny_cluster()).to_json() for _ in range(2))
    assert first == second


def test_every_point_but_the_chosen_one_has_a_reason() -> None:
    choice = plan(workload(**FREE), limited(4.2e9))
    solution = choice.solution
    explained = [*reasons(choice)]
    assert len(explained) == len(solution.fitting) + len(solution.too_large) - 1
    assert all(reason for _, reason in explained)
    assert solution.too_large
    assert all("GB too large" in reason for point, reason in explained if point in solution.too_large)


def test_the_frontier_trades_time_for_memory() -> None:
    frontier = plan(Workload(model=describe_model("llama-7b", 1024), global_batch=128), p4d(2)).solution.frontier
    assert len(frontier) >= 2
    for before, after in itertools.pairwise(frontier):
        assert after.memory.total_bytes < before.memory.total_bytes
        assert (after.step_s or 0.0) >= (before.step_s or 0.0) * (1 - EQUAL)


def p4d(nodes: int) -> Cluster:
    return Cluster.preset("p4d.24xlarge", nodes=nodes)


@pytest.mark.parametrize("nodes", [16, 128])
def test_few_points_are_simulated(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for 1,024 ranks is bounded by counts: a hundred simulations of three micro-steps at most."""
    simulated: list[int] = []

    def counting(job: Any) -> float:
        simulated.append(job.num_micro_steps)
        return step_seconds(job)

    monkeypatch.setattr(solver, "step_seconds", counting)
    solution = solve(Workload(model=describe_model("bert-1.5b", 512), global_batch=4096), p4d(nodes), Space())
    assert len(simulated) <= 100
    assert len(solution.fitting) + len(solution.too_large) > 1000


def test_what_equal_points_send_is_planned_once_for_their_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Counter[tuple[int, ...]]()

    def counting(self: Job, num_micro_steps: int) -> Plan:
        scopes = self.scopes
        planned[scopes.params, scopes.grads, scopes.optimizer, scopes.secondary, num_micro_steps] += 1
        return plan_of(self, num_micro_steps)

    plan_of = Job.plan
    monkeypatch.setattr(Job, "plan", counting)
    monkeypatch.setattr(solver, "step_seconds", lambda job: 1.0)  # all are equal, and nothing else is planned
    solution = solve(workload(global_batch=64, **FREE), tiny_cluster(), Space())
    assert len([point for point in solution.fitting if point.step_s is not None]) > len(planned) // 2
    assert set(planned.values()) == {1}


def test_what_does_not_depend_on_the_scopes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[str]()

    def counted(name: str) -> None:
        function = getattr(solver, name)

        def counting(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(solver, name, counting)

    for name in ("activation_bytes", "micro_step_seconds", "optimizer_seconds"):
        counted(name)
    solution = solve(workload(**FREE), tiny_cluster(), Space())
    points = (*solution.fitting, *solution.too_large)
    batches = {(point.job.micro_batch, point.job.recompute) for point in points}
    assert len(points) > 10 * len(batches)
    assert counts["activation_bytes"] == counts["micro_step_seconds"] == len(batches)
    assert counts["optimizer_seconds"] == len({point.job.scopes.optimizer for point in points})


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_left_as_it_was(was_enabled: bool, fits: bool) -> None:
    cluster = limited(1e10 if fits else 1e6)
    try:
        if not was_enabled:
            gc.disable()
        with contextlib.nullcontext() if fits else pytest.raises(NoFeasiblePlan):
            solve(workload(), cluster, Space())
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_nothing_fits_says_by_how_much_and_what_would_fit() -> None:
    training = Workload(model=describe_model("llama-65b", 2048), global_batch=256)
    with pytest.raises(
        NoFeasiblePlan, match=r"No plan fits 42.3 GB .* needs [\d.]+ GB.* GB too many. To fit, use (\d+)"
    ) as e:
        plan(training, p4d(1))
    nodes = int(str(e.value).split("To fit, use ")[1].split()[0])
    assert plan(training, p4d(nodes)).step.memory.total_bytes <= p4d(1).device.memory_bytes
    with pytest.raises(NoFeasiblePlan):
        plan(training, p4d(nodes // 2))
    least = r"use (\d+) nodes with a multiple of (\d+) samples a step"
    with pytest.raises(NoFeasiblePlan, match=least) as e:
        plan(dataclasses.replace(training, global_batch=8), p4d(1))
    fewest, batch = map(int, re.findall(least, str(e.value))[0])
    assert fewest <= nodes
    assert plan(dataclasses.replace(training, global_batch=batch), p4d(fewest))
    with pytest.raises(NoFeasiblePlan):
        plan(dataclasses.replace(training, global_batch=8 * (fewest - 1)), p4d(fewest - 1))
    long = Workload(model=describe_model("llama-65b", 2048 * 64), global_batch=256)
    with pytest.raises(NoFeasiblePlan, match="shorten the samples, as more nodes do not help"):
        plan(long, p4d(1))


def test_communicators_that_alone_keep_a_plan_out_are_named() -> None:
    smallest = min((p.memory for p in solve(workload(), tiny_cluster(), Space()).fitting), key=lambda m: m.total_bytes)
    assert smallest.by_kind["communicators"] > 1e9
    with pytest.raises(NoFeasiblePlan, match=r"To fit, measure the communicators, which count with \d+.\d GB, and"):
        solve(workload(), limited(smallest.total_bytes - 1e9), Space())
    with pytest.raises(NoFeasiblePlan, match=r"To fit, (?!measure)"):
        solve(workload(), limited(1e6), Space())


def test_switches_that_do_not_divide_the_nodes_are_refused() -> None:
    slow = tiny_cluster().inter_node
    with pytest.raises(ConfigError, match="`nodes_per_switch=4` does not divide the 6 nodes"):
        plan(workload(global_batch=24, **FREE), tiny_cluster(nodes=6, inter_switch=slow, nodes_per_switch=4))


def test_a_bound_is_marked_where_it_stands_beside_simulated_steps() -> None:
    memories = [point.memory.total_bytes for point in solve(workload(), tiny_cluster(), Space()).fitting]
    choice = plan(workload(), limited(min(memories)))  # all others are too large
    bounds = [point for _, point in fastest_of_systems(choice) if point.step_s is None]
    rows = choice.table().partition("Published systems")[2].splitlines()
    assert bounds
    assert all(any(f" >{point.bound_s:.4g} " in row for row in rows) for point in bounds)
    assert sum(" >" in row for row in rows) == len(bounds)
    assert ">: takes at least so long; not simulated." in rows


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="`global_batch=10` samples cannot be divided among 4 ranks"):
        plan(workload(global_batch=10, **FREE), tiny_cluster())
    with pytest.raises(ConfigError, match="`micro_batch=3` does not divide the 4 samples"):
        plan(workload(micro_batch=3), tiny_cluster())


def test_the_choice_is_simulated_as_it_is_stated() -> None:
    training, cluster = workload(**FREE), tiny_cluster()
    choice = plan(training, cluster)
    again = simulate(training, cluster, choice.config, micro_batch=choice.micro_batch, recompute=choice.recompute)
    assert again.step_s == choice.step.step_s
    assert again.memory.total_bytes == choice.step.memory.total_bytes
    assert next(p for p in choice.solution.fitting if p.job == choice.step.job).step_s == pytest.approx(again.step_s)


def test_a_faster_network_and_more_memory_do_not_slow_the_training() -> None:
    training, cluster = workload(**FREE), tiny_cluster()
    choice = plan(training, cluster)
    upgraded = upgrades(training, cluster, Space())
    assert [upgrade.name.partition(" 2")[0] for upgrade in upgraded] == [
        "inter-node links",
        "2 times the memory",
        "2 times the nodes",
    ]
    assert all((upgrade.speedup(choice) or 0.0) >= 1 - EQUAL for upgrade in upgraded[:2])
    assert (upgraded[0].speedup(choice) or 0.0) > 1.01
    (refused,) = [p for p in upgrades(workload(global_batch=4, **FREE), cluster, Space()) if p.choice is None]
    assert "cannot be divided among 8 ranks" in refused.reason


def scopes_of(point: Point) -> tuple[int, int, int]:
    return point.job.scopes.params, point.job.scopes.grads, point.job.scopes.optimizer


def test_simple_and_small_points_win_where_times_are_equal() -> None:
    """On one fast rank a node there is nothing to shard for speed."""
    chosen = solve(workload(), tiny_cluster(nodes=1, ranks_per_node=1), Space()).frontier[0]
    assert scopes_of(chosen) == (1, 1, 1)


def test_outer_steps_are_never_chosen_and_not_predicted() -> None:
    cluster, outer = tiny_cluster(), ShardConfig.preset("mics", outer_every=30)
    points = plan(workload(), cluster).solution.fitting
    assert {point.job.config.outer_every for point in points} == {0}
    words = "`outer_every=30` is another algorithm than the synchronous training that the planner predicts"
    with pytest.raises(ConfigError, match=words):
        simulate(workload(), cluster, outer)
    with pytest.raises(ConfigError, match=words):
        plan(workload(), cluster, Space(base=outer))
