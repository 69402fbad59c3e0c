"""Named models and clusters, and clusters in files."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.planner.catalog import describe_model, model_names, model_shape, read_table
from mics_strategy.planner.choice import simulate, step_lines
from mics_strategy.planner.cluster import MEMORY_SHARE, TYPICAL_DEVICE, Cluster
from mics_strategy.planner.model_formulas import TransformerShape
from mics_strategy.planner.quantities import Quantity, parse_quantity
from mics_strategy.planner.workload import Workload
from recipes.flops import megatron_model_flop, megatron_recomputed_flop

BILLIONS = {  # parameters, by the standard counts of the published shapes
    "bert-10b": 10.08,
    "bert-15b": 15.04,
    "bert-20b": 20.33,
    "bert-50b": 50.27,
    "bert-1.5b": 1.53,
    "roberta-20b": 19.794,
    "gpt2-20b": 19.77,
    "wide_resnet-3b": 3.036,
    "llama-7b": 6.738,
    "meta-llama-style-7b": 6.738,
    "llama-13b": 13.016,
    "llama-30b": 32.529,
    "llama-33b": 32.529,
    "amsp-llama-30b": 27.573,
    "llama-65b": 65.286,
    "llama2-70b": 68.977,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "gpt-18b": 18.435,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_named_models_have_their_published_size(name: str) -> None:
    assert describe_model(name, 512).numel / 1e9 == pytest.approx(BILLIONS[name], rel=0.001)


def test_every_model_is_in_the_table_of_sizes() -> None:
    assert {*model_names()} == {*BILLIONS}


def test_names_are_found_in_any_case_and_others_get_suggestions() -> None:
    assert model_shape("LLaMA-7B") == model_shape("llama-7b")
    with pytest.raises(ConfigError, match=r"`llama-7bb` is no model.* Did you mean llama-7b"):
        model_shape("llama-7bb")
    with pytest.raises(ConfigError, match=r"Did you mean p4d.24xlarge"):
        Cluster.preset("p4d24xlarge")


def test_flop_of_published_tables() -> None:
    """AMSP's table V implies 45.88 and 86.55 GFLOP for each token of LLaMA 7B and 13B, and 180.5 of its 30B."""
    for name, gflop in (("llama-7b", 45.88), ("llama-13b", 86.55), ("amsp-llama-30b", 182.4)):
        shape = model_shape(name)
        assert isinstance(shape, TransformerShape)
        numbers = {"s": 4096, "L": shape.num_layers, "h": shape.hidden_size, "V": shape.vocab_size}
        model_flop = megatron_model_flop(**numbers)
        assert model_flop / 4096 / 1e9 == pytest.approx(gflop, abs=0.05)
        assert megatron_recomputed_flop(**numbers) / model_flop > 1.3


def test_measured_bandwidths_are_the_papers() -> None:
    cluster = Cluster.preset("p3dn.24xlarge", nodes=8)
    assert cluster.intra_node.bytes_per_s == pytest.approx(128e9, rel=0.001)
    assert cluster.inter_node.bytes_per_s == pytest.approx(11e9 / 8)
    assert (cluster.world_size, cluster.device.name) == (64, "v100-32gb")


@pytest.mark.parametrize("name", Cluster.preset_names())
def test_every_cluster_is_complete_and_has_its_sources(name: str) -> None:
    cluster = Cluster.preset(name, nodes=2)
    assert cluster.num_nodes == 2
    assert cluster.intra_node.bytes_per_s > cluster.inter_node.bytes_per_s
    assert all(link.source and link.latency_s > 0 for link in (cluster.intra_node, cluster.inter_node))
    assert 20e9 < cluster.device.memory_bytes < 320e9
    assert 0.5 < cluster.device.sustained_efficiency < 1
    assert cluster.device.sustained_source


def test_adapters_of_the_dgx2_test_bed_add_up() -> None:
    speeds = [Cluster.preset(f"zeropp-dgx2-{n}ib").inter_node.bytes_per_s / n for n in (1, 2, 4, 8)]
    assert speeds == pytest.approx([100e9 / 8 / 16 * 0.88] * 4)


FIELDS: dict[str, Any] = {
    "ranks_per_node": 4,
    "nodes": 3,
    "device": {
        "name": "mine",
        "memory": "10 GiB",
        "memory_bandwidth": "1 TB/s",
        "peak": "100 TFLOP/s",
        "matmul_efficiency": 0.5,
    },
    "intra_node": {"bandwidth": "100 GB/s", "latency": "2 us", "source": "a test"},
    "inter_node": {"node_bandwidth": "100 Gb/s", "efficiency": 0.8, "latency": 2e-5, "source": "a test"},
    "slowest_node_factor": 1.25,
}
YAML = """
like: p4d.24xlarge
nodes: 4
inter_node: {node_bandwidth: 100 Gb/s, latency: 20 us, source: a slower network}
"""


def test_a_file_states_units(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps(FIELDS))
    cluster = Cluster.load(path)
    assert (cluster.name, cluster.world_size, cluster.slowest_node_factor) == ("lab", 12, 1.25)
    assert (cluster.device.memory_bytes, cluster.device.memory_bytes_per_s) == (10 * 2**30, 1e12)
    assert (cluster.inter_node.bytes_per_s, cluster.inter_node.latency_s) == (pytest.approx(2.5e9), 2e-5)
    assert cluster.device.sustained_flop_per_s == pytest.approx(50e12 * 0.93)
    path.write_text(json.dumps({**FIELDS, "device": {**FIELDS["device"], "sustained_efficiency": 0.8}}))
    device = Cluster.load(path).device
    assert device.sustained_flop_per_s == pytest.approx(40e12)
    assert device.sustained_bytes_per_s == pytest.approx(0.8e12 * MEMORY_SHARE)


def test_a_file_changes_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(YAML)
    cluster, preset = Cluster.load(path), Cluster.preset("p4d.24xlarge", nodes=4)
    assert (cluster.device, cluster.intra_node, cluster.num_nodes) == (preset.device, preset.intra_node, 4)
    assert cluster.inter_node.bytes_per_s == pytest.approx(12.5e9 / 8 * 0.88)
    assert cluster.assumed == ("efficiency 0.88 of inter_node",)


def test_a_file_without_efficiencies_has_those_of_the_catalog() -> None:
    devices = read_table("clusters.toml")["device"].values()
    for name, share in TYPICAL_DEVICE.items():
        assert statistics.median(fields[name] for fields in devices) == share
    device = {name: value for name, value in FIELDS["device"].items() if name != "matmul_efficiency"}
    mine = Cluster.from_fields({"name": "mine", **FIELDS, "device": device})
    typical = [mine.device.matmul_efficiency, mine.device.sustained_efficiency, mine.device.attention_share]
    assert typical == [*TYPICAL_DEVICE.values()]
    links = [Cluster.preset("p4d.24xlarge").intra_node, Cluster.preset("p3dn.24xlarge").inter_node]
    assert mine.intra_node.bytes_per_s / 100e9 == links[0].bytes_per_s / 300e9
    assert len(mine.assumed) == 4
    training = Workload(model=describe_model("bert-1.5b", 128), global_batch=12, micro_batch=1, recompute=True)
    step = simulate(training, mine, ShardConfig.preset("zero3"))
    assert "does not state it: matmul_efficiency 0.74, sustained_efficiency 0.93, " in "\n".join(step_lines(step))
    stated = {**device, **TYPICAL_DEVICE}
    assert Cluster.from_fields({"name": "mine", **FIELDS, "device": stated}).assumed == (
        "efficiency 0.853 of intra_node",
    )


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_a_file_of_one_node_states_no_link_between_nodes(ranks_per_node: int) -> None:
    needed = ("device", "intra_node") if ranks_per_node > 1 else ("device",)
    fields = {"name": "mine", "ranks_per_node": ranks_per_node, **{name: FIELDS[name] for name in needed}}
    training = Workload(model=describe_model("bert-1.5b", 128), global_batch=12, micro_batch=1, recompute=True)
    box = Cluster.from_fields(fields)
    linked = Cluster.from_fields({**fields, "inter_node": FIELDS["inter_node"]})
    steps = [simulate(training, cluster, ShardConfig.preset("zero3")) for cluster in (box, linked)]
    assert steps[0].step_s == steps[1].step_s
    with pytest.raises(ConfigError, match=f"2 nodes of {ranks_per_node} ranks were asked for, and cluster mine"):
        box.with_nodes(2)
    with pytest.raises(ConfigError, match="`inter_node` of cluster mine is missing"):
        Cluster.from_fields({**fields, "nodes": 2})
    assert linked.with_nodes(2).num_nodes == 2


def test_a_file_of_nodes_of_one_rank_states_no_link_inside_a_node() -> None:
    link = {"bandwidth": "10 Gb/s", "latency": "30 us"}  # nor where its figures are from
    fields = {"name": "mine", **FIELDS, "ranks_per_node": 1, "inter_node": link}
    training = Workload(model=describe_model("bert-1.5b", 128), global_batch=12, micro_batch=1, recompute=True)
    inside = fields.pop("intra_node")
    steps = [
        simulate(training, Cluster.from_fields(stated), ShardConfig.preset("zero3"))
        for stated in (fields, {**fields, "intra_node": inside})
    ]
    assert steps[0].step_s == steps[1].step_s
    assert steps[0].job.cluster.assumed[-2:] == ("attention_share 0.75", "efficiency 0.88 of inter_node")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intra_nodes": {}}, "`intra_nodes` is no field.*Did you mean intra_node"),
        ({"device": "a100-40"}, "no device.*Did you mean a100-40gb"),
        ({"device": {**FIELDS["device"], "sustained_efficiency": 80}}, "`sustained_efficiency`.*not a share"),
        ({"ranks_per_node": 0}, "`ranks_per_node=0`"),
        ({"nodes": "two"}, "`num_nodes='two'`"),
        ({"intra_node": {"latency": "2 us", "source": "x"}}, "`bandwidth` and `node_bandwidth`"),
        ({"intra_node": {"bandwidth": "100 GB", "latency": "2 us", "source": "x"}}, "12.5 GB/s or 100 Gb/s"),
        ({"intra_node": {"bandwidth": "1 GB/s", "latency": "2 us", "source": "x", "efficiency": 1.2}}, "not a share"),
        ({"intra_node": {"bandwidth": "1 GB/s"}}, "`latency`.*is missing"),
        ({"intra_node": None}, "`intra_node`.*is missing"),
        ({"slowest_node_factor": 0.5}, "slowest_node_factor"),
        ({"nodes_per_switch": 4}, "nodes_per_switch"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.from_fields({"name": "lab", **FIELDS, **changes})


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("a.toml", "= 1"), ("a.yaml", "a: ["), ("a.txt", "")])
def test_a_broken_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        Cluster.load(tmp_path / name)
    with pytest.raises(ConfigError, match="no file"):
        Cluster.load(tmp_path / "missing.yaml")


def test_quantities_have_decimal_and_binary_prefixes_bits_and_bytes() -> None:
    assert parse_quantity("100 Gb/s", Quantity.BYTES_PER_S, "x") == 12.5e9
    assert parse_quantity("100Gbps", Quantity.BYTES_PER_S, "x") == 12.5e9
    assert parse_quantity("100 Gbit/s", Quantity.BYTES_PER_S, "x") == 12.5e9
    assert parse_quantity("8e10", Quantity.BYTES, "x") == 8e10  # text, as YAML reads it
    assert parse_quantity("2 GiB", Quantity.BYTES, "x") == 2**31
    assert parse_quantity("3.5 us", Quantity.SECONDS, "x") == pytest.approx(3.5e-6)
    assert parse_quantity(7, Quantity.SECONDS, "x") == 7.0
    with pytest.raises(ConfigError, match="x is 165, which is next to nothing without a unit"):
        parse_quantity(165, Quantity.FLOP_PER_S, "x")
    for text in ("3.4 s", "-1 GB/s", "1.2.3 GB/s", "fast", True, None):
        with pytest.raises(ConfigError):
            parse_quantity(text, Quantity.BYTES_PER_S, "x")


def test_all_named_text_models_fit_their_positions() -> None:
    for name in model_names():
        assert describe_model(name, 512, torch.float32.itemsize).model_flop_per_sample > 0
    with pytest.raises(ConfigError, match="512 positions"):
        describe_model("bert-10b", 513)


@pytest.mark.parametrize(
    ("product", "device", "gbit_per_s"),
    [
        ("rtx3090-2x", "rtx3090-24gb", 1),
        ("rtx3090-2x-2.5gbe", "rtx3090-24gb", 2.5),
        ("rtx4090-2x", "rtx4090-24gb", 10),
        ("rtx5090-2x", "rtx5090-32gb", 25),
        ("a10-4x", "a10-24gb", 25),
        ("l4-8x", "l4-24gb", 40),
        ("thunderbolt-spark", "gb10-128gb", 20),
    ],
)
def test_what_people_own_is_in_the_catalog(product: str, device: str, gbit_per_s: float) -> None:
    cluster = Cluster.preset(product, nodes=2)
    node_bytes_per_s = cluster.inter_node.bytes_per_s * cluster.ranks_per_node / 0.88
    assert cluster.device.name == device
    assert node_bytes_per_s * 8 == pytest.approx(gbit_per_s * 1e9)
