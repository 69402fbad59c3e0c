"""The command ``mics estimate``: memory of each rank of a job that does not run.

A model is a name of the planner's catalog, a recipe, a folder with transformers' ``config.json``, the name of a model
of transformers, or ``module:function``, a function that returns a module. Modules are built on the meta device, and so
is their engine (`estimate`); for a name of the catalog the planner's arithmetic gives the same numbers.
Activations are traced, or computed for the catalog.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mics_strategy.auto_scopes import description_of
from mics_strategy.config import ShardConfig
from mics_strategy.engine.units import find_units
from mics_strategy.errors import ConfigError
from mics_strategy.estimate import estimate_memory
from mics_strategy.planner.auto import AutoJob, choose
from mics_strategy.planner.catalog import describe_model, model_names
from mics_strategy.planner.cluster import Cluster, is_cluster_file
from mics_strategy.planner.memory import (
    FRAGMENTATION_SHARE,
    NOT_STATES,
    MicroBatch,
    Overheads,
    StateFormat,
    activation_bytes,
    rank_memory,
)
from mics_strategy.planner.model_sources import recipe_model, transformers_config
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.quantities import Quantity, parse_quantity
from mics_strategy.planner.recompute import check_recompute, parse_recompute, recompute_phrase
from mics_strategy.planner.space import overheads_of
from mics_strategy.recipe_names import recipe_names
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Topology
from mics_strategy.version import install_advice

if TYPE_CHECKING:
    from mics_strategy.planner.model import ModelDescription

_DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_TOKENS = 512
_FIELDS = {  # options of the command by field of `ShardConfig`
    "partition_size": "partition_size",
    "params": "params",
    "grads": "grads",
    "optimizer": "optimizer",
    "secondary_params": "secondary",
    "weight_codec": "weight_codec",
    "grad_codec": "grad_codec",
    "codec_links": "codec_links",
    "prefetch": "prefetch",
    "outer_every": "outer_every",
    "outer_delay": "outer_delay",
    "second_hop": "second_hop",
    "param_dtype": "param_dtype",
    "reduce_dtype": "reduce_dtype",
    "grad_accum_dtype": "grad_accum_dtype",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, and an example."""
    parser.epilog = "example: mics estimate llama-7b --nodes 4 --ranks-per-node 8 --micro-batch 1 --memory '80 GB'"
    parser.add_argument(
        "model", help="a catalog name, a recipe, a folder with config.json, a transformers model, or module:function"
    )
    parser.add_argument("--nodes", type=int, default=None, help="number of nodes; default: the cluster file's, or 1")
    parser.add_argument(
        "--ranks-per-node", type=int, default=None, help="number of GPUs per node; default: --cluster's"
    )
    parser.add_argument("--nodes-per-switch", type=int, default=0, help="nodes under one leaf switch; default: all")
    parser.add_argument("--preset", default="mics", help="mics, zero3, paro-iig, auto, ...; default: mics")
    parser.add_argument(
        "--partition-size", type=_scope, default=None, help="ranks per partition, or auto; default: auto"
    )
    for name in ("params", "grads", "optimizer", "secondary"):
        parser.add_argument(f"--{name}", type=_scope, default=None, help=f"scope of {name}: ranks, or a word")
    parser.add_argument("--weight-codec", default=None, help="int8 or int4, of parameters on the wire")
    parser.add_argument("--grad-codec", default=None, help="int8 or int4, of gradients on the wire")
    parser.add_argument("--codec-links", default=None, help="slow or all; default: slow")
    parser.add_argument("--prefetch", type=int, default=None, help="units gathered ahead; default: 1")
    parser.add_argument("--outer-every", type=int, default=None, help="steps of a node between outer steps; default: 0")
    parser.add_argument(
        "--outer-delay", type=int, default=None, help="steps that an outer step is in flight; default: 0"
    )
    parser.add_argument("--second-hop", default=None, help="boundary, micro_step or delayed; default: boundary")
    parser.add_argument("--param-dtype", choices=_DTYPES, default=None, help="dtype of the computation")
    parser.add_argument("--reduce-dtype", choices=_DTYPES, default=None, help="dtype of gradients on the wire")
    parser.add_argument("--grad-accum-dtype", choices=_DTYPES, default=None, help="dtype of sums of micro-steps")
    parser.add_argument("--units", default=None, help="layer classes, comma-separated; default: detected")
    parser.add_argument("--state-bytes", type=int, default=8, help="bytes of optimizer state per element; default: 8")
    parser.add_argument("--micro-batch", type=int, default=None, help="samples of a micro-batch; adds activations")
    parser.add_argument("--seq-len", type=int, default=None, help=f"tokens of a sample; default: {_DEFAULT_TOKENS}")
    parser.add_argument(
        "--recompute",
        nargs="?",
        const="yes",
        default="no",
        help="recompute the activations of layers; or of 1/2 of them, or of attention",
    )
    parser.add_argument(
        "--communicator-memory",
        default=None,
        help="of one communicator of NCCL; default: that of --cluster's file, or 600 MB",
    )
    parser.add_argument("--memory", default=None, help="memory of a GPU, such as '80 GB', to compare with")
    parser.add_argument("--cluster", default=None, help="a cluster, by name or file, whose GPU's memory is compared")


def _assumed(options: Namespace, config: ShardConfig) -> str:
    """What the numbers hang on, stated or by default, since `mics plan` has other defaults."""
    dtype = str(config.param_dtype_of(torch.float32)).removeprefix("torch.")
    batch = ", activations not counted (--micro-batch)"
    if options.micro_batch is not None:
        batch = f", {options.micro_batch} x {options.seq_len or _DEFAULT_TOKENS} tokens"
        batch += recompute_phrase(options.recompute) or ", no recomputation"
    return f"computed in {dtype} (--param-dtype), {options.state_bytes} bytes of optimizer states an element{batch}"


def _scope(text: str) -> str | int:
    return int(text) if text.isdigit() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """What the command prints.

    Attributes:
        title: Name of the model.
        numel: Elements of its parameters.
        num_units: Units of the model.
        scopes: Degrees of the model states.
        rows: Bytes by purpose.
    """

    title: str
    numel: int
    num_units: int
    scopes: Scopes
    rows: Mapping[str, int]


def run(options: Namespace) -> int:
    """Print the memory; return the exit code.

    Raises:
        ConfigError: Options are invalid, or the model does not exist.
    """
    print("\n".join(_lines(options)))
    return 0


def _lines(options: Namespace) -> Iterator[str]:
    cluster = None if options.cluster is None else Cluster.of(options.cluster)
    _fill_in(options, cluster)
    _check(options)
    memory_bytes, overheads = _memory_bytes(options, cluster), _overheads(options, cluster)
    fields = {field: getattr(options, name) for field, name in _FIELDS.items()}
    config = ShardConfig.of(options.preset, topology=_topology(options), **fields)
    if config.is_auto and options.cluster is not None:
        config = config.replace(cluster=options.cluster)
    is_named = options.model.lower().replace("_", "-") in {name.replace("_", "-") for name in model_names()}
    estimate = (_of_catalog if is_named else _of_module)(options, config, memory_bytes, overheads)
    scopes, rows = estimate.scopes, dict(sorted(estimate.rows.items(), key=lambda row: -row[1]))
    yield (
        f"{estimate.title}, {estimate.numel / 1e9:.3f} B parameters in {estimate.num_units} units, on "
        f"{scopes.world_size} ranks"
    )
    yield f"{scopes.phrase} ranks"
    yield _assumed(options, config)
    for purpose, num_bytes in rows.items():
        if num_bytes >= 5e5:  # omit rows that would be printed as 0.000
            yield f"  {purpose:<28}{num_bytes / 1e9:>9.3f} GB"
    total = sum(rows.values())
    without = "" if options.micro_batch else ", plus activations, context and fragmentation"
    yield f"  {'total per rank':<28}{total / 1e9:>9.3f} GB{without}"
    if memory_bytes is not None:
        rest = memory_bytes - total
        left = "left" if options.micro_batch else "left for these"
        verdict = left if rest >= 0 else "missing: shard over more ranks, or recompute"
        yield f"  {'of a GPU':<28}{memory_bytes / 1e9:>9.3f} GB, {abs(rest) / 1e9:.3f} GB {verdict}"


def _fill_in(options: Namespace, cluster: Cluster | None) -> None:
    """Take nodes and ranks that are not stated from the cluster: of a product, any number of nodes can be used."""
    if options.nodes is None:
        options.nodes = 1 if cluster is None or not is_cluster_file(options.cluster) else cluster.num_nodes
    if options.ranks_per_node is None:
        if cluster is None:
            raise ConfigError(
                "Neither `--ranks-per-node` nor `--cluster` was given, so the number of GPUs of a node is unknown. Add "
                "for example `--ranks-per-node 8`."
            )
        options.ranks_per_node = cluster.ranks_per_node


def _check(options: Namespace) -> None:
    if options.recompute == "auto":
        raise ConfigError("`--recompute auto` is for `mics plan`, which chooses. Use yes, no, attention, or 1/2.")
    options.recompute = parse_recompute(options.recompute)
    for name in ("nodes", "ranks_per_node", "state_bytes", "micro_batch", "seq_len"):
        value, least = getattr(options, name), 0 if name == "state_bytes" else 1
        if value is not None and value < least:
            raise ConfigError(f"`--{name.replace('_', '-')} {value}` is too small. Use {least} or more.")
    if options.micro_batch is None and (options.recompute or options.seq_len is not None):
        raise ConfigError(
            "`--recompute` and `--seq-len` change activations, which are counted for a micro-batch only. Add "
            "`--micro-batch 1`."
        )
    if options.memory is not None and options.cluster is not None:
        raise ConfigError("`--memory` and `--cluster` both state the memory of a GPU. Give one of them.")


def _topology(options: Namespace) -> Topology:
    return Topology(ranks_per_node=options.ranks_per_node, nodes_per_switch=options.nodes_per_switch)


def _memory_bytes(options: Namespace, cluster: Cluster | None) -> int | None:
    if cluster is not None:
        return cluster.device.memory_bytes
    return None if options.memory is None else round(parse_quantity(options.memory, Quantity.BYTES, "`--memory`"))


def _overheads(options: Namespace, cluster: Cluster | None) -> Overheads:
    stated = options.communicator_memory
    if stated is None:
        return Overheads() if cluster is None else overheads_of(cluster)
    return Overheads(communicator_bytes=round(parse_quantity(stated, Quantity.BYTES, "`--communicator-memory`")))


def _chosen(
    config: ShardConfig, options: Namespace, model: ModelDescription, memory_bytes: int | None, activations: int | None
) -> ShardConfig:
    """The configuration as `shard` would resolve it with GPUs of so much memory.

    Without one, a partition is a node.

    Args:
        config: Configuration.
        options: Parsed options.
        model: Parameters of the units.
        memory_bytes: Bytes of a GPU's memory, where it is known.
        activations: Bytes of activations, where a micro-batch is stated.
    """
    if memory_bytes is None:
        if config.is_auto:
            raise ConfigError(
                "The scopes are 'auto', which depends on the memory of a GPU. Give `--memory '80 GB'` or `--cluster`, "
                "or a preset, or name the scopes."
            )
        return config
    job = AutoJob(
        model=model,
        topology=_topology(options),
        world_size=options.nodes * options.ranks_per_node,
        memory_bytes=memory_bytes,
    )
    return choose(config if activations is None else config.replace(activation_bytes=activations), job).config


def _of_catalog(options: Namespace, config: ShardConfig, memory_bytes: int | None, overheads: Overheads) -> _Estimate:
    if options.units is not None:
        raise ConfigError(f"`--units` names classes, but {options.model} of the catalog is not a module. Remove it.")
    activation_dtype = config.param_dtype_of(torch.float32)
    model = describe_model(options.model, options.seq_len or _DEFAULT_TOKENS, activation_dtype.itemsize)
    check_recompute(model, options.recompute)
    batch = MicroBatch(samples=options.micro_batch or 1, recomputes=options.recompute)
    activations = None if options.micro_batch is None else sum(activation_bytes(model.units, batch).values())
    config = _chosen(config, options, model, memory_bytes, activations)
    scopes = resolve_scopes(config, _topology(options), options.nodes * options.ranks_per_node)
    states = StateFormat(optimizer_bytes=options.state_bytes)
    rows = dict(rank_memory(model, config, scopes, batch, states, overheads).by_kind)
    if options.micro_batch is None:
        rows = {kind: num_bytes for kind, num_bytes in rows.items() if kind not in _ONLY_WITH_ACTIVATIONS}
    return _Estimate(title=model.name, numel=model.numel, num_units=len(model.units), scopes=scopes, rows=rows)


_ONLY_WITH_ACTIVATIONS = tuple(kind for kind in NOT_STATES if kind != "communicators")


def _of_module(options: Namespace, config: ShardConfig, memory_bytes: int | None, overheads: Overheads) -> _Estimate:
    if options.model in recipe_names():
        model, traced = recipe_model(options.model, options.seq_len or 0)
        options.seq_len = traced.tokens_per_sample
    else:
        tokens = options.seq_len or _DEFAULT_TOKENS
        example = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64)}
        model, traced = (
            _build_model(options.model),
            TraceInput(name=options.model, example=example, tokens_per_sample=tokens),
        )
    numel = sum(parameter.numel() for parameter in model.parameters())
    units = "auto" if options.units is None else tuple(options.units.split(","))
    rows: dict[str, int] = {}
    activations = None
    if options.micro_batch is not None:
        traced = replace(traced, units=units)
        copied = copy.deepcopy(model).to(config.param_dtype_of(torch.float32)).train()
        batch = MicroBatch(samples=options.micro_batch, recomputes=options.recompute)
        described = trace_model(copied, traced)
        check_recompute(described, options.recompute)
        rows = activation_bytes(described.units, batch)
        activations = sum(rows.values())
    config = _chosen(config, options, description_of(find_units(model, units)), memory_bytes, activations)
    estimate = estimate_memory(
        model, config, num_nodes=options.nodes, ranks_per_node=options.ranks_per_node, units=units
    )
    rows |= estimate.bytes_by_purpose
    rows["gradients of autograd"] = estimate.pending_grad_bytes
    communicators_bytes = estimate.num_communicators * overheads.communicator_bytes
    rows[f"communicators ({estimate.num_communicators})"] = communicators_bytes
    if activations is not None:
        rows["context"] = overheads.context_bytes
        rows["fragmentation"] = round(FRAGMENTATION_SHARE * (activations + estimate.pending_grad_bytes))
    rows["optimizer states"] = estimate.num_trained * options.state_bytes
    return _Estimate(
        title=type(model).__name__, numel=numel, num_units=estimate.num_units, scopes=estimate.scopes, rows=rows
    )


def _build_model(source: str) -> nn.Module:
    """Build a model on the meta device."""
    if ":" in source and not Path(source).exists():
        return _call_factory(source)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"Models are built by transformers, which is not installed. {install_advice('recipes')}")
    transformers: Any = importlib.import_module("transformers")
    config = transformers_config(source)
    with torch.device("meta"):
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # not a causal language model
            model = transformers.AutoModel.from_config(config)
    return model


def _call_factory(source: str) -> nn.Module:
    """Call the function that ``module:function`` names."""
    module_name, _, name = source.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`{source}` names no function: {error}. Write module:function.") from error
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`{source}` returned {type(model).__name__}. Name a function that returns a module.")
    return model
