"""Does the machinery of the tests report what happens on the ranks?"""

import os
import pickle
import random
import signal
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.rank_process import pickled_by_value
from tests.ranks import RankContext, RankError, RankPool, raises_on_every_rank, simulate


def _rank_and_sum(ctx: RankContext, offset: float) -> tuple[int, float]:
    total = torch.tensor(ctx.rank + offset)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _place(ctx: RankContext) -> tuple[str | int, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return ctx.local_rank, ctx.node, ctx.num_nodes, *(os.environ[name] for name in names)


def _set_variable(ctx: RankContext) -> str | None:
    before = os.environ.get("LEFT_BY_A_JOB")
    os.environ["LEFT_BY_A_JOB"] = "1"
    return before


def _draws(ctx: RankContext) -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def _tensor(ctx: RankContext, scale: torch.Tensor) -> torch.Tensor:
    return scale * ctx.rank


def _dtensor_sum(ctx: RankContext) -> float:
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("a", "b"))
    sharded = distribute_tensor(torch.arange(8.0), mesh["b"], [Shard(0)])
    total = (sharded * 2).sum()
    assert isinstance(total, DTensor)
    return total.full_tensor().item()


class _Model:
    """Refers to itself, as models do."""

    def __init__(self) -> None:
        self.itself = self


_models: weakref.WeakSet[_Model] = weakref.WeakSet()


def _error_of_a_model(ctx: RankContext) -> Exception:
    """An error like that of `run_on_all_ranks`: the traceback of its cause holds a model."""
    model = _Model()
    _models.add(model)

    def fail() -> None:
        raise KeyError(id(model))

    try:
        try:
            fail()
        except KeyError as cause:
            raise ValueError("refused") from cause
    except ValueError as error:
        return error.with_traceback(None)


def _num_models(ctx: RankContext) -> int:
    return len(_models)


def _fail_on_rank_1(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise KeyError("only here")
    dist.barrier()


def _fail_everywhere(ctx: RankContext, error_type: type[Exception]) -> None:
    raise error_type(f"rank {ctx.rank} does not like this")


class _Unpicklable(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.lock = threading.Lock()


def _fail_unpicklably(ctx: RankContext) -> None:
    raise _Unpicklable(code=3)


def _hang_on_rank_0(ctx: RankContext) -> None:
    if ctx.rank == 0:
        time.sleep(100)
    dist.barrier()


def _die_on_rank_1(ctx: RankContext) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leak_thread(ctx: RankContext) -> None:
    threading.Thread(target=time.sleep, args=(5,), name="left").start()


def _leak_group(ctx: RankContext) -> None:
    dist.init_process_group("gloo", timeout=None)
    dist.barrier()  # a rank that ends sooner breaks the connections that the other is making


def _own_group(ctx: RankContext) -> int:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return size


def _warn(ctx: RankContext) -> None:
    warnings.warn("odd", stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_all_ranks_answer(ranks: RankPool, world_size: int) -> None:
    total = sum(rank + 0.5 for rank in range(world_size))
    assert ranks(world_size, _rank_and_sum, 0.5) == [(r, total) for r in range(world_size)]


def test_ranks_have_a_place_in_a_node(ranks: RankPool) -> None:
    assert ranks(4, _place, ranks_per_node=2) == [
        (0, 0, 2, "0", "4", "0", "2", "0"),
        (1, 0, 2, "1", "4", "1", "2", "0"),
        (0, 1, 2, "2", "4", "0", "2", "1"),
        (1, 1, 2, "3", "4", "1", "2", "1"),
    ]


def test_environment_of_a_job_is_restored(ranks: RankPool) -> None:
    assert ranks(2, _set_variable) == [None, None]
    assert ranks(2, _set_variable) == [None, None]
    assert "LEFT_BY_A_JOB" not in os.environ


def test_job_gets_more_variables(ranks: RankPool) -> None:
    assert ranks(1, _set_variable, env={"LEFT_BY_A_JOB": "given"}) == ["given"]


def test_every_job_starts_with_the_same_seeds(ranks: RankPool) -> None:
    first = ranks(2, _draws)
    assert first[0] == first[1]
    assert ranks(2, _draws) == first


def test_what_a_job_returns_keeps_no_model_alive(ranks: RankPool) -> None:
    """It would be there in all later jobs of the process, whose hooks of optimizers would ask it."""
    assert [str(error) for error in ranks(2, _error_of_a_model)] == ["refused"] * 2
    assert ranks(2, _num_models) == [0, 0]


def test_tensors_travel_by_value(ranks: RankPool) -> None:
    results = ranks(2, _tensor, torch.tensor([1.0, 2.0]))
    assert [result.tolist() for result in results] == [[0.0, 0.0], [1.0, 2.0]]
    assert not results[1].is_shared()


ODD_TENSORS = {
    "scalar": torch.tensor(3),
    "empty": torch.ones(0, 3),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "part_of_another": torch.arange(6.0)[2:4],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "differentiable": torch.ones(2, requires_grad=True),
    "on_meta": torch.ones(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_tensors_of_every_kind_are_copied(name: str) -> None:
    tensor = ODD_TENSORS[name]
    copied, again = pickle.loads(pickled_by_value((tensor, tensor)))
    assert copied is again
    assert type(copied) is type(tensor)
    for attribute in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(copied, attribute) == getattr(tensor, attribute)
    if tensor.layout is torch.strided:
        assert copied.stride() == tensor.stride()
    if not tensor.is_meta:
        assert torch.equal(copied.to_dense(), tensor.to_dense())


def test_a_part_of_a_tensor_travels_without_the_rest() -> None:
    assert len(pickled_by_value(torch.zeros(100_000)[:10])) < 1_000


def test_dtensors_work_in_one_job_after_the_other(ranks: RankPool) -> None:
    for _ in range(2):
        assert ranks(4, _dtensor_sum) == [56.0] * 4


def test_failure_on_one_rank_is_reported_and_the_next_job_works(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_S", 100.0)
    with pytest.raises(RankError, match=r"rank 1: KeyError: 'only here'") as caught:
        ranks(4, _fail_on_rank_1)
    error = caught.value
    assert TimeoutError not in map(type, error.by_rank.values()), "the others were told at once"
    assert next(iter(error.by_rank)) == 1
    assert type(error.by_rank[1]) is KeyError
    assert "_fail_on_rank_1" in error.tracebacks[1]
    assert ranks(2, _rank_and_sum, 0.0) == [(0, 1.0), (1, 1.0)]


def test_exception_that_cannot_travel_keeps_its_name(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="_Unpicklable: code 3"):
        ranks(2, _fail_unpicklably)


def test_hanging_job_is_killed_and_tells_where_it_hangs(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="_hang_on_rank_0") as caught:
        ranks(2, _hang_on_rank_0, timeout_s=1.0)
    assert isinstance(caught.value.by_rank[0], TimeoutError)
    assert ranks(2, _rank_and_sum, 0.0) == [(0, 1.0), (1, 1.0)]


def test_death_of_a_process_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="exit code -9") as caught:
        ranks(2, _die_on_rank_1)
    assert isinstance(caught.value.by_rank[1], ChildProcessError)


def test_leaked_thread_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"LeakError.*\['left'\]"):
        ranks(1, _leak_thread)


def test_leaked_group_is_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"LeakError.*default process group"):
        ranks(2, _leak_group, default_group=False)


def test_job_may_make_its_own_group(ranks: RankPool) -> None:
    assert ranks(3, _own_group, default_group=False) == [3, 3, 3]


def test_warnings_are_errors_on_ranks(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, _warn), UserWarning, "odd")


def test_unknown_size_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="nodes of 3"):
        ranks(4, _rank_and_sum, 0.0, ranks_per_node=3)


def test_raises_on_every_rank_accepts_what_all_raise(ranks: RankPool) -> None:
    def run() -> object:
        return ranks(3, _fail_everywhere, ValueError)

    error = raises_on_every_rank(run, ValueError, "does not like")
    assert sorted(error.by_rank) == [0, 1, 2]
    with pytest.raises(AssertionError, match="not TypeError"):
        raises_on_every_rank(run, TypeError)
    with pytest.raises(AssertionError, match="is not in"):
        raises_on_every_rank(run, ValueError, "likes")


def test_raises_on_every_rank_refuses_silence() -> None:
    with pytest.raises(AssertionError, match="no rank raised"):
        raises_on_every_rank(lambda: None, ValueError)

    def fail_on_rank_1(ctx: RankContext) -> None:
        if ctx.rank == 1:
            raise ValueError("only here")

    with pytest.raises(AssertionError, match=r"ranks \[0\] did not raise"):
        raises_on_every_rank(lambda: simulate(2, fail_on_rank_1), ValueError)
