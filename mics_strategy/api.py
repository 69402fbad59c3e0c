"""The function `shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy.auto_scopes import RankDevice, choose_scopes, rank_device
from mics_strategy.comm.codecs.format import LARGEST_BOUND_BLOCK
from mics_strategy.comm.consensus import check_equal, run_and_gather
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.config import ShardConfig
from mics_strategy.config_checks import CODEC_FIELDS
from mics_strategy.engine.aliases import retire
from mics_strategy.engine.autograd import wrap_autograd
from mics_strategy.engine.bucket_specs import BucketRules
from mics_strategy.engine.build import (
    BuildContext,
    add_sharded_parameters,
    build_engine,
    build_units,
    make_bucket_specs,
    plan_memory,
)
from mics_strategy.engine.exact_dtensor import mean_gradient
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.memory import MemoryTracker
from mics_strategy.engine.module_buffers import BufferSpec, agreed_specs, buffer_specs
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.setup import guards, materialize
from mics_strategy.engine.setup.generation import prepare_generation
from mics_strategy.engine.setup.materialize import Initializer
from mics_strategy.engine.setup.resolve import node_name, resolve_topology, target_device
from mics_strategy.engine.state_dict import load_full_values
from mics_strategy.engine.units import UnitRule, UnitSpec, find_units
from mics_strategy.errors import ConfigError
from mics_strategy.scopes import Scopes, unused_codecs
from mics_strategy.tuning.autotune import autotune, report
from mics_strategy.tuning.coalesce import choose_coalescing


def shard(
    model: nn.Module,
    config: ShardConfig | str = "mics",
    *,
    units: UnitRule = "auto",
    device: torch.device | str = "auto",
    initializer: Initializer | str = "auto",
    **fields: Any,
) -> Sharded:
    """Shard the model states of `model` in place. Collective.

    Afterwards `model.parameters()` are DTensors with the same names and shapes. Forward, backward, clipping, stepping
    and evaluation work as before. Every rank must train on different data.

    Args:
        model: Model with values, or on the meta device. Where values differ between ranks, rank 0's are used.
        config: Configuration, or the name of a preset.
        units: Modules that form units, whose parameters share collectives: ``"auto"`` (the layer classes that the model
            repeats), module classes or their names, a predicate of a module, or the smallest number of parameters of a
            unit.
        device: Device to train on. ``"auto"`` is this rank's GPU if the process group is NCCL's (the one it is bound
            to by `device_id` or by torch 2.15, else that of `torch.cuda.set_device`, else number ``LOCAL_RANK``, or
            ``SLURM_LOCALID`` without one), else the CPU. A GPU becomes the current device of the process.
        initializer: Function that initializes one module on the meta device. It is called with each module that owns
            parameters or buffers, inner ones first. ``"auto"`` uses `_init_weights` inside of models of transformers
            and each module's `reset_parameters` elsewhere, and rank 0 prints which.
        **fields: Fields of `ShardConfig` in place of those of `config`, such as ``partition_size=2``.

    Returns:
        The handle of the sharded model.

    Raises:
        ConfigError: An option does not fit the job, the model cannot be sharded, or ranks passed different arguments.
            Raised on every rank, before any collective except those that compare ranks.

    Cost:
        All memory that the engine will ever use (`Sharded.memory`), and a broadcast of the parameters that differ
        between ranks. To measure `hierarchical="auto"`: up to about a second. To measure `coalesce="auto"` on NCCL:
        twelve all-gathers and reduce-scatters of every shape of unit. On a GPU, codecs are compiled.
    """
    _check_context(config, fields)
    found, by_rank = run_and_gather(lambda: _checked(model, config, fields, units, device, initializer))
    resolved, target, modules = found
    guards.check_same_model(model, [setup.arguments["model"] for setup in by_rank])
    check_equal([setup.arguments for setup in by_rank])
    agreed_specs([setup.buffers for setup in by_rank])
    topology = resolve_topology(resolved, [setup.node for setup in by_rank])
    memory_bytes = min(setup.device.memory_bytes for setup in by_rank)
    scopes, chosen = choose_scopes(resolved, modules, topology, target, memory_bytes)
    _log_codecs(resolved, scopes)
    groups = _make_groups(scopes, target, by_rank[0].seed)
    context = BuildContext(config=resolved, groups=groups, device=target, memory=MemoryTracker(), chosen=chosen)
    with torch.inference_mode(False), torch.no_grad():
        return _build(model, modules, context, initializer)


def _check_context(config: ShardConfig | str, fields: dict[str, Any]) -> None:
    """Refuse a call without a process group, or under the meta device."""
    if not (dist.is_available() and dist.is_initialized()):
        ShardConfig.of(config, **fields)  # a wrong name is the first thing to say
        raise ConfigError(
            "`shard()` was called before the process group exists. Call `init_process_group()` first, in a script that "
            "torchrun or another launcher starts."
        )
    if torch.get_default_device().type == "meta":
        raise ConfigError(
            "`shard()` was called under `torch.device('meta')`, where all new tensors are without memory. Build the "
            "model there, and call `shard()` after the context has ended."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankSetup:
    """Properties of one rank that all ranks must know.

    Attributes:
        arguments: Arguments of `shard` as text, by name. They must be equal on all ranks.
        node: Name of the rank's node.
        device: Memory, which may differ between ranks.
        seed: Seed of the rank's random numbers.
        buffers: Module buffers of the model. Persistent ones must be equal on all ranks.
    """

    arguments: dict[str, str]
    node: str
    device: RankDevice
    seed: int
    buffers: dict[str, BufferSpec]


def _checked(
    model: nn.Module,
    config: ShardConfig | str,
    fields: dict[str, Any],
    units: UnitRule,
    device: torch.device | str,
    initializer: Initializer | str,
) -> tuple[tuple[ShardConfig, torch.device, list[UnitSpec]], _RankSetup]:
    """Check the arguments of `shard` as far as one rank can.

    Returns the configuration, the device and the units; and the `_RankSetup` of this rank.
    """
    resolved = ShardConfig.of(config, **fields)
    _ = resolved.grad_codec_steps  # raises where the training's length is missing
    materialize.check_initializer(initializer)
    target = target_device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target)  # streams, contexts and new tensors belong there; so do objects that NCCL gathers
    guards.check_model(model, target)
    modules = find_units(model, units)
    resolved.outer_round.check(sum(module.is_trained for module in modules))
    device_of_rank = rank_device(resolved, target, model)
    arguments = {
        **resolved.describe(),
        "model": guards.model_fingerprint(model),
        "gradients of before": guards.gradients_fingerprint(model),
        "meta tensors": guards.count_meta_tensors(model),
        "units": ", ".join(module.name for module in modules),
        "cluster": device_of_rank.cluster,
    }
    setup = _RankSetup(
        arguments=arguments,
        node=node_name(),
        device=device_of_rank,
        seed=torch.initial_seed(),
        buffers=buffer_specs(model),
    )
    return (resolved, target, modules), setup


def _log_codecs(config: ShardConfig, scopes: Scopes) -> None:
    """Print codecs that quantize nothing here or whose blocks span parameters."""
    for name in CODEC_FIELDS if dist.get_rank() == 0 else ():
        codec = config.codec_of(name)
        if codec is not None and codec.bound_numel == 1:
            print(
                f"`{name}={codec}`: several parameters share a scale, and those with small values may become 0. Use "
                f"blocks of {LARGEST_BOUND_BLOCK} values or fewer, which never hold two parameters.",
                flush=True,
            )
    for name in unused_codecs(config, scopes) if dist.get_rank() == 0 else ():
        links = f"`codec_links={config.codec_links!r}`"
        print(f"`{name}={getattr(config, name)!r}` encodes nothing in this job of one node, with {links}.", flush=True)


def _make_groups(scopes: Scopes, device: torch.device, seed: int) -> ProcessGroups:
    """Make the process groups of this job, after tuning. Rank 0 prints the results."""
    resources = CommResources(scopes.job_size, device)
    results = autotune(scopes, resources)
    tuning_report = report(results)
    if resources.rank == 0 and tuning_report:
        print(tuning_report, flush=True)
    thresholds = {(result.collective, result.span): result.from_bytes for result in results}
    return ProcessGroups(scopes.with_tuning(thresholds), resources, seed)


def _build(model: nn.Module, modules: list[UnitSpec], context: BuildContext, initializer: Initializer | str) -> Sharded:
    """Allocate memory and load first values. `Sharded` installs the engine's hooks and guards."""
    config, groups = context.config, context.groups
    rules = BucketRules.of(groups.scopes, is_stream_ordered=groups.is_stream_ordered)
    specs = choose_coalescing(make_bucket_specs(modules, config, rules), config, groups, context.device)
    plan = plan_memory(modules, specs, config, groups.scopes, is_stream_ordered=groups.is_stream_ordered)
    built_units = build_units(modules, plan, context)
    materialize.materialize(
        model, list(zip(modules, built_units, strict=True)), context.groups, initializer, context.device
    )
    add_sharded_parameters(built_units, modules, context)
    engine = build_engine(built_units, plan, context)
    sharded = Sharded(model, context, engine, modules, _target_class(config))
    sharded.internals.set_references()
    if context.config.broadcast_buffers:
        sharded.buffers.synchronize_islands()
    wrap_autograd()
    guards.refuse_other_engines()
    guards.block_conversions(unit.module for unit in built_units)
    guards.block_copies(model.modules())
    load_full_values(model)
    guards.block_saving_shards(model.modules())
    guards.reset_before_access(model, engine.reset_after_error)
    guards.mark_sharded(model, sharded)
    _take_over_gradients(modules, sharded)
    retire((entry.name, entry.parameter) for module in modules for entry in module.parameters)
    prepare_generation(model, sharded.register_forward_method, is_forward_collective=sharded.scopes.params > 1)
    if context.device.type == "cuda":
        context.groups.resources.connect()
    sharded.internals.target.follow(model, sharded.buffers)
    context.groups.traffic_log.drain()
    return sharded


def _target_class(config: ShardConfig) -> type[OptimizerTarget]:
    """The engine's side of optimizer steps. Those of other algorithms are loaded where they are asked for."""
    if config.second_hop == "delayed":
        from mics_strategy.engine.optimizer.delayed import DelayedTarget

        return DelayedTarget
    if config.outer_every:
        from mics_strategy.outer.target import OuterTarget

        return OuterTarget
    return OptimizerTarget


def _take_over_gradients(modules: list[UnitSpec], sharded: Sharded) -> None:
    """Give sharded parameters the mean of the ranks' gradients of before, to which the next backward adds."""
    for plain in (entry.parameter for module in modules for entry in module.parameters):
        own = sharded.internals.sharded_param_for(plain)
        if own is not None and plain.grad is not None and plain.requires_grad:
            own.grad = mean_gradient(plain.grad.to(sharded.device).to_dense(), own)
