"""Does a job that starts choose what the solver would, from the little that it knows?"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.config import ShardConfig
from mics_strategy.engine.plan import USAGE, StepOrder, plan_step
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.planner.auto import ACTIVATIONS_SHARE, AutoJob, Candidate, choose, choose_partition
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.choice import plan
from mics_strategy.planner.cluster import Cluster, Link
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.memory import MicroBatch, Overheads, activation_bytes, rank_memory
from mics_strategy.planner.model import ModelDescription, ParameterShape
from mics_strategy.planner.role_times import RoleTimes
from mics_strategy.planner.scope_search import choose_scopes, comm_seconds, job_cluster, price
from mics_strategy.planner.simulator import step_seconds
from mics_strategy.planner.solver import solve
from mics_strategy.planner.space import ScopedConfig, Space, topology_of
from mics_strategy.planner.workload import Workload
from mics_strategy.scopes import resolve_scopes
from mics_strategy.topology import Topology
from tests import models
from tests.engine.chains import REAL, SIMULATED, chains
from tests.engine.training import Run, assert_same, plain, train_without_reading
from tests.planner.jobs import tiny_cluster, tiny_llama, workload
from tests.ranks import simulate

AUTO = ShardConfig.preset("auto")
EQUAL = 0.01


def job(cluster: Cluster, model: ModelDescription | None = None, **changes: Any) -> AutoJob:
    fields: dict[str, Any] = {
        "model": tiny_llama() if model is None else model,
        "topology": topology_of(cluster),
        "world_size": cluster.world_size,
        "memory_bytes": cluster.device.memory_bytes,
    }
    return AutoJob(**{**fields, **changes})


def with_adapters(model: ModelDescription) -> ModelDescription:
    """Only norms are trained."""
    units = (
        dataclasses.replace(
            unit,
            parameters=tuple(dataclasses.replace(p, is_trained="norm" in p.name) for p in unit.parameters),
        )
        for unit in model.units
    )
    return dataclasses.replace(model, units=tuple(units))


def degrees(config: ShardConfig) -> tuple[Any, ...]:
    return config.params, config.grads, config.optimizer


# -- time ---------------------------------------------------------------------------------------------------------


def planned_seconds(scoped: ScopedConfig, model: ModelDescription, cluster: Cluster, num_micro_steps: int) -> float:
    """Seconds of all collectives in the plan of a step in which units displace one another."""
    units = engine_memory(model, scoped.config, scoped.scopes, torch.float32).unit_plans()
    displacing = tuple(dataclasses.replace(unit, slot=0) for unit in units)
    order = tuple(range(len(units)))
    shape = StepOrder(
        forward=order,
        backward=(0, *reversed(order[1:])),
        num_micro_steps=num_micro_steps,
        second_hop_every_backward=scoped.config.second_hop == "micro_step",
    )
    times = CommTime(cluster, scoped.scopes.axes)
    planned = plan_step(displacing, scoped.scopes, shape).collectives
    return sum(times.of(collective.traffic).seconds for collective in planned if collective.role != USAGE)


@pytest.mark.parametrize("second_hop", ["boundary", "micro_step"])
@pytest.mark.parametrize("is_peft", [False, True], ids=["trained", "adapters"])
@pytest.mark.parametrize(("nodes", "per_node"), [*REAL, *SIMULATED], ids=str)
@pytest.mark.wide
def test_times_are_those_of_the_plan(nodes: int, per_node: int, is_peft: bool, second_hop: str) -> None:
    """Without latency, which the chunks of a first hop multiply."""
    link = Link(bytes_per_s=1e9, latency_s=0.0, source="a test")
    cluster = tiny_cluster(nodes, per_node, intra_node=link, inter_node=dataclasses.replace(link, bytes_per_s=1e8))
    model = with_adapters(tiny_llama()) if is_peft else tiny_llama()
    times = RoleTimes(cluster)
    for config in chains(nodes, per_node):
        if is_peft and config.secondary_params != "none":
            continue  # a frozen parameter is gathered once more than a trained one from the copy
        config = config.replace(second_hop=second_hop, param_dtype="bfloat16")
        scoped = ScopedConfig(config=config, scopes=resolve_scopes(config, topology_of(cluster), cluster.world_size))
        found_s = comm_seconds(scoped, job(cluster, model), num_micro_steps=3, times=times)
        assert found_s == pytest.approx(planned_seconds(scoped, model, cluster, 3)), config


def test_bounds_of_frozen_parameters_are_bounds() -> None:
    """No step synchronizes them, and a secondary copy keeps them."""
    solution = solve(workload(model=with_adapters(tiny_llama())), tiny_cluster(), Space())
    for point in solution.fitting:
        assert step_seconds(point.job) >= point.bound_s * (1 - 1e-9), point.job.config


# -- scopes -------------------------------------------------------------------------------------------------------


def test_the_fastest_that_fits_is_chosen_and_the_simplest_of_equals() -> None:
    cluster = tiny_cluster(4, 4)
    of_job = job(cluster)
    candidates = price(AUTO, of_job, cluster)
    sizes = sorted(candidate.memory.total_bytes for candidate in candidates)
    for limit_bytes in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        config = AUTO.replace(activation_bytes=of_job.memory_bytes - limit_bytes)
        chosen = choose_scopes(config, of_job, cluster).config
        fitting = [c for c in candidates if c.memory.total_bytes <= limit_bytes]
        (found,) = [c for c in fitting if is_of(c, chosen)]
        least_s = min(c.seconds for c in fitting)
        assert found.seconds <= least_s * (1 + EQUAL)
        equal = [c for c in fitting if c.seconds <= least_s * (1 + EQUAL)]
        assert len(found.scopes.axes) == min(len(c.scopes.axes) + c.scopes.has_secondary for c in equal)


@pytest.mark.parametrize("memory", [12e9, 24e9, 80e9])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_few_gradients_of_adapters_are_not_sharded(nodes: int, memory: float) -> None:
    """They are small, and would be sent in every micro-step: principle 3 of PaRO."""
    described = describe_model("llama-7b", 512)
    adapters = ParameterShape(name="lora", shape=(1_000, 320))
    units = tuple(
        dataclasses.replace(
            unit,
            parameters=(
                *(dataclasses.replace(p, is_trained=False, dtype=torch.bfloat16) for p in unit.parameters),
                *((adapters,) if unit.is_layer else ()),
            ),
        )
        for unit in described.units
    )
    of_job = AutoJob(
        model=dataclasses.replace(described, units=units),
        topology=Topology(ranks_per_node=8),
        world_size=8 * nodes,
        memory_bytes=round(memory),
    )
    config = AUTO.replace(param_dtype="bfloat16")
    assert choose_scopes(config, of_job, job_cluster(config, of_job)).config.grads == 1


def is_of(candidate: Candidate, config: ShardConfig) -> bool:
    found = candidate.config
    return (*degrees(found), found.secondary_params) == (*degrees(config), config.secondary_params)


# Model, cluster, nodes, samples of a micro-batch and micro-steps; and by how much the choice may be slower than the
# solver's, which knows what the model computes and can hide collectives behind it.
AGREEMENT = {
    "llama-7b": ("p4d.24xlarge", 2, 1, 8, 1.05),
    "bert-1.5b": ("p3dn.24xlarge", 2, 8, 4, 1.05),
    "llama-13b": ("dgx-h100", 4, 1, 4, 1.05),
    "bert-10b": ("p3dn.24xlarge", 4, 8, 4, 1.05),
    "llama-30b": ("p4d.24xlarge", 8, 1, 8, 1.05),
}


@pytest.mark.wide(every=7)
@pytest.mark.parametrize("name", AGREEMENT)
def test_the_choice_is_about_as_fast_as_the_solvers(name: str) -> None:
    """With stated activations and micro-steps. The job is simulated with all that the solver knows."""
    product, nodes, samples, steps, slower = AGREEMENT[name]
    cluster, model = Cluster.preset(product, nodes=nodes), describe_model(name, 512)
    batch = MicroBatch(samples=samples, recomputes=True)
    training = Workload(
        model=model, global_batch=samples * steps * cluster.world_size, micro_batch=samples, recompute=True
    )
    solution = solve(training, cluster, Space())
    activations = round(1.05 * sum(activation_bytes(model.units, batch).values()))  # with their fragmentation
    config = ShardConfig.preset("auto", param_dtype="bfloat16", cluster=product, micro_steps=steps)
    chosen = choose(config.replace(activation_bytes=activations), job(cluster, model)).config
    (point,) = [
        p
        for p in solution.fitting
        if (*degrees(p.job.config), p.job.config.secondary_params) == (*degrees(chosen), chosen.secondary_params)
    ]
    best_s = solution.frontier[0].step_s
    assert best_s is not None
    assert step_seconds(point.job) <= slower * best_s


def test_links_micro_steps_and_memory_decide() -> None:
    slow, fast = tiny_cluster(), tiny_cluster(inter_node=tiny_cluster().intra_node)
    one, many = AUTO.replace(micro_steps=1), AUTO.replace(micro_steps=32)
    of_job = job(slow)
    total = {c.memory.total_bytes for c in price(AUTO, of_job, slow)}
    small = job(slow, memory_bytes=sorted(total)[len(total) // 3])
    assert degrees(choose_scopes(one, of_job, slow).config) != degrees(choose_scopes(one, small, slow).config)
    of_links = [
        price(config, of_job, links) for config in (one, many) for links in (slow, fast)
    ]  # the same scopes in the same order
    assert len({len(candidates) for candidates in of_links}) == 1
    slow_one, fast_one, slow_many, _ = of_links
    assert all(a.seconds >= b.seconds for a, b in zip(slow_one, fast_one, strict=True))
    ratios = [b.seconds / a.seconds for a, b in zip(slow_one, slow_many, strict=True)]
    assert min(ratios) == pytest.approx(1.0)  # all that is sent is sent once a step: parameters and gradients are whole
    assert max(ratios) > 10


def test_a_secondary_copy_is_chosen_only_where_it_may_be() -> None:
    cluster = tiny_cluster(4, 4)
    copies = [c.scopes.has_secondary for c in price(AUTO, job(cluster), cluster)]
    assert any(copies)
    assert not any(c.scopes.has_secondary for c in price(AUTO.replace(secondary_params="none"), job(cluster), cluster))


@pytest.mark.parametrize("codec", ["int8", Codec(bits=8, block_size=64)], ids=str)
def test_a_codec_that_is_asked_for_has_something_to_encode(codec: str | Codec) -> None:
    cluster = tiny_cluster()
    config = AUTO.replace(weight_codec=codec)
    chosen = choose_scopes(config, job(cluster), cluster).config
    assert chosen.weight_codec == codec
    assert resolve_scopes(chosen, topology_of(cluster), cluster.world_size).has_quantized_params
    assert len(price(config, job(cluster), cluster)) < len(price(AUTO, job(cluster), cluster))


def test_a_configuration_that_no_scopes_suit_is_refused() -> None:
    cluster = tiny_cluster()
    config = AUTO.replace(grad_codec="int8", grad_codec_hops="first", weight_codec=Codec(bits=8, differences=True))
    assert choose_scopes(config, job(cluster), cluster).config.is_auto is False
    one_rank = tiny_cluster(nodes=2, ranks_per_node=1)
    config = AUTO.replace(weight_codec=Codec(bits=8, differences=True), secondary_params="none")
    with pytest.raises(ConfigError, match="`weight_codec` encodes differences"):
        price(config, job(one_rank), one_rank)


def test_other_fields_are_kept_and_hints_are_spent() -> None:
    cluster = tiny_cluster()
    config = ShardConfig.preset(
        "auto", prefetch=2, micro_steps=4, cluster="p4d.24xlarge", activation_bytes=1, world_size=4
    )
    chosen = choose_scopes(config, job(cluster), cluster).config
    assert chosen == config.replace(
        params=chosen.params,
        grads=chosen.grads,
        optimizer=chosen.optimizer,
        secondary_params=chosen.secondary_params,
        micro_steps="unknown",
        cluster="auto",
    )
    assert not chosen.is_auto


# -- partitions ---------------------------------------------------------------------------------------------------

MICS = ShardConfig.preset("mics", param_dtype="bfloat16")
DEGREES = (1, 2, 4, 8, 16, 32)


def sizes_of(config: ShardConfig, of_job: AutoJob) -> dict[int, int]:
    """Bytes of a rank by ranks of a partition."""
    found = {}
    for ranks in DEGREES:
        sized = config.replace(partition_size=ranks)
        scopes = resolve_scopes(sized, of_job.topology, of_job.world_size)
        memory = rank_memory(of_job.model, sized, scopes, MicroBatch(), overheads=Overheads.of(of_job.backend))
        found[ranks] = memory.total_bytes
    return found


@pytest.mark.parametrize("ranks", DEGREES)
def test_a_partition_is_the_fewest_ranks_that_fit(ranks: int) -> None:
    of_job = job(tiny_cluster(4, 8), describe_model("bert-1.5b", 512))
    sizes = sizes_of(MICS, of_job)
    for surplus_bytes in (0, sizes[ranks] // 1000):
        memory_bytes = -(-(sizes[ranks] + surplus_bytes) * 100 // round(100 * (1 - ACTIVATIONS_SHARE)))
        found = choose(MICS, dataclasses.replace(of_job, memory_bytes=memory_bytes))
        assert found.config == MICS.replace(partition_size=ranks)
        assert ("chose partition_size" in found.reasons) == (ranks != 8)
    stated = dataclasses.replace(of_job, memory_bytes=sizes[ranks] + 10**9 - 1)
    tight = choose(MICS.replace(activation_bytes=10**9), stated).config.partition_size
    assert tight == (ranks if ranks == 32 else 2 * ranks)


def test_a_partition_on_cpus_is_a_node_or_more() -> None:
    of_job = job(tiny_cluster(4, 8), describe_model("bert-1.5b", 512), backend="gloo", memory_bytes=10**12)
    assert choose_partition(MICS, of_job).config.partition_size == 8
    small = dataclasses.replace(of_job, memory_bytes=sizes_of(MICS, of_job)[16])
    assert choose_partition(MICS.replace(activation_bytes=0), small).config.partition_size == 16


@pytest.mark.parametrize("preset", ["zeropp", "paro-ing", "paro-igg", "zeropp-hpz"])
def test_partitions_of_every_role_are_resolved(preset: str) -> None:
    config, of_job = ShardConfig.preset(preset), job(tiny_cluster(4, 8))
    found = choose(config, of_job).config
    assert found.partition_size == 1
    assert resolve_scopes(found, of_job.topology, 32).optimizer == 32


def test_sizes_that_do_not_nest_with_other_scopes_are_left_out() -> None:
    """Parameters over 4 ranks do not nest with gradients over 6; over 3 and 6 they do."""
    config = ShardConfig(params="partition", grads=6, optimizer=12, activation_bytes=0)
    of_job = job(tiny_cluster(1, 12), describe_model("bert-1.5b", 512))
    with pytest.raises(ConfigError, match="do not nest"):
        resolve_scopes(config.replace(partition_size=4), of_job.topology, 12)
    six = config.replace(partition_size=6)
    memory = rank_memory(of_job.model, six, resolve_scopes(six, of_job.topology, 12), MicroBatch())
    assert choose(config, dataclasses.replace(of_job, memory_bytes=memory.total_bytes)).config == six


def test_configurations_without_auto_are_kept() -> None:
    of_job = job(tiny_cluster(4, 8), memory_bytes=1)
    for config in (ShardConfig.preset("zero3"), ShardConfig.preset("mics", partition_size=4)):
        assert choose(config, of_job).config == config


# -- too little memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [AUTO, MICS], ids=["scopes", "partition"])
def test_states_that_fit_nowhere_are_refused_with_the_missing_bytes(config: ShardConfig) -> None:
    of_job = job(tiny_cluster(2, 2), describe_model("bert-1.5b", 512), memory_bytes=2 * 10**9)
    words = r"fit into the 2 GB of a rank: the smallest scopes, parameters over 4, .* need ([\d.]+) GB .*, ([\d.]+) GB"
    with pytest.raises(NoFeasiblePlan, match=words) as error:
        choose(config, of_job)
    assert "Use more nodes" in str(error.value)
    assert ("param_dtype='bfloat16'" in str(error.value)) == (config.param_dtype == "auto")


@pytest.mark.parametrize("config", [AUTO, MICS], ids=["scopes", "partition"])
def test_too_little_for_activations_is_a_warning(config: ShardConfig) -> None:
    of_job = job(tiny_cluster(2, 2), describe_model("bert-1.5b", 512), memory_bytes=14 * 10**9)
    found = choose(config.replace(activation_bytes=13 * 10**9), of_job)
    assert "leave" in found.reasons.partition("No ")[2]
    world = found.config.partition_size if config is MICS else found.config.optimizer
    assert world == 4


# -- links --------------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_node_share_its_links() -> None:
    config, of_job = ShardConfig.preset("auto", cluster="p4d.24xlarge"), job(tiny_cluster(4, 2))
    links, product = job_cluster(config, of_job), Cluster.preset("p4d.24xlarge")
    assert (links.num_nodes, links.ranks_per_node) == (4, 2)
    assert links.inter_node.bytes_per_s == pytest.approx(4 * product.inter_node.bytes_per_s)
    assert links.intra_node == product.intra_node
    assert job_cluster(AUTO, of_job) == links


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_a_file_of_one_node_is_no_file_of_several(ranks_per_node: int, tmp_path: Path) -> None:
    """Also where the ranks of the job share the links otherwise than those of the file."""
    box = {"ranks_per_node": 2, "device": "rtx4090-24gb", "intra_node": {"bandwidth": "25 GB/s", "latency": "6 us"}}
    (tmp_path / "box.json").write_text(json.dumps(box))
    config = AUTO.replace(cluster=str(tmp_path / "box.json"))
    assert job_cluster(config, job(tiny_cluster(1, ranks_per_node))).num_nodes == 1
    with pytest.raises(ConfigError, match=f"2 nodes of {ranks_per_node} ranks were asked for, and cluster box states"):
        job_cluster(config, job(tiny_cluster(2, ranks_per_node)))


def test_switches_are_those_of_the_job(tmp_path: Path) -> None:
    of_job = job(tiny_cluster(4, 2), topology=Topology(ranks_per_node=2, nodes_per_switch=2))
    links = job_cluster(AUTO, of_job)
    assert (links.nodes_per_switch, links.inter_switch) == (2, links.inter_node)
    assert any("inter_switch" in axis.name for c in price(AUTO, of_job, links) for axis in c.scopes.axes)
    config = AUTO.replace(cluster=str(leaf_cluster(tmp_path)))
    links = job_cluster(config, of_job)
    assert links.inter_switch is not None
    assert links.inter_switch.bytes_per_s < links.inter_node.bytes_per_s
    with pytest.raises(ConfigError, match=r"has 2 nodes under a switch, and the topology of the job no switches"):
        job_cluster(config, job(tiny_cluster(4, 2)))
    assert job_cluster(config, job(tiny_cluster(2, 2))).inter_switch is None  # one switch holds the job


def test_a_calibration_of_another_job_is_refused(tmp_path: Path) -> None:
    file = leaf_cluster(tmp_path)
    file.write_text(f"{file.read_text()}calibration: {ORIGIN}\n")
    config = AUTO.replace(cluster=str(file))
    with pytest.raises(ConfigError, match="`ranks_per_node=4` was asked for"):
        job_cluster(config, job(tiny_cluster(4, 4)))
    with pytest.raises(ConfigError, match="`backend='gloo'` was asked for"):
        job_cluster(config, job(tiny_cluster(4, 2), backend="gloo"))


ORIGIN = (
    "{format: 1, date: '2026-01-31', hosts: [a, b], world_size: 4, torch_version: 2.13.0, package_version: '0', "
    "dtype: float32, flop_per_s: {float32: 1.0e+12}}"
)


# -- leaf switches, from a plan to a training ----------------------------------------------------------------------


def leaf_cluster(folder: Path) -> Path:
    """The file of a cluster with two nodes under each switch."""
    file = folder / "leaf.yaml"
    file.write_text(
        "device: {name: tiny, memory: 10 GB, memory_bandwidth: 10 GB/s, peak: 0.1 TFLOP/s, matmul_efficiency: 0.5}\n"
        "nodes: 4\nranks_per_node: 2\nnodes_per_switch: 2\n"
        "intra_node: {bandwidth: 1 GB/s, latency: 1 us, source: a test}\n"
        "inter_node: {bandwidth: 100 MB/s, latency: 10 us, source: a test}\n"
        "inter_switch: {bandwidth: 20 MB/s, latency: 20 us, source: a test}\n"
    )
    return file


def test_a_plan_for_leaf_switches_trains_as_plain(tmp_path: Path) -> None:
    """Its configuration has both levels. States are so large that only shards of all ranks fit."""
    cluster = Cluster.load(leaf_cluster(tmp_path))
    training = workload(optimizer_state_bytes=10_000, param_dtype="float32")
    roomy = plan(training, cluster)
    smallest = min(point.memory.total_bytes for point in roomy.solution.fitting)
    device = dataclasses.replace(cluster.device, memory_bytes=smallest)
    config = plan(training, dataclasses.replace(cluster, device=device)).config
    assert config.topology == Topology(ranks_per_node=2, nodes_per_switch=2)
    assert config.optimizer == 8
    run = Run(case=models.mlp, config=config, accumulation=2)
    for found in simulate(8, train_without_reading, run, ranks_per_node=2):
        assert_same(found, plain(run, 8).parameters)
