"""Reading of used-parameter counts, without waiting for a GPU.

A GPU is simulated by tensors that claim to be on one.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mics_strategy import LifecycleError, ShardConfig, Topology, shard
from mics_strategy.engine.rank_agreement import READ_AT_ONCE, AccumulationWindow, RankAgreement, ReplicaCheck
from mics_strategy.engine.streams import OpChain
from tests.ranks import RankContext, RankPool


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def make_check(groups: Any) -> tuple[RankAgreement, torch.Tensor]:
    counts = torch.zeros(4, dtype=torch.int32)
    check = RankAgreement(counts, [], groups, ReplicaCheck([], groups, -1))
    check._digests = counts[-3:].as_subclass(OnGpu)
    return check, counts


def test_a_gpu_is_waited_for_in_the_first_steps_only() -> None:
    check, _ = make_check(SimpleNamespace())
    event, waits = mock.Mock(), []
    with mock.patch.object(torch.cuda, "Event", return_value=event):
        for _ in range(READ_AT_ONCE + 2):
            check.record([])
            waits.append(event.synchronize.call_count)
    assert waits == [*range(1, READ_AT_ONCE + 1), READ_AT_ONCE, READ_AT_ONCE]


@pytest.mark.parametrize("step", [0, READ_AT_ONCE])
@pytest.mark.parametrize(("total", "message"), [(-1, "they differ"), (-2, "different numbers of backwards")])
def test_diverged_ranks_raise_at_once_in_the_first_steps_and_one_step_later_afterwards(
    step: int, total: int, message: str
) -> None:
    check, counts = make_check(SimpleNamespace(first_mismatch=lambda: "they differ", is_in_sync=lambda: False))
    with mock.patch.object(torch.cuda, "Event"):
        for _ in range(step):
            check.record([])
        counts[total] = 1
        if step >= READ_AT_ONCE:
            check.record([])
        with pytest.raises(LifecycleError, match=message):
            check.record([]) if step < READ_AT_ONCE else check.raise_if_desynced()


def test_counts_are_copied_from_pinned_memory_without_waiting() -> None:
    options_of_calls: list[dict[str, Any]] = []
    make = torch.tensor

    def tensor(values: list[int], *, pin_memory: bool, **options: Any) -> torch.Tensor:
        options_of_calls.append({"pin_memory": pin_memory})
        return make(values, **options)

    class Counts(OnGpu):
        def copy_(self, source: torch.Tensor, **options: Any) -> torch.Tensor:
            options_of_calls.append(options)
            return super().copy_(source, **options)

    groups: Any = SimpleNamespace(desync_digest=0, world_group=None)
    replicas: Any = SimpleNamespace(difference=lambda: None)
    counts = torch.ones(3, dtype=torch.int32)
    agreement = RankAgreement(counts, [], groups, replicas)
    agreement._counts = counts.as_subclass(Counts)
    with mock.patch.object(torch, "tensor", tensor):
        agreement.reduce(set(), 7, AccumulationWindow(predicts=False))
    assert options_of_calls == [{"pin_memory": True}, {"non_blocking": True}]
    assert counts.tolist() == [0, 0, 0]


def errors_of_uneven_nodes(ctx: RankContext) -> str:
    """The error of a rank whose node runs three backwards, the other two, where totals are read a step later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = shard(model, ShardConfig.preset("mics", topology=Topology(ranks_per_node=2)), units=[nn.Linear])
    check = sharded._engine.reducer.agreement
    check._digests = check._digests.as_subclass(OnGpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(torch.cuda, "Event"):
        for step in range(3):
            try:
                for _ in range(3 if step == 2 and ctx.rank >= 2 else 2):
                    model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            except LifecycleError as error:
                return str(error)
            optimizer.zero_grad()
    return ""


def test_gpus_of_nodes_with_different_windows_raise(ranks: RankPool) -> None:
    for error in ranks(4, errors_of_uneven_nodes, ranks_per_node=2):
        assert "Ranks ran different numbers of backwards" in error


def reads_of_a_step(ctx: RankContext, preset: str) -> int:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)), units=[nn.Linear])
    second_hop = sharded._engine.reducer.streams.second_hop
    launch = second_hop.launch

    def final_at_once(*args: Any, **options: Any) -> OpChain:
        """Make gradients final when their second hop is launched, as on a GPU."""
        chain = launch(*args, **options)
        chain.wait()
        return chain

    with (
        mock.patch.object(second_hop, "launch", final_at_once),
        mock.patch.object(RankAgreement, "_by_position", autospec=True, side_effect=RankAgreement._by_position) as read,
    ):
        for micro in range(2):
            with sharded.micro_step(micro, of=2):
                model(torch.ones(1, 4)).sum().backward()
        sharded.clip_grad_norm_(1.0)
    return read.call_count


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "mics"])
def test_no_count_is_read_if_the_last_backward_reduced_everything(ranks: RankPool, preset: str) -> None:
    assert ranks(4, reads_of_a_step, preset, ranks_per_node=2) == [0] * 4
