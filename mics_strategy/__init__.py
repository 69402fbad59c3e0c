"""Sharded data parallelism for models that do not fit on one GPU, on clusters whose links between nodes are slow."""

from mics_strategy.config import ShardConfig
from mics_strategy.sharding.api import shard
from mics_strategy.sharding.sharded import Sharded
from mics_strategy.topology import Topology

__all__ = ["ShardConfig", "Sharded", "Topology", "shard"]
