"""Do simulated ranks behave like ranks?"""

import math
import os
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mics_strategy.comm.resources import new_group
from tests import models
from tests.ranks import RankContext, RankError, raises_on_every_rank, simulate
from tests.reference import train_reference

# torch 2.13 renamed them; a call by the old name warns.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

sizes = pytest.mark.parametrize("world_size", [1, 3, 16, 32])
modes = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])


def _done(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
        assert work.is_completed()


@sizes
@modes
def test_all_reduce(world_size: int, is_async: bool) -> None:
    def job(ctx: RankContext) -> tuple[float, float, float]:
        tensors = [torch.full((3,), float(ctx.rank)) for _ in range(3)]
        for tensor, op in zip(tensors, ("SUM", "AVG", "MAX"), strict=True):
            _done(dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), async_op=is_async))
        return tuple(tensor[0].item() for tensor in tensors)

    total = world_size * (world_size - 1) / 2
    assert simulate(world_size, job) == [(total, total / world_size, world_size - 1)] * world_size


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8], ids=str)
def test_all_gather(is_async: bool, dtype: torch.dtype) -> None:
    def job(ctx: RankContext) -> list[float]:
        out = torch.empty(16, dtype=dtype)
        shard = torch.full((2,), ctx.rank, dtype=dtype)
        _done(all_gather(out, shard, async_op=is_async))
        return out.tolist()

    assert simulate(8, job) == [[rank for rank in range(8) for _ in "ab"]] * 8


def test_all_gather_in_place() -> None:
    def job(ctx: RankContext) -> list[float]:
        out = torch.full((8,), -1.0)
        out[ctx.rank] = ctx.rank
        all_gather(out, out[ctx.rank : ctx.rank + 1])
        return out.tolist()

    assert simulate(8, job) == [list(range(8))] * 8


@modes
def test_reduce_scatter(is_async: bool) -> None:
    def job(ctx: RankContext) -> tuple[list[float], list[float]]:
        total, mean = torch.empty(2), torch.empty(2)
        full = torch.arange(16.0) + ctx.rank
        _done(reduce_scatter(total, full, async_op=is_async))
        _done(reduce_scatter(mean, full, op=dist.ReduceOp.AVG, async_op=is_async))
        return total.tolist(), mean.tolist()

    for rank, (total, mean) in enumerate(simulate(8, job)):
        assert total == [8 * (2 * rank) + 28, 8 * (2 * rank + 1) + 28]
        assert mean == [t / 8 for t in total]


@modes
def test_all_to_all(is_async: bool) -> None:
    def job(ctx: RankContext) -> tuple[list[int], list[int]]:
        out = torch.empty(4, dtype=torch.int64)
        _done(dist.all_to_all_single(out, 10 * ctx.rank + torch.arange(4), async_op=is_async))
        uneven = torch.empty(4 * ctx.rank, dtype=torch.int64)
        sent = torch.full((0 + 1 + 2 + 3,), ctx.rank)
        dist.all_to_all_single(uneven, sent, [ctx.rank] * 4, [0, 1, 2, 3])
        return out.tolist(), uneven.tolist()

    results = simulate(4, job)
    assert [out for out, _ in results] == [[r, 10 + r, 20 + r, 30 + r] for r in range(4)]
    assert results[2][1] == [0, 0, 1, 1, 2, 2, 3, 3]


@modes
def test_broadcast_and_objects(is_async: bool) -> None:
    def job(ctx: RankContext) -> tuple[float, list, list]:
        tensor, gathered, sent = torch.tensor(float(ctx.rank)), [None] * 5, [ctx.rank]
        _done(dist.broadcast(tensor, src=3, async_op=is_async))
        dist.all_gather_object(gathered, {"rank": ctx.rank})
        dist.broadcast_object_list(sent, src=2)
        return tensor.item(), gathered, sent

    assert simulate(5, job) == [(3.0, [{"rank": r} for r in range(5)], [2])] * 5


def test_group_order_is_kept_without_sorting() -> None:
    def job(ctx: RankContext) -> tuple[int, list[int]]:
        members = [[3, 1], [0, 2]]
        groups = [new_group(ranks, "test") for ranks in members]
        group = groups[0 if ctx.rank in members[0] else 1]
        out = torch.empty(2, dtype=torch.int64)
        all_gather(out, torch.tensor([ctx.rank]), group=group)
        return dist.get_rank(group), out.tolist()

    assert simulate(4, job) == [(0, [0, 2]), (1, [3, 1]), (1, [0, 2]), (0, [3, 1])]


def test_meshes_and_dtensors_work() -> None:
    def job(ctx: RankContext) -> tuple[list[float], int, tuple[int, ...]]:
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("a", "b"))
        mesh["b"].get_group()
        sharded = distribute_tensor(torch.arange(18.0), mesh["a"], [Shard(0)])
        full = sharded.redistribute(placements=[Replicate()]).to_local()
        transposed = DeviceMesh("cpu", torch.arange(16).view(4, 4).T, mesh_dim_names=("c", "d"))
        return full.tolist(), mesh._flatten().size(), tuple(transposed.get_coordinate())

    results = simulate(16, job)
    assert results[6] == ([float(i) for i in range(18)], 16, (2, 1))


def test_backward_calls_collectives_from_hooks() -> None:
    def job(ctx: RankContext) -> list[float]:
        layer = nn.Linear(3, 1, bias=False)

        def reduce(parameter: nn.Parameter) -> None:
            dist.all_reduce(parameter.grad)

        layer.weight.register_post_accumulate_grad_hook(reduce)
        layer(torch.full((1, 3), float(ctx.rank))).backward()
        return layer.weight.grad[0].tolist()

    assert simulate(8, job) == [[28.0] * 3] * 8


def test_data_parallel_training_equals_the_reference() -> None:
    case = models.transformer()

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=0.1)

    def job(ctx: RankContext) -> dict[str, torch.Tensor]:
        model = case.build()
        optimizer = sgd(list(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            case.loss(model, case.batch(step, 0, ctx.rank)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
        return dict(model.named_parameters())

    trace = train_reference(case.build(), case.batches(3, 1, 8), sgd, loss_fn=case.loss)
    for parameters in simulate(8, job):
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach(), trace.parameters[name])


def test_each_rank_has_its_own_generators() -> None:
    def job(ctx: RankContext) -> list[float]:
        drawn = []
        for _ in range(5):
            drawn += [torch.rand(()).item(), random.random(), np.random.random_sample()]
            dist.barrier()  # the other ranks draw meanwhile
        return drawn

    torch_state, python_state = torch.get_rng_state(), random.getstate()
    results = simulate(8, job)
    assert all(drawn == results[0] for drawn in results)
    assert len(set(results[0])) == 15
    assert simulate(2, job) == results[:2]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_each_rank_has_its_own_environment() -> None:
    def job(ctx: RankContext) -> tuple[str | None, ...]:
        os.environ["OWN"] = str(ctx.rank)
        dist.barrier()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OWN")
        return tuple(os.environ.get(name) for name in names)

    results = simulate(8, job, ranks_per_node=4)
    assert results[6] == ("6", "8", "2", "4", "1", "6")
    assert "OWN" not in os.environ
    assert "RANK" not in os.environ


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends because it took long; but for pytest, which fails what hangs."""
    monkeypatch.setattr("tests.simulated.STOP_S", math.inf)


@pytest.mark.usefixtures("_patient")
def test_failure_on_one_rank_stops_the_others_and_names_only_it() -> None:
    def job(ctx: RankContext) -> None:
        if ctx.rank == 5:
            raise KeyError("only here")
        dist.barrier()

    with pytest.raises(RankError, match="rank 5: KeyError") as caught:
        simulate(8, job, timeout_s=math.inf)
    assert list(caught.value.by_rank) == [5]


@pytest.mark.parametrize("num_barriers", [0, 1, 2])
def test_failure_on_every_rank_is_seen_on_every_rank(num_barriers: int) -> None:
    def job(ctx: RankContext) -> None:
        for _ in range(num_barriers):
            dist.barrier()
        raise ValueError("no rank likes this")

    for _ in range(5):
        raises_on_every_rank(lambda: simulate(8, job), ValueError, "likes")


@pytest.mark.usefixtures("_patient")
def test_a_collective_that_fails_stops_the_others_at_once() -> None:
    def job(ctx: RankContext) -> None:
        all_gather(torch.empty(3), torch.ones(1))  # for 4 ranks

    with pytest.raises(RankError) as caught:
        simulate(4, job, timeout_s=math.inf)
    assert caught.value.by_rank


@pytest.mark.usefixtures("_patient")
def test_collective_missing_on_one_rank_is_found_at_once() -> None:
    def job(ctx: RankContext) -> None:
        if ctx.rank != 2:
            dist.barrier()

    with pytest.raises(RankError, match="waits for ranks that do not come") as caught:
        simulate(4, job, timeout_s=math.inf)
    assert sorted(caught.value.by_rank) == [0, 1, 3]
    assert "dist.barrier()" in caught.value.tracebacks[0]


@pytest.mark.usefixtures("_patient")
def test_group_made_on_one_rank_only_is_found_at_once() -> None:
    def job(ctx: RankContext) -> None:
        if ctx.rank == 0:
            dist.new_group([0, 1])

    with pytest.raises(RankError, match="waits for ranks that do not come") as caught:
        simulate(4, job, timeout_s=math.inf)
    assert list(caught.value.by_rank) == [0]


def test_rank_that_never_ends_is_reported() -> None:
    def job(ctx: RankContext) -> None:
        while ctx.rank == 1 and time.monotonic() < end_s:
            time.sleep(0.01)

    end_s = time.monotonic() + 2
    with pytest.raises(RankError, match=r"did not end in 0\.5 s") as caught:
        simulate(2, job, timeout_s=0.5)
    assert "did not end" in str(caught.value.by_rank[1])


def test_torch_is_as_before_after_a_failure() -> None:
    def job(ctx: RankContext) -> None:
        dist.new_group([0])
        raise ValueError

    with pytest.raises(RankError):
        simulate(2, job)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1.0
    finally:
        dist.destroy_process_group()
