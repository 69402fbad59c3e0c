"""How is a model sharded?"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy.agreement import gather_objects, on_every_rank, require_same
from mics_strategy.collectives.calibration import report
from mics_strategy.collectives.codecs import LARGEST_BOUND_BLOCK
from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.mesh import Mesh
from mics_strategy.places import discover_topology
from mics_strategy.scopes import Scopes, idle_codecs, resolve_scopes
from mics_strategy.sharding import guard, materialize, validate
from mics_strategy.sharding.advice import advise, with_scopes_of
from mics_strategy.sharding.autograd_entry import wrap_autograd
from mics_strategy.sharding.buffers import Memory
from mics_strategy.sharding.build import Site, add_sharded_parameters, build_engine, build_units
from mics_strategy.sharding.generation import prepare_generation
from mics_strategy.sharding.hooks import install
from mics_strategy.sharding.initialize import Initializer
from mics_strategy.sharding.sharded import Sharded
from mics_strategy.sharding.survey import device_memory_bytes, workload
from mics_strategy.sharding.wrap import UnitModule, UnitRule, find_units
from mics_strategy.topology import Topology


def shard(
    model: nn.Module,
    config: ShardConfig | str = "mics",
    *,
    units: UnitRule = "auto",
    device: torch.device | str = "auto",
    initializer: Initializer | str = "auto",
) -> Sharded:
    """Shard the model states of `model` in place.

    Afterwards `model.parameters()` are DTensors with the same names and shapes, and forward, backward,
    clipping, stepping and evaluation work as before. Every rank must be given different data.

    Args:
        model: With values, equal or not (rank 0's are taken), or on the meta device.
        config: Which state is sharded over which ranks; a preset's name for short.
        units: Modules whose parameters travel together: ``"auto"`` (the layer classes that the model
            repeats), module classes or their names, a predicate of a module, or the least number of parameters of a
            unit.
        device: Where to train; ``"auto"`` is this rank's GPU when the process group is NCCL's (the `device_id` of
            `init_process_group`, else the device of `torch.cuda.set_device`, else number ``LOCAL_RANK``), else the
            CPU. A GPU becomes the current device of the process.
        initializer: For a meta model, called with each module that owns parameters or buffers, inner ones
            first; ``"auto"`` uses `_init_weights` inside of models of transformers and each module's
            `reset_parameters` elsewhere, and rank 0 prints which.

    Returns:
        The handle of the sharded model.

    Raises:
        ConfigError: On every rank, before anything is sent but the question whether all ranks agree: an
            option that does not fit the job, a model that cannot be sharded, ranks that disagree.

    Cost:
        All memory that the engine will ever use (`Sharded.memory`); a broadcast of parameters that differ
        between ranks; where `hierarchical="auto"` has to be measured, up to about a second; on NCCL, where
        `coalesce="auto"` has to be, twelve gathers and sums of every shape of unit.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "`shard()` was called before the process group exists. Call `torch.distributed.init_process_group()` first."
        )
    chosen = on_every_rank(lambda: ShardConfig.preset(config) if isinstance(config, str) else config)
    on_every_rank(lambda: chosen.grad_codec_steps)
    on_every_rank(lambda: validate.initializer(initializer))
    target = on_every_rank(lambda: validate.target_device(device))
    if target.type == "cuda":
        torch.cuda.set_device(target)  # streams, contexts and new tensors of the process belong there
    on_every_rank(lambda: validate.model(model, target))
    require_same({**chosen.describe(), "model": validate.describe(model), "meta tensors": validate.on_meta(model)})
    topology = on_every_rank(lambda: discover_topology(chosen))
    modules = on_every_rank(lambda: find_units(model, units))
    require_same({"units": ", ".join(module.name for module in modules)})
    scopes = on_every_rank(lambda: _scopes(chosen, modules, topology, target))
    _say_what_codecs_do(chosen, scopes)
    site = Site(config=chosen, mesh=_mesh(scopes, target), device=target, memory=Memory())
    with torch.inference_mode(False), torch.no_grad():
        return _build(model, modules, site, initializer)


def _scopes(config: ShardConfig, modules: list[UnitModule], topology: Topology, device: torch.device) -> Scopes:
    """The scopes of this job; chosen, and the choice printed by rank 0, where the configuration leaves them open."""
    world_size = dist.get_world_size()
    if not config.is_auto:
        return resolve_scopes(config, topology, world_size)
    topology.check_world(world_size)
    memory_bytes = min(gather_objects(device_memory_bytes(device, topology.ranks_per_node)))
    advice = advise(config, workload(modules, config, memory_bytes), topology, world_size)
    if dist.get_rank() == 0:
        print(advice.reasons, flush=True)
    return resolve_scopes(with_scopes_of(advice.preset, config), topology, world_size)


def _say_what_codecs_do(config: ShardConfig, scopes: Scopes) -> None:
    """What may surprise: that nothing is encoded, or that parameters share scales."""
    for name in ("weight_codec", "grad_codec") if dist.get_rank() == 0 else ():
        codec = config.codec_of(name)
        if codec is not None and codec.bound_numel == 1:
            print(
                f"`{name}={codec}`: several parameters share a scale, and those with small numbers may become 0. Use "
                f"blocks of {LARGEST_BOUND_BLOCK} values or fewer, which never hold two parameters.",
                flush=True,
            )
    for name in idle_codecs(config, scopes) if dist.get_rank() == 0 else ():
        links = f"`codec_links={config.codec_links!r}`"
        print(f"`{name}={getattr(config, name)!r}` encodes nothing in this job of one node, with {links}.", flush=True)


def _mesh(scopes: Scopes, device: torch.device) -> Mesh:
    """The groups of this job; what was measured for them, printed by rank 0."""
    mesh = Mesh(scopes, device)
    news = report(mesh.findings)
    if mesh.rank == 0 and news:
        print(news, flush=True)
    return mesh


def _build(model: nn.Module, modules: list[UnitModule], site: Site, initializer: Initializer | str) -> Sharded:
    """Allocate, fill, and put the engine's hooks in place."""
    built = build_units(modules, site)
    materialize.fill(model, list(zip(modules, built, strict=True)), site.mesh, initializer, site.device)
    add_sharded_parameters(built, modules, site)
    engine = build_engine(built, modules, site)
    sharded = Sharded(model, site, engine, modules)
    weak = weakref.ref(sharded)

    def before_root_forward() -> None:
        alive = weak()
        if alive is not None:
            alive.before_forward()

    def recover() -> None:
        alive = weak()
        if alive is not None:
            alive.recover()

    if site.config.broadcast_buffers:
        sharded.synchronize_buffers()
    install(engine, before_root_forward)
    wrap_autograd()
    guard.refuse_conversions(unit.module for unit in built)
    guard.refuse_copies({unit.module for unit in built} | {model})
    guard.refuse_saving_shards(model.modules())
    guard.recover_before_reading(model, recover)
    validate.mark_sharded(model, sharded)
    prepare_generation(model, ranks_need_each_other=sharded.scopes.params > 1)
    site.mesh.ledger.take()
    return sharded
