"""What does ``mics estimate`` say?

For a model of transformers, known by its configuration alone: what each rank would hold, by purpose.
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
    """The lines to print.

    Args:
        options: Of the command.

    Raises:
        ConfigError: Impossible options, or no such model.
    """
    overrides = {"partition_size": options.partition_size, "param_dtype": options.param_dtype}
    config = ShardConfig.of(options.preset, **overrides)
    model = _built(options.model)
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
        if num_bytes >= 5e5:  # what would be printed as nothing
            yield f"  {purpose:<28}{num_bytes / 1e9:>9.3f} GB"
    yield f"  {'each rank, all together':<28}{estimate.total_bytes(state_bytes) / 1e9:>9.3f} GB, and its activations"


def _built(source: str) -> Any:
    """A model on the meta device: to generate text if it can, else what its configuration names."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("Models are built by transformers, which is not installed. `pip install transformers`.")
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{source}` is no model that transformers knows: {error}") from error
    with torch.device("meta"):
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # a model of another kind
            return transformers.AutoModel.from_config(config)
