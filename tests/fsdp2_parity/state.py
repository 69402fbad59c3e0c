"""FSDP2's scenarios of the state of a module: classes, slices, copies, containers without a forward."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mics_strategy import ConfigError, LifecycleError, shard
from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import STEP, STEPS, Player, Scenario, Vectors
from tests.rank_report import RankContext


def through_a_slice(player: Player) -> Iterator[str]:
    """Some steps run a slice of the model only."""
    for step in range(STEPS):
        part = player.model[: 2 + step % 2]
        player.backward(part(player.inputs(step)).square().mean())
        yield STEP


def module_by_module(player: Player) -> Iterator[str]:
    """The loop calls the modules of a list."""
    for step in range(STEPS):
        hidden = player.inputs(step)
        for module in player.model:
            hidden = module(hidden)
        player.backward(hidden.square().mean())
        yield STEP


def key_by_key(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        hidden = player.inputs(step)
        for key in ("b", "a") if step % 2 else ("a", "b"):
            hidden = player.model[key](hidden)
        player.backward(hidden.square().mean())
        yield STEP


def no_unit(_: nn.Module) -> bool:
    return False


def module_list() -> nn.Module:
    return nn.ModuleList(MLP(6) for _ in range(3))


def module_dict() -> nn.Module:
    return nn.ModuleDict({"a": MLP(6), "b": MLP(6)})


SCENARIOS = {
    "a slice of a sharded model": Scenario(
        build=models.mlps, inputs=Vectors((4, 6)), units=(MLP,), body=through_a_slice
    ),
    "a ModuleList of units": Scenario(
        build=module_list,
        inputs=Vectors((4, 6)),
        units=(MLP,),
        body=module_by_module,
        fsdp2_raises="does not support containers that do not implement forward",
    ),
    "a ModuleList that is one unit": Scenario(
        build=module_list,
        inputs=Vectors((4, 6)),
        units=no_unit,
        body=module_by_module,
        fsdp2_raises="does not support containers that do not implement forward",
    ),
    "a ModuleDict of units": Scenario(
        build=module_dict,
        inputs=Vectors((4, 6)),
        units=(MLP,),
        body=key_by_key,
        fsdp2_raises="does not support containers that do not implement forward",
    ),
}


def classes_stay(ctx: RankContext) -> None:
    model = models.mlps()
    classes = [type(module) for module in model.modules()]
    handle = shard(model, "zero3", units=[MLP])
    assert [type(module) for module in model.modules()] == classes
    assert [unit.module for unit in handle.internals.units] == [model, *model]


FACTS = {"no class changes, and each unit is listed once": (2, classes_stay)}


def mlp(units: Any = "auto") -> nn.Module:
    model = MLP(6)
    shard(model, "zero3", units=units)
    return model


def shard_again(ctx: RankContext) -> None:
    shard(mlp())


def shard_block_by_block(ctx: RankContext) -> None:
    model = nn.Sequential(mlp(), MLP(6))
    shard(model[1])
    shard(model)


def train_a_plain_rest(ctx: RankContext) -> None:
    model = nn.Sequential(mlp(), nn.Linear(6, 6))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def deep_copy(ctx: RankContext) -> None:
    copy.deepcopy(mlp())


REFUSED = {
    "`shard()` twice": (shard_again, ConfigError, "is sharded already. Call `shard()` once, on the outermost model."),
    "block by block, then the model": (
        shard_block_by_block,
        ConfigError,
        "`0` is sharded already. Call `shard()` once, on the outermost model.",
    ),
    "blocks alone, and an optimizer of all": (
        train_a_plain_rest,
        ConfigError,
        "belongs to no sharded model. Its gradient would not be synchronized.",
    ),
    "`copy.deepcopy`": (
        deep_copy,
        LifecycleError,
        "A sharded model cannot be pickled or copied, because each rank has only its shards.",
    ),
}
