"""Discovery of the node on which each rank runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.topology import RankLocation, Topology, topology_from_locations

if TYPE_CHECKING:
    from mics_strategy.config import ShardConfig

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")


def discover_topology(config: ShardConfig) -> Topology:
    """The topology of `config`, or the one of the ranks' environments. Collective.

    Cost:
        One gather of a small object over the world, unless `config.topology` is a `Topology`.

    Raises:
        ConfigError: Nodes hold different numbers of ranks, or the ranks of a node are not consecutive.
    """
    if isinstance(config.topology, Topology):
        return config.topology
    return topology_from_locations(gather_objects(RankLocation(node=node_name())))


def node_name() -> str:
    """A text that is equal on the ranks of one node and differs between nodes.

    It holds the host name, the boot id of the kernel, because containers may share a host name, and the launcher's node
    number, because a launcher may simulate several nodes on one host.
    """
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    node_number = next((f" {name}={os.environ[name]}" for name in _NODE_VARIABLES if name in os.environ), "")
    return f"{socket.gethostname()} {boot_id[:8]}{node_number}"
