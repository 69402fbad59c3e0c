"""Cases in which torch's own hybrid sharding differs, side by side.

These are the claims of the README.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mics_strategy import ShardConfig, Topology, shard
from tests.ranks import RankContext, RankError, RankPool

NODES = Topology(ranks_per_node=2)


class Gate(nn.Module):
    """A linear map whose second weight is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)

    def forward(self, x: torch.Tensor, use_second: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if use_second else x


def fsdp2_model() -> nn.Module:
    return fully_shard(Gate(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp2_gradient_after_abandoned_window(ctx: RankContext) -> float:
    model = fsdp2_model()
    model.set_requires_all_reduce(False)
    model(torch.full((1, 1), 1000.0), use_second=False).sum().backward()
    model.zero_grad()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 1), use_second=False).sum().backward()
    return float(model.first.weight.grad.full_tensor()[0, 0])


def our_gradient_after_abandoned_window(ctx: RankContext) -> float:
    model = Gate()
    sharded = shard(model, ShardConfig.preset("mics", topology=NODES), units=nn.Linear)
    with sharded.micro_step(0, of=2):
        model(torch.full((1, 1), 1000.0), use_second=False).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 1), use_second=False).sum().backward()
    return float(model.first.weight.grad.full_tensor()[0, 0])


def test_an_abandoned_window_leaks_in_fsdp2_and_not_here(ranks: RankPool) -> None:
    assert ranks(4, our_gradient_after_abandoned_window) == [1.0] * 4
    leaked = ranks(4, fsdp2_gradient_after_abandoned_window)
    assert all(value > 100.0 for value in leaked), f"torch has mended the leak ({leaked}): change the README"


def gradients(model: Gate) -> list[float]:
    return [float(weight.grad.full_tensor()[0, 0]) for weight in (model.first.weight, model.second.weight)]


def fsdp2_uses_a_parameter_in_one_micro_step_only(ctx: RankContext) -> list[float]:
    model = fsdp2_model()
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 1)).sum().backward()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 1), use_second=False).sum().backward()
    return gradients(model)


def we_use_a_parameter_in_one_micro_step_only(ctx: RankContext) -> list[float]:
    model = Gate()
    shard(model, ShardConfig.preset("mics", topology=NODES), units=nn.Linear)
    model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1), use_second=False).sum().backward()
    return gradients(model)


def test_a_parameter_used_in_one_micro_step_only_is_right_as_in_fsdp2_from_torch_2_15_on(ranks: RankPool) -> None:
    assert ranks(4, we_use_a_parameter_in_one_micro_step_only) == [[3.0, 1.0]] * 4
    if torch.__version__ >= "2.15":
        assert ranks(4, fsdp2_uses_a_parameter_in_one_micro_step_only) == [[3.0, 1.0]] * 4
        return
    with pytest.raises(RankError, match="match"):
        ranks(4, fsdp2_uses_a_parameter_in_one_micro_step_only)
