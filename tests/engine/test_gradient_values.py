"""Uses of a sharded parameter's gradient other than stepping on it."""

import copy
import math
import os
import pickle
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mics_strategy import CheckpointError, LifecycleError, ShardConfig, shard
from mics_strategy.comm import placement
from mics_strategy.engine.exact_dtensor import ExactDTensor
from tests.ranks import RankContext, RankPool, raises_on_every_rank
from tests.torch_versions import kinds_of_dtensors


def _trained() -> tuple[nn.Module, nn.Module]:
    """A plain model with its gradients, and the same sharded.

    All ranks see the same batch.
    """
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    sharded = copy.deepcopy(plain)
    shard(sharded, ShardConfig(partition_size=2))
    for model in (plain, sharded):
        model(torch.ones(2, 3)).square().sum().backward()
    return plain, sharded


def _gathered(ctx: RankContext) -> None:
    plain, sharded = _trained()
    used: list[DTensor] = []
    gather, placement._all_gather = placement._all_gather, lambda *args: (used.append(args[0]), gather(*args))[1]
    try:
        for parameter, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    finally:
        placement._all_gather = gather
    assert len(used) == len(list(plain.parameters()))  # none by torch's gather, which damages the heap on gloo


def test_full_tensor_of_a_gradient_uses_our_all_gather(ranks: RankPool) -> None:
    ranks(4, _gathered, ranks_per_node=2)


def _compared(ctx: RankContext) -> None:
    plain, sharded = _trained()
    parameter, expected = sharded[0].weight, plain[0].weight.grad.clone()
    assert torch.allclose(parameter.grad, expected)
    assert torch.allclose(expected, parameter.grad)
    expected[4, 2] += 1e-3  # on the last shard alone
    assert not torch.allclose(parameter.grad, expected)
    assert not torch.equal(expected, parameter.grad)
    assert torch.allclose(parameter.grad, expected, atol=1e-2)


@kinds_of_dtensors
def test_comparison_of_a_gradient_uses_the_full_tensor(ranks: RankPool) -> None:
    ranks(4, _compared, ranks_per_node=2)


def _computed_with(ctx: RankContext) -> None:
    plain, sharded = _trained()
    parameter, expected = sharded[0].weight, plain[0].weight.grad
    kept = {
        "copied": copy.deepcopy(parameter.grad),
        "cloned": parameter.grad.clone(),
        "detached": parameter.grad.detach(),
        "doubled": parameter.grad * 2,
        "of both": parameter.grad + parameter.detach(),
    }
    assert {type(value) for value in kept.values()} == {ExactDTensor}
    local = parameter.grad.to_local().clone()
    parameter.grad.mul_(2)
    assert torch.equal(parameter.grad.to_local(), 2 * local)
    assert torch.equal(kept["copied"].to_local(), local)
    assert torch.equal(kept["doubled"].to_local(), 2 * local)
    assert type(pickle.loads(pickle.dumps(parameter.grad))) is DTensor
    assert torch.equal(parameter.grad + expected, 3 * expected)  # with a plain tensor: plain, and whole
    assert bool(torch.isclose(expected, parameter.grad / 2).all())


def test_results_computed_from_a_gradient_are_sharded_or_whole(ranks: RankPool) -> None:
    ranks(4, _computed_with, ranks_per_node=2)


def _saved_on_rank_0(ctx: RankContext) -> None:
    _, sharded = _trained()
    if ctx.rank == 0:
        torch.save(sharded.state_dict(), "weights.pt")
    torch.save({"weight": sharded[0].weight, "grad": sharded[0].weight.grad}, f"part-{ctx.rank}.pt")
    torch.distributed.barrier()
    part = torch.load(f"part-{ctx.rank}.pt")
    assert torch.equal(part["weight"].to_local(), sharded[0].weight.to_local())
    assert torch.equal(part["grad"].to_local(), sharded[0].weight.grad.to_local())
    if ctx.rank > 0:
        with pytest.raises(CheckpointError, match="part of rank 0 of a sharded tensor, but this is rank 1"):
            torch.load("weights.pt")
    else:
        torch.load("weights.pt")


def test_the_part_of_a_rank_is_not_loaded_as_that_of_another(ranks: RankPool) -> None:
    ranks(2, _saved_on_rank_0)


def _in_a_loss(ctx: RankContext) -> None:
    _, sharded = _trained()
    sharded.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph", UserWarning)
        sharded(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    assert sharded[0].weight.grad.detach().norm() > 0
    torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    sharded[0].weight.grad.norm()


def test_a_gradient_whose_graph_is_lost_is_refused_in_a_loss(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, _in_a_loss), LifecycleError, "create_graph=True.*full_tensor")


def _in_a_child(ctx: RankContext, what: str) -> None:
    _, sharded = _trained()
    uses = {"forward": lambda: sharded(torch.ones(2, 3)), "norm": lambda: sharded[0].weight.norm()}
    with torch.no_grad():
        sharded[0].weight.mul_(2)  # so that a forward gathers
    child = os.fork()
    if child == 0:
        try:
            uses[what]()
        except LifecycleError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert sharded(torch.ones(2, 3)).isfinite().all()


@pytest.mark.parametrize("what", ["forward", "norm"])
def test_a_forked_child_is_refused_instead_of_waiting_for_ever(ranks: RankPool, what: str) -> None:
    ranks(2, _in_a_child, what)


def _objects_of_gradients(ctx: RankContext) -> list[bool]:
    _, sharded = _trained()
    same = []
    for keeps in (False, True, False):
        first = id(sharded[0].weight.grad)
        kept = sharded[0].weight.grad if keeps else None
        sharded.zero_grad()
        sharded(torch.ones(2, 3)).square().sum().backward()
        same.append(id(sharded[0].weight.grad) == first)
        del kept
    return same


def test_only_a_gradient_that_is_kept_is_copied(ranks: RankPool) -> None:
    assert ranks(2, _objects_of_gradients) == [[True, False, True]] * 2


def _clipped_by_torch(ctx: RankContext) -> None:
    plain, sharded = _trained()
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert all(parameter.grad is not None for parameter in sharded.parameters())  # ends reductions
    with mock.patch.object(ExactDTensor, "finish_sum", autospec=True, side_effect=ExactDTensor.finish_sum) as reduced:
        norm = nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
    assert reduced.call_count == 1
    torch.testing.assert_close(float(norm), float(expected_norm))
    for parameter, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_clipping_by_torch_reduces_all_norms_at_once(ranks: RankPool) -> None:
    ranks(2, _clipped_by_torch)


def _norm_of_narrow(ctx: RankContext) -> tuple[float, float]:
    """The norm of bf16 gradients, and the same in fp64."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(37, 5), nn.Linear(5, 2)).bfloat16()
    sharded = shard(model, ShardConfig(partition_size=2))
    model(torch.randn(2, 37, dtype=torch.bfloat16)).square().sum().backward()
    norm = sharded.clip_grad_norm_(math.inf)
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert {grad.dtype for grad in grads} == {torch.bfloat16}
    return norm.item(), torch.cat([grad.double().flatten() for grad in grads]).norm().item()


def test_the_norm_of_bf16_gradients_is_computed_in_fp32(ranks: RankPool) -> None:
    for norm, expected in ranks(2, _norm_of_narrow):
        assert norm == pytest.approx(expected, rel=1e-6)
