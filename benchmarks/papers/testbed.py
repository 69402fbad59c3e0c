"""The test-beds of published results: clusters, and the speed of their software.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from mics_strategy.config import ShardConfig
from mics_strategy.planner.choice import simulate
from mics_strategy.planner.cluster import Cluster, Device
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.simulator import optimizer_seconds
from mics_strategy.planner.workload import Workload

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

_NCCL_EFFICIENCY = 0.88  # as in `clusters.toml`
# Bytes of memory traffic of a gradient's way to the wire in PyTorch's FSDP, by the bytes of the wire's dtype: joined
# into the flat buffer (read and written in 16 bits), cast, and divided by the ranks.
COPIED_BYTES = {4: 4 + 6 + 8, 2: 4 + 4}
# Of Adam kernel by kernel for each element: nine of 8 to 16 bytes, and the clipping's two (Composer,
# optim/decoupled_weight_decay.py).
UNFUSED_ADAM_BYTES = 104


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A test-bed of a published result.

    Attributes:
        cluster: Cluster, with the device as fast as the software of the time.
        deepspeed: Generation of DeepSpeed, "2021" for 0.5 or "2023".
        tokens: Tokens of a sample where a row states none.
        micro_batch: Samples of a forward on a rank where a row states none.
        num_micro_steps: Micro-steps where a row states none.
        world_sizes: Numbers of ranks of the paper's figures.
        assumptions: Assumptions for what the row does not state.
    """

    cluster: Cluster
    deepspeed: str
    tokens: int
    micro_batch: int
    num_micro_steps: int
    world_sizes: tuple[int, ...]
    assumptions: tuple[str, ...]


class NotPredictable(Exception):
    """The row states too little, or something that the planner has no model of."""


@functools.cache
def published_table() -> dict[str, Any]:
    """`published.toml`."""
    return tomllib.loads(resources.files(__package__).joinpath("published.toml").read_text())


def find_testbed(row: PublishedRow) -> Testbed:
    """The test-bed of a row.

    Raises:
        NotPredictable: Neither the device nor the paper's default is known.
    """
    assumptions = []
    name = _name_by_device(row)
    if name is None and not row.text("gpu_type"):
        name = _name_by_paper(row)
        assumptions.append("device not stated: the paper's default test-bed")
    if name is None:
        raise NotPredictable(f"device `{row.text('gpu_type')}` of paper `{row.text('paper')}` is not in the catalog")
    fields = published_table()["testbed"][name]
    cluster = Cluster.preset(fields["cluster"], nodes=1)
    if (ranks := row.ranks_per_node) and ranks != cluster.ranks_per_node:
        raise NotPredictable(f"{ranks} ranks in a node of {fields['cluster']}, which has {cluster.ranks_per_node}")
    cluster, linked = _with_links(cluster, row)
    factor = slowdown(fields["software"])
    assumptions += [f"arithmetic {factor:.2f} times slower than at the device's best: {fields['software']}", *linked]
    device = dataclasses.replace(
        cluster.device.with_best_kernels(),
        matmul_efficiency=cluster.device.matmul_efficiency / factor,
        memory_bytes_per_s=cluster.device.memory_bytes_per_s / factor,
        attention_share=next(benchmarks(fields["software"])).get("attention_share", 1.0),
    )
    return Testbed(
        cluster=dataclasses.replace(cluster, device=device, overlap_slowdown=published_table()["overlap_slowdown"]),
        deepspeed=fields["deepspeed"],
        tokens=fields["tokens"],
        micro_batch=fields["micro_batch"],
        num_micro_steps=fields["num_micro_steps"],
        world_sizes=tuple(fields["world_sizes"]),
        assumptions=tuple(assumptions),
    )


def _name_by_device(row: PublishedRow) -> str | None:
    """The test-bed whose words are in the column of devices, most words first."""
    best: tuple[int, str] | None = None
    for name, fields in published_table()["testbed"].items():
        words = [word for word in fields["devices"] if word in row.words("gpu_type")]
        ranks = row.ranks_per_node
        if not words or (ranks is not None and ranks != fields["ranks_per_node"]):
            continue
        points = 4 * max(map(len, words)) + 2 * (row.text("paper") in fields.get("papers", ()))
        points += any(word in row.text("interconnect_inter") for word in fields.get("interconnect", ()))
        if best is None or points > best[0]:
            best = (points, name)
    return best[1] if best else None


def _name_by_paper(row: PublishedRow) -> str | None:
    for name, fields in published_table()["testbed"].items():
        if row.text("paper") in fields.get("papers", ()):
            return str(name)
    return None


def _with_links(cluster: Cluster, row: PublishedRow) -> tuple[Cluster, list[str]]:
    """The cluster with the adapters that the row states."""
    stated = row.node_bytes_per_s
    link = cluster.inter_node
    if stated is None:
        return cluster, []
    bytes_per_s = stated / cluster.ranks_per_node * _NCCL_EFFICIENCY
    if math.isclose(bytes_per_s, link.bytes_per_s, rel_tol=0.05):
        return cluster, []
    link = dataclasses.replace(link, bytes_per_s=bytes_per_s, source="the row")
    return dataclasses.replace(cluster, inter_node=link), [f"{stated * 8 / 1e9:.0f} Gb/s a node, as the row states"]


@functools.cache
def slowdown(software: str) -> float:
    """Times by which kernels of a generation are slower than the simulator's.

    Published benchmarks of other groups measure it.
    """
    ratios = [_simulated(benchmark) / float(benchmark["tflop_per_s"]) for benchmark in benchmarks(software)]
    return sum(ratios) / len(ratios)


def benchmarks(software: str) -> Iterator[Mapping[str, Any]]:
    """The benchmarks of a generation of software."""
    yield from published_table()["software"][software]["benchmarks"]


def _simulated(benchmark: Mapping[str, Any]) -> float:
    """Simulated TFLOP per second and rank of a benchmark, without the optimizer."""
    shape = TransformerShape(
        name="benchmark",
        family=benchmark["family"],
        num_layers=benchmark["num_layers"],
        hidden_size=benchmark["hidden_size"],
        intermediate_size=4 * benchmark["hidden_size"],
        num_heads=benchmark["num_heads"],
        vocab_size=benchmark["vocab_size"],
        dropout=not benchmark.get("is_mpt", False),
        is_fused=benchmark.get("is_mpt", False),
    )
    ranks, num_micro_steps = int(benchmark.get("ranks", 1)), int(benchmark.get("num_micro_steps", 1))
    cluster = dataclasses.replace(
        Cluster.preset(benchmark.get("cluster", "dgx-a100"), nodes=1),
        device=dataclasses.replace(
            Device.named(benchmark["device"]).with_best_kernels(), attention_share=benchmark.get("attention_share", 1.0)
        ),
        ranks_per_node=ranks,
        overlap_slowdown=published_table()["overlap_slowdown"],
    )
    micro_batch = int(benchmark["micro_batch"])
    workload = Workload(
        model=describe(shape, benchmark["tokens"]),
        global_batch=micro_batch * num_micro_steps * ranks,
        micro_batch=micro_batch,
        recompute=benchmark["recompute"],
        reduce_dtype="bfloat16",
    )
    config = ShardConfig(params="world", grads="world", optimizer="world")
    step = simulate(workload, cluster, config)
    step_s = step.step_s - optimizer_seconds(step.job)
    if benchmark.get("is_mpt"):
        numel, bytes_per_s = workload.model.numel, cluster.device.sustained_bytes_per_s
        step_s += numel * (num_micro_steps * COPIED_BYTES[4] + UNFUSED_ADAM_BYTES / ranks) / bytes_per_s
    samples_per_s = micro_batch * num_micro_steps / step_s
    return megatron_flop(shape, benchmark["tokens"], recomputes=benchmark["recompute"]) * samples_per_s / 1e12


def megatron_flop(shape: TransformerShape, tokens: int, *, recomputes: bool) -> float:
    """FLOP of one sample as papers count them.

    Attention is not halved, and recomputation adds a third.

    Source:
        Megatron-LM (arXiv:2104.04473), equation 3; MiCS (arXiv:2205.00119), section 5.1.1; AMSP (arXiv:2311.00257),
        section VI-A3, without recomputation. For feed-forward networks of other widths, the weights of a layer in place
        of 12 h^2.
    """
    h, num_layers = shape.hidden_size, shape.num_layers
    layers = 6.0 * tokens * num_layers * (shape.layer_weights + 2 * tokens * h)
    return layers * (4 / 3 if recomputes else 1.0) + 6.0 * tokens * shape.vocab_size * h
