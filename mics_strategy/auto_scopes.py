"""Resolution of "auto" scopes and partitions for one job, by the planner, before the engine is built."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy.config import ShardConfig
from mics_strategy.engine.units import UnitSpec
from mics_strategy.planner.auto import AutoJob, choose
from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Topology


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
    if not config.is_auto:
        return RankDevice(memory_bytes=memory_bytes)
    from mics_strategy.planner.scope_search import stated_cluster  # which no other configuration loads

    return RankDevice(memory_bytes=memory_bytes, cluster=repr(stated_cluster(config)))


def choose_scopes(
    config: ShardConfig, modules: list[UnitSpec], topology: Topology, device: torch.device, memory_bytes: int
) -> tuple[Scopes, str]:
    """The scopes of this job, and what was chosen for ``"auto"`` and why; rank 0 prints the reasons.

    All arguments are equal on all ranks, so that all raise or none.

    Args:
        config: Configuration.
        modules: Units with their parameters.
        topology: Ranks of a node, and nodes of a switch.
        device: Device of this rank.
        memory_bytes: Smallest `RankDevice.memory_bytes` of all ranks.
    """
    world_size, summary = dist.get_world_size(), ""
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
        config, summary = choice.config, choice.summary
    return resolve_scopes(config, topology, world_size), summary


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
