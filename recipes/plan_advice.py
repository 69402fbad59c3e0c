"""What would the planner choose for a recipe on a cluster? `mics pretrain RECIPE --plan CLUSTER` prints it.

Nothing is started, and the recipe keeps its own strategy: the advice ends with the lines of YAML that would follow it.
"""

from dataclasses import replace

import torch
from torch import nn

from mics_strategy.planner import Choice, Cluster, Workload, plan
from mics_strategy.planner.model_trace import TraceInput, trace_model

from .config import Recipe, load_recipe
from .errors import RecipeError
from .files import find_recipe
from .memory import planned_machines
from .models.build import build_model

_DTYPES = {  # of parameters in use, and of the masters, by precision
    "32-true": ("float32", "float32"),
    "bf16-mixed": ("bfloat16", "float32"),
    "16-mixed": ("float16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
}


def plan_advice(recipe: Recipe, cluster_name: str) -> str:
    """Return the planner's answer for a recipe, and the YAML that follows it.

    Args:
        recipe: The resolved recipe; its model, precision, batch and number of nodes count.
        cluster_name: Name of a cluster in the planner's catalog, or the path of its file.

    Raises:
        mics_strategy.errors.ConfigError: No cluster has this name, or its ranks do not divide the batch.
        mics_strategy.errors.NoFeasiblePlan: Nothing fits.
        RecipeError: The cluster has other nodes than the recipe.
    """
    machines = planned_machines(recipe)
    cluster = Cluster.of(cluster_name).with_nodes(machines.num_nodes)
    if cluster.ranks_per_node != machines.ranks_per_node:
        raise RecipeError(
            f"`--plan {cluster_name}` has {cluster.ranks_per_node} ranks on a node, and the recipe {recipe.name} "
            f"{machines.ranks_per_node}. Use another cluster, or `--trainer.devices={cluster.ranks_per_node}`."
        )
    choice = plan(_workload(recipe), cluster)
    return f"{choice.table()}\n\nIn the recipe, this is\n{_yaml(recipe, choice)}"


def named_model(name: str, seq_len: int) -> tuple[nn.Module, TraceInput]:
    """Return the model of a recipe on GPUs, on the meta device in fp32, and its example, for `mics plan --model`.

    Args:
        name: Name of a recipe of the project.
        seq_len: Tokens of a sample; 0 for those of the recipe, and for images.

    Raises:
        RecipeError: The model has fewer positions, or reads images.
    """
    recipe = load_recipe([f"--config={find_recipe(name)}"], has_cuda=True)
    if seq_len and recipe.model.reads_images:
        raise RecipeError(f"`--seq-len {seq_len}` was given with {name}, which reads images. Leave out `--seq-len`.")
    return _traced(recipe, seq_len or recipe.sample_size, torch.float32)


def _traced(recipe: Recipe, size: int, dtype: torch.dtype) -> tuple[nn.Module, TraceInput]:
    model = replace(recipe.model, compile="none", activation_checkpointing=False)  # the planner decides on the latter
    with torch.device("meta"):
        module = build_model(model, size).to(dtype).train()
    if model.reads_images:
        return module, TraceInput(name=recipe.name, example={"images": torch.zeros(1, 3, size, size, dtype=dtype)})
    example = {"input_ids": torch.zeros(1, size, dtype=torch.int64)}
    return module, TraceInput(name=recipe.name, example=example, tokens_per_sample=size)


def _workload(recipe: Recipe) -> Workload:
    param_dtype, master_dtype = _DTYPES[recipe.trainer.precision]
    return Workload(
        model=trace_model(*_traced(recipe, recipe.sample_size, getattr(torch, param_dtype))),
        global_batch=recipe.batch.global_size,
        recompute=False if recipe.model.reads_images else "auto",  # BatchNorm's statistics would be updated twice
        param_dtype=param_dtype,
        master_dtype=master_dtype,
    )


def _yaml(recipe: Recipe, choice: Choice) -> str:
    config = choice.config
    shard = f"params: {config.params}, grads: {config.grads}, optimizer: {config.optimizer}"
    if config.secondary_params != "none":
        shard += f", secondary_params: {config.secondary_params}"
    lines = [
        "strategy:",
        "  name: mics",
        f"  shard: {{{shard}, world_size: {config.world_size}}}",
        "batch:",
        f"  micro_size: {choice.micro_batch}  # {choice.num_micro_steps} micro-steps",
    ]
    if not recipe.model.reads_images:
        lines += ["model:", f"  activation_checkpointing: {str(choice.recompute).lower()}"]
    return "\n".join(lines)
