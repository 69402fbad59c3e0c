"""Where does each rank of this job run?"""

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
    """The explicit topology of `config`, or the one that the ranks' environment describes.

    Cost: one object gather over the world when the topology is not explicit.

    Raises:
        ConfigError: Uneven or cyclic placement of ranks on nodes.
    """
    if isinstance(config.topology, Topology):
        return config.topology
    return topology_from_locations(gather_objects(RankLocation(node=node_name())))


def node_name() -> str:
    """A text that is equal on, and only on, the ranks of one node.

    The host and the boot of its kernel, because hosts in containers may share a name; and the launcher's number of the
    node, because a launcher may put several "nodes" on one host.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    number = next((f" {name}={os.environ[name]}" for name in _NODE_VARIABLES if name in os.environ), "")
    return f"{socket.gethostname()} {boot[:8]}{number}"
