"""Resolution of "auto" for one job: the device, the topology, the scopes."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mics_strategy.errors import ConfigError
from mics_strategy.planner.auto import AutoJob, choose, stated_cluster
from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import RankLocation, Switches, Topology, topology_from_locations

if TYPE_CHECKING:
    from torch import nn

    from mics_strategy.config import ShardConfig
    from mics_strategy.engine.units import UnitSpec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "NODE_RANK")


def target_device(device: torch.device | str) -> torch.device:
    """The device to train on.

    Args:
        device: Argument of `shard()`; ``"auto"`` is this rank's GPU if the process group serves CUDA, else the CPU.

    Raises:
        ConfigError: The backend of the process group does not serve the device.
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
    return target


def _local_gpu() -> torch.device:
    """The GPU of this rank: the process group's, the current one, or by `LOCAL_RANK`.

    A current device 0 counts as the default. Then `LOCAL_RANK` decides among the devices that the process can see.
    """
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return torch.device("cuda", bound.index)
    current = torch.cuda.current_device()
    if current == 0 and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """What ``"auto"`` depends on and one rank alone knows.

    Attributes:
        memory_bytes: Bytes of memory for the training: those of its GPU, or all of its machine, which the ranks of the
            node share. 0 where nothing is ``"auto"``.
        cluster: Cluster whose links count, as text; empty where no scopes are ``"auto"``.
    """

    memory_bytes: int = 0
    cluster: str = ""


def rank_device(config: ShardConfig, device: torch.device, model: nn.Module) -> RankDevice:
    """Read the memory and the cluster of one rank, where ``"auto"`` depends on them.

    Raises:
        ConfigError: `config.cluster` does not exist.
    """
    if not (config.is_auto or config.has_auto_partition):
        return RankDevice()
    memory_bytes = free_gpu_bytes(device, model) if device.type == "cuda" else _machine_bytes()
    return RankDevice(memory_bytes=memory_bytes, cluster=repr(stated_cluster(config)) if config.is_auto else "")


def choose_scopes(
    config: ShardConfig, modules: list[UnitSpec], topology: Topology, device: torch.device, memory_bytes: int
) -> Scopes:
    """The scopes of this job; rank 0 prints what was chosen for ``"auto"``.

    All arguments are equal on all ranks, so that all raise or none.

    Args:
        config: Configuration.
        modules: Units with their parameters.
        topology: Ranks of a node, and nodes of a switch.
        device: Device of this rank.
        memory_bytes: Smallest `RankDevice.memory_bytes` of all ranks.
    """
    world_size = dist.get_world_size()
    if config.is_auto or config.has_auto_partition:
        topology.check_world(world_size)
        is_gpu = device.type == "cuda"
        job = AutoJob(
            model=description_of(modules),
            topology=topology,
            world_size=world_size,
            memory_bytes=memory_bytes if is_gpu else memory_bytes // topology.ranks_per_node,
            backend="nccl" if is_gpu else "gloo",
        )
        choice = choose(config, job)
        if dist.get_rank() == 0 and choice.reasons:
            print(choice.reasons, flush=True)
        config = choice.config
    return resolve_scopes(config, topology, world_size)


def description_of(modules: list[UnitSpec]) -> ModelDescription:
    """The parameters of the units, the root first, without what they compute."""
    kinds: dict[tuple[ParameterShape, ...], str] = {}
    units = []
    for module in modules:
        parameters = tuple(
            ParameterShape(
                name=entry.name,
                shape=tuple(entry.parameter.shape),
                is_trained=entry.parameter.requires_grad,
                dtype=entry.parameter.dtype,
            )
            for entry in module.parameters
        )
        shapes = tuple(dataclasses.replace(parameter, name="") for parameter in parameters)
        units.append(
            UnitModel(
                name=module.name,
                kind=kinds.setdefault(shapes, str(len(kinds))),
                parameters=parameters,
                forward_flop=0.0,
                saved_bytes=0,
                input_bytes=0,
                working_bytes=0,
                depth=module.depth,
            )
        )
    return ModelDescription(
        name="", units=tuple(units), tokens_per_sample=1, model_flop_per_sample=0.0, activation_dtype_bytes=4
    )


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_gpu_bytes(device: torch.device, model: nn.Module) -> int:
    """Bytes of a GPU that this process can use once the model is sharded.

    Its present parameters are freed then. Other tensors of the process, and other processes, keep theirs.
    """
    model_bytes = sum(p.numel() * p.itemsize for p in model.parameters() if p.device == device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    kept_bytes = torch.cuda.memory_allocated(device) - model_bytes
    allowed_bytes = round(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    return min(free_bytes + torch.cuda.memory_reserved(device), allowed_bytes) - kept_bytes
