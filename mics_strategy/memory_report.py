"""Output of ``mics estimate``: memory of each rank, by purpose.

The model is one of transformers, built from its configuration only.
"""

from __future__ import annotations

import importlib
import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.engine.estimate import MemoryEstimate, estimate_memory
from mics_strategy.errors import ConfigError


def report(options: Namespace) -> Iterator[str]:
    """Yield the lines to print.

    Args:
        options: Parsed options of the command.

    Raises:
        ConfigError: Options are invalid, or the model does not exist.
    """
    overrides = {"partition_size": options.partition_size, "param_dtype": options.param_dtype}
    config = ShardConfig.of(options.preset, **overrides)
    model = _build_model(options.model)
    units = "auto" if options.units is None else tuple(options.units.split(","))
    numel = sum(parameter.numel() for parameter in model.parameters())
    estimate = estimate_memory(
        model, config, num_nodes=options.nodes, ranks_per_node=options.ranks_per_node, units=units
    )
    world_size, scopes = options.nodes * options.ranks_per_node, estimate.scopes
    yield f"{type(model).__name__}, {numel / 1e9:.3f} B parameters in {estimate.num_units} units, on {world_size} ranks"
    over = f"parameters over {scopes.params}, gradients over {scopes.grads}, optimizer states over {scopes.optimizer}"
    yield f"{over} ranks"
    yield from _table(estimate, options.state_bytes)


def _table(estimate: MemoryEstimate, state_bytes: int) -> Iterator[str]:
    rows = dict(sorted(estimate.bytes_by_purpose.items(), key=lambda row: -row[1]))
    rows["optimizer states"] = estimate.num_trained * state_bytes
    for purpose, num_bytes in rows.items():
        if num_bytes >= 5e5:  # omit rows that would be printed as 0.000
            yield f"  {purpose:<28}{num_bytes / 1e9:>9.3f} GB"
    yield f"  {'total per rank':<28}{estimate.total_bytes(state_bytes) / 1e9:>9.3f} GB, plus activations"


def _build_model(source: str) -> Any:
    """Build a model on the meta device: a causal language model if there is one."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("Models are built by transformers, which is not installed. Run `pip install transformers`.")
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{source}` is not a model of transformers: {error}") from error
    with torch.device("meta"):
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # not a causal language model
            return transformers.AutoModel.from_config(config)
