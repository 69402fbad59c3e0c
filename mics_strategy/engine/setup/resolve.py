"""Resolution of "auto" for one job: the device and the topology."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.topology import RankLocation, Switches, Topology, topology_from_locations

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")


def target_device(device: torch.device | str) -> torch.device:
    """The device to train on.

    Args:
        device: Argument of `shard()`; ``"auto"`` is this rank's GPU if the process group serves CUDA, else the CPU.

    Raises:
        ConfigError: The process group does not serve the device, or is bound to another GPU.
    """
    backend = dist.get_backend()
    serves_cuda = torch.cuda.is_available() and ("nccl" in backend or backend in ("undefined", "fake"))
    if device == "auto":
        target = torch.device("cuda" if serves_cuda and backend != "fake" else "cpu")
    else:
        target = torch.device(device)
    if target.type == "cuda" and serves_cuda and target.index is None:
        target = _local_gpu()
    if target.type != "cpu" and not (target.type == "cuda" and serves_cuda):
        raise ConfigError(
            f"`device={target}` cannot be used with the process group backend {backend!r} on this machine. Use NCCL "
            "for CUDA, or gloo for the CPU."
        )
    bound = _bound_gpu()
    if target.type == "cuda" and bound not in (None, target):
        raise ConfigError(
            f"`device={target}` was asked for, but the default process group is bound to {bound}, and NCCL refuses "
            "tensors of another GPU. `device_id` of `init_process_group` binds it; without one, torch 2.15 takes "
            f"LOCAL_RANK's. Call `init_process_group(device_id=torch.device('{target}'))`, or leave `device` out."
        )
    return target


def _bound_gpu() -> torch.device | None:
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return bound if bound is not None and bound.type == "cuda" else None


def _local_gpu() -> torch.device:
    """The GPU of this rank: the process group's, the current one, or by `LOCAL_RANK` or `SLURM_LOCALID`.

    A current device 0 counts as the default. Then the launcher decides among the devices that the process can see.
    """
    if (bound := _bound_gpu()) is not None:
        return bound
    current = torch.cuda.current_device()
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    if current == 0 and local_rank is not None:
        return torch.device("cuda", int(local_rank) % torch.cuda.device_count())
    return torch.device("cuda", current)


def resolve_topology(config: ShardConfig, nodes: Iterable[str]) -> Topology:
    """The topology of `config`, or the one of the ranks' nodes.

    Args:
        config: Configuration, whose topology may be ``"auto"`` or `Switches`.
        nodes: Name of each rank's node; see `node_name`.

    Raises:
        ConfigError: Nodes hold different numbers of ranks, or the ranks of a node are not consecutive.
    """
    if isinstance(config.topology, Topology):
        return config.topology
    topology = topology_from_locations([RankLocation(node=node) for node in nodes])
    if isinstance(config.topology, Switches):
        return dataclasses.replace(topology, nodes_per_switch=config.topology.nodes_per_switch)
    return topology


def node_name() -> str:
    """A text that is equal on the ranks of one node and differs between nodes.

    It holds the host name, the boot id of the kernel, because containers may share a host name, and the launcher's node
    number, because a launcher may simulate several nodes on one host.
    """
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""
    node_number = next((f" {name}={os.environ[name]}" for name in _NODE_VARIABLES if name in os.environ), "")
    return f"{socket.gethostname()} {boot_id[:8]}{node_number}"
