"""Small models, clusters and jobs for tests of the planner."""

import dataclasses
from typing import Any

from mics_strategy.config import ShardConfig
from mics_strategy.planner.cluster import Cluster, Device, Link
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.simulator import Job
from mics_strategy.planner.space import scopes_of, topology_of
from mics_strategy.planner.workload import Workload

TOKENS = 32


def tiny_llama(**changes: Any) -> ModelDescription:
    sizes = {"num_layers": 4, "hidden_size": 64, "intermediate_size": 172, "num_heads": 4, "vocab_size": 256}
    shape = TransformerShape(**{"name": "tiny", "family": "llama", "tie_embeddings": False, **sizes, **changes})
    return describe(shape, TOKENS)


def tiny_cluster(nodes: int = 2, ranks_per_node: int = 2, **changes: Any) -> Cluster:
    """Links as slow beside the compute of `tiny_llama` as those of a real cluster are beside a real model."""
    device = Device(
        name="tiny", memory_bytes=10**10, memory_bytes_per_s=1e10, peak_flop_per_s=1e11, matmul_efficiency=0.5
    )
    cluster = Cluster(
        name="lab",
        device=device,
        ranks_per_node=ranks_per_node,
        num_nodes=nodes,
        intra_node=Link(bytes_per_s=1e9, latency_s=1e-6, source="a test"),
        inter_node=Link(bytes_per_s=1e8, latency_s=1e-5, source="a test"),
    )
    return dataclasses.replace(cluster, **changes)


def workload(**changes: Any) -> Workload:
    return Workload(**{"model": tiny_llama(), "global_batch": 16, "micro_batch": 1, "recompute": False, **changes})


def job(config: ShardConfig, cluster: Cluster | None = None, **changes: Any) -> Job:
    cluster, training = cluster or tiny_cluster(), workload(**changes)
    dtypes = {"param_dtype": training.param_dtype, "reduce_dtype": training.reduce_dtype}
    config = config.replace(topology=topology_of(cluster), **dtypes)
    return Job(
        workload=training,
        cluster=cluster,
        config=config,
        scopes=scopes_of(config, cluster),
        micro_batch=int(training.micro_batch),
        recompute=training.recompute,
    )
