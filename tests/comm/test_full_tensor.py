"""Is a sharded tensor put together as torch does, without the all-gather of torch that damages the heap on gloo?"""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mics_strategy import ShardConfig
from mics_strategy.comm.placement import full_tensor
from tests import models
from tests.engine.training import Run, assert_identical, start
from tests.ranks import RankContext, RankPool

GATHER = torch.ops.c10d_functional.all_gather_into_tensor


def _both_ways(ctx: RankContext, cases: list[tuple[Tensor, tuple[Placement, ...]]]) -> list[tuple[Tensor, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for value, placements in cases:
        tensor = distribute_tensor(value, mesh, placements)
        with CommDebugMode() as sent:
            mine = full_tensor(tensor)
        assert GATHER not in sent.get_comm_counts()
        found.append((mine, tensor.full_tensor()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(8,), (5, 3), (1, 3), (3, 7, 2), (0, 4)], ids=str)
def test_the_whole_is_that_of_torch(ranks: RankPool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape).to(dtype)
    cases = [(value, (Replicate(), Shard(dim))) for dim in range(len(shape)) if value.numel()]
    cases += [(value, (Shard(0), Replicate())), (value, (Replicate(), Replicate()))]
    for by_rank in ranks(4, _both_ways, cases):
        for mine, torchs in by_rank:
            assert mine.dtype == dtype
            assert torch.equal(mine, torchs)
            assert torch.equal(mine, value)


def _of_a_sum(ctx: RankContext) -> tuple[Tensor, bool]:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    partial = DTensor.from_local(torch.full((3,), ctx.rank + 1.0), mesh, [Partial()], run_check=False)
    return full_tensor(partial), full_tensor(partial.requires_grad_()).requires_grad


def test_what_ranks_hold_parts_of_is_added(ranks: RankPool) -> None:
    for whole, requires_grad in ranks(2, _of_a_sum):
        assert whole.tolist() == [3.0, 3.0, 3.0]
        assert not requires_grad


def _saved(ctx: RankContext, preset: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    training = start(ctx, Run(case=models.mlp, config=ShardConfig.preset(preset)))
    training.step(0)
    with CommDebugMode() as sent:
        state = training.sharded.full_state_dict()
        training.sharded.full_optimizer_state_dict(training.optimizer)
        with torch.no_grad():
            parameters = {name: p.full_tensor() for name, p in training.model.named_parameters()}
    assert GATHER not in sent.get_comm_counts()
    parameter = next(training.model.parameters())
    parameter.full_tensor().sum().backward()  # with a gradient it is torch's own
    assert parameter.grad is not None
    return state, parameters, parameter.grad.to_local().sum().item()


@pytest.mark.parametrize("preset", ["mics", "zero3"])
def test_saving_a_model_never_runs_the_other_all_gather(ranks: RankPool, preset: str) -> None:
    by_rank = ranks(4, _saved, preset, ranks_per_node=2)
    names = {name for name in by_rank[0][0] if name in by_rank[0][1]}
    assert names
    assert_identical({name: by_rank[0][0][name] for name in names}, {name: by_rank[1][1][name] for name in names})
    assert all(found[2] for found in by_rank)
