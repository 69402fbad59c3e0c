"""State dicts and parameters are saved and copied as with FSDP2.

They are DTensors with this rank's part of each.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.engine.exact_dtensor import ExactDTensor
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool

CONFIGS = {
    preset: ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)) for preset in ("zero3", "mics", "ddp")
}


def build() -> nn.Sequential:
    """Even, uneven and empty parts, a scalar, a frozen parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 9), nn.Linear(9, 2), nn.PReLU())
    model[3].weight = nn.Parameter(torch.tensor(0.25))
    model[1].bias.requires_grad_(False)
    return model


def same(found: DTensor, expected: DTensor) -> bool:
    return (
        type(found) in (DTensor, ExactDTensor)
        and (found.placements, found.shape, found.stride()) == (expected.placements, expected.shape, expected.stride())
        and found.device_mesh == expected.device_mesh
        and torch.equal(found.to_local(), expected.to_local())
    )


def save_and_copy(ctx: RankContext, config: ShardConfig, folder: Path) -> dict[str, Tensor]:
    model = build()
    shard(model, config, units=[nn.Linear])
    model(torch.randn(4, 8)).sum().backward()
    state, file = model.state_dict(), folder / str(ctx.rank)
    torch.save(state, file)
    local_bytes = sum(value.to_local().nbytes for value in state.values())
    assert file.stat().st_size < local_bytes + 40_000
    copied = copy.deepcopy(state)
    loaded = torch.load(file, weights_only=True)
    for name, value in state.items():
        assert same(loaded[name], value)
        assert same(copied[name], value)
    values = {name: value.to_local().clone() for name, value in state.items()}
    for value in (*copied.values(), *loaded.values()):
        value.to_local().fill_(7)
    assert all(torch.equal(value.to_local(), values[name]) for name, value in state.items())
    for name, parameter in model.named_parameters():
        assert same(copy.deepcopy(parameter.data), parameter.detach())
        for each, needs_grad in (
            (parameter, parameter.requires_grad),
            (parameter.data, False),
            (parameter.grad, False),
        ):
            if each is not None:
                torch.save(each, folder / f"one {ctx.rank}")
                found = torch.load(folder / f"one {ctx.rank}", weights_only=True)
                assert same(found, each.detach()), name
                assert found.requires_grad is needs_grad
        copied = copy.deepcopy([parameter])[0]
        assert same(copied, parameter.detach())
        assert copied.to_local().data_ptr() != parameter.to_local().data_ptr() or not parameter.to_local().numel()
    return wholes(state)


def load(ctx: RankContext, config: ShardConfig, folder: Path) -> dict[str, Tensor]:
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shard(model, config, units=[nn.Linear])
    model.load_state_dict(torch.load(folder / str(ctx.rank), weights_only=True))
    return wholes(model.state_dict())


@pytest.mark.parametrize("preset", CONFIGS)
def test_a_state_dict_is_saved_copied_and_loaded_in_parts(ranks: RankPool, tmp_path: Path, preset: str) -> None:
    expected = build().state_dict()
    for found in ranks(4, save_and_copy, CONFIGS[preset], tmp_path) + ranks(4, load, CONFIGS[preset], tmp_path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def of_fsdp2(ctx: RankContext, folder: Path) -> bool:
    """Whether both save the same, where the parts are."""
    saved: list[Any] = []
    for kind in ("ours", "theirs"):
        model = build()[:1]
        if kind == "ours":
            shard(model, "zero3")
        else:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (ctx.world_size,)))
        file = folder / f"{kind} {ctx.rank}"
        torch.save(model.state_dict(), file)
        saved.append(torch.load(file, weights_only=True))
    ours, theirs = saved
    return all(
        type(ours[name]) is type(value)
        and ours[name].placements == value.placements
        and torch.equal(ours[name].to_local(), value.to_local())
        and ours[name].requires_grad == value.requires_grad
        for name, value in theirs.items()
    )


def test_saved_tensors_equal_those_of_fsdp2(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, of_fsdp2, tmp_path) == [True] * 4


def load_full(ctx: RankContext, config: ShardConfig, way: str) -> tuple[dict[str, Tensor], bool]:
    """Load the plain model's state dict, and train on."""
    model, best = build(), {name: value + 1 for name, value in build().state_dict().items()}
    shard(model, config, units=[nn.Linear])
    parameters = list(model.parameters())
    if way == "in parts":
        for name, module in model.named_children():
            prefix = f"{name}."
            module.load_state_dict({k.removeprefix(prefix): v for k, v in best.items() if k.startswith(prefix)})
    else:
        model.load_state_dict(best, assign=way == "assigned")
    values = wholes(model.state_dict())
    model(torch.randn(4, 8)).sum().backward()
    return values, all(one is other for one, other in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("way", ["copied", "assigned", "in parts"])
def test_full_tensors_are_loaded_into_shards(ranks: RankPool, way: str) -> None:
    for preset in CONFIGS:
        for values, are_same in ranks(4, load_full, CONFIGS[preset], way):
            assert are_same
            assert all(torch.equal(values[name], value + 1) for name, value in build().state_dict().items())


class CopyingModel(nn.Linear):
    """Copies its state dict, as some LightningModules do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict(*args, **kwargs))


def full_state_of_a_copying_model(ctx: RankContext) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sharded = shard(CopyingModel(8, 5), "zero3")
    state = sharded.full_state_dict()
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.zero_()
    sharded.load_full_state_dict(sharded._groups.world_group.broadcast_object(state, 0))
    return wholes(dict(sharded.model.named_parameters()))


def test_a_model_that_copies_its_state_dict_is_saved_and_loaded(ranks: RankPool) -> None:
    torch.manual_seed(0)
    expected = dict(nn.Linear(8, 5).named_parameters())
    for found in ranks(2, full_state_of_a_copying_model):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
