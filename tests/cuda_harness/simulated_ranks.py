"""Ranks that are threads, each with a pretended GPU: what do all of them launch?

A collective between threads blocks, which on a GPU it does not. Where the order of launches is the question, gathers
and sums are therefore noted and not carried out; only what the hosts decide by is exchanged.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.cuda_harness.allocations import DEVICE, kind_of
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.pretence import equal_replicas, pretended_cuda
from tests.cuda_harness.streams import alone, here
from tests.cuda_harness.works import written_and_read
from tests.rank_report import RankContext
from tests.simulated import simulate

# By operators of c10d, the methods of a group: of torch 2.13, and of those before. Where a group of threads lacks one
# of two names, C++ calls the other and wraps its work in another object, which is not the one that was noted.
_METHODS: dict[str, tuple[str, ...]] = {
    "_allgather_base_": ("all_gather_single", "_allgather_base"),
    "_reduce_scatter_base_": ("reduce_scatter_single", "_reduce_scatter_base"),
    "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "allreduce_": ("allreduce",),
    "allreduce_coalesced_": ("allreduce_coalesced",),
    "alltoall_": ("alltoall",),
    "alltoall_base_": ("all_to_all_single", "alltoall_base"),
    "broadcast_": ("broadcast",),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
}

_DECIDED_BY = "default_pg"  # description of the group whose values hosts look at


def simulate_gpus(
    world_size: int,
    job: Callable[..., Any],
    *args: object,
    ranks_per_node: int,
    moves_data: bool = True,
    one_device: bool = True,
) -> tuple[list[Machine], list[Any]]:
    """Run `job(ctx, machine, *args)` on every rank. Returns the machines and the results, by rank.

    Args:
        world_size: Number of ranks.
        job: What each does.
        args: Given to every rank.
        ranks_per_node: In pretended nodes of so many.
        moves_data: Whether gathers and sums are carried out, one blocking the next.
        one_device: Whether each rank sees its GPU only, as number 0; else it is the one of its local rank.
    """

    def with_gpu(ctx: RankContext) -> tuple[Machine, Any]:
        with Machine(
            0 if one_device else ctx.local_rank, runs_hooks_apart=False
        ) as machine:  # a simulated rank is one thread
            return machine, job(ctx, machine, *args)

    with pretended_cuda(), nullcontext() if moves_data else equal_replicas(), _noted(moves_data):
        done = simulate(world_size, with_gpu, ranks_per_node=ranks_per_node)
    return [machine for machine, _ in done], [result for _, result in done]


@contextmanager
def _noted(moves_data: bool) -> Iterator[None]:
    methods = vars(threaded.ProcessLocalGroup)
    with ExitStack() as stack:
        for operator, names in _METHODS.items():
            original = next(methods[name] for name in names if name in methods)
            for name in names:
                if hasattr(threaded.ProcessLocalGroup, name):
                    noting = _noting(original, operator, moves_data)
                    stack.enter_context(mock.patch.object(threaded.ProcessLocalGroup, name, noting))
        yield


def _noting(original: Callable[..., Any], operator: str, moves_data: bool) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        outs, ins = written_and_read(operator, arguments)
        machine = here().machine
        if machine is None or not any(kind_of(tensor) == DEVICE for tensor in (*outs, *ins)):
            return original(group, *args, **kwargs)
        options = arguments[-1]
        if moves_data or group.group_desc == _DECIDED_BY:
            with alone():  # one rank's thread copies for all
                work = original(group, *args, **kwargs)
        else:
            work = threaded.ret_work(None)
        machine.follow(work, operator, group, outs, ins, bool(getattr(options, "asyncOp", True)))
        return work

    return method
