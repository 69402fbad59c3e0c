"""Memory of a rank that a recipe needs on its cluster."""

from dataclasses import dataclass, replace

import torch

from mics_strategy.estimate import MemoryEstimate, estimate_memory

from .config import Recipe
from .errors import RecipeError
from .models.build import build_model
from .models.cost import activation_bytes
from .strategy import is_ours, shard_config

_COMPUTE_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        engine: Estimate of the engine for this job.
        activation_bytes: Estimate of what a micro-step keeps for its backward; not measured on a GPU.
    """

    engine: MemoryEstimate
    activation_bytes: int

    @property
    def states_bytes(self) -> int:
        """Bytes of the engine, gradients, AdamW's two moments and communicators."""
        return self.engine.total_bytes()

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.states_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Nodes and ranks that a recipe is planned for.

    Attributes:
        num_nodes: Nodes, real or imitated.
        ranks_per_node: Ranks of each node.
    """

    num_nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.ranks_per_node


def planned_machines(recipe: Recipe) -> Machines:
    """Return the machines of a recipe's cluster, whatever this machine has.

    Raises:
        RecipeError: The nodes that the recipe imitates do not divide its ranks.
    """
    trainer, per_node = recipe.trainer, recipe.strategy.ranks_per_node
    devices = recipe.cluster.ranks_per_node if trainer.devices == "auto" else trainer.devices
    if per_node == "auto":
        return Machines(num_nodes=trainer.num_nodes, ranks_per_node=devices)
    world_size = trainer.num_nodes * devices
    if world_size % per_node:
        raise RecipeError(
            f"`strategy.ranks_per_node={per_node}` does not divide the {world_size} ranks of the recipe. Use a divisor."
        )
    return Machines(num_nodes=world_size // per_node, ranks_per_node=per_node)


def rank_memory(recipe: Recipe) -> RankMemory:
    """Plan a recipe for its cluster: build its engine on the meta device, for the first rank.

    Call it in a process without a process group.

    Raises:
        RecipeError: The strategy is not one of this project.
        mics_strategy.errors.ConfigError: The plan is invalid for the cluster.
    """
    if not is_ours(recipe.strategy):
        raise RecipeError(
            f"Memory was asked for `strategy.name={recipe.strategy.name}`, which this project does not plan. Use a "
            "`mics` strategy."
        )
    dtype = _COMPUTE_DTYPES[recipe.trainer.precision]
    with torch.device("meta"):
        model = build_model(replace(recipe.model, compile="none"), recipe.sample_size)
    config = shard_config(recipe.strategy)
    if recipe.trainer.precision.endswith("mixed"):
        config = config.replace(param_dtype=dtype)
    else:
        model = model.to(dtype)
    machines = planned_machines(recipe)
    return RankMemory(
        engine=estimate_memory(model, config, num_nodes=machines.num_nodes, ranks_per_node=machines.ranks_per_node),
        activation_bytes=activation_bytes(recipe.model, recipe.batch.micro_size, recipe.sample_size, dtype),
    )
