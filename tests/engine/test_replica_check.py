"""Replicas of a shard stay equal under random numbers; differences are detected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import ConfigError, LifecycleError
from tests.engine.training import whole
from tests.engine.unusual import WIDTH, Block, ClampedBlock, Stack
from tests.ranks import RankContext, RankPool, raises_on_every_rank

Change = Callable[[nn.Module, int], None]


class Langevin(torch.optim.SGD):
    """Adds noise to what it updates."""

    def step(self, closure: object = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.1 * torch.randn_like(parameter))


def init_again(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter)


def init_through_data(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        parameter.data.uniform_(-1, 1)


def noisy_gradients(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn_like(parameter.grad))


def nothing(model: nn.Module, rank: int) -> None:
    pass


def one_rank_writes(model: nn.Module, rank: int) -> None:
    if rank == 3:
        with torch.no_grad():
            model.blocks[2].up.weight.to_local().add_(1)


def trained(
    ctx: RankContext, preset: str, change: Change, steps: int, **options: object
) -> tuple[list[Tensor], Tensor]:
    """Job: this rank's shards after some steps, and a number of its own generator."""
    model = Stack()
    shard(model, ShardConfig.preset(preset, update_locality="element", **options), units=[Block])
    torch.manual_seed(ctx.rank)
    optimizer = Langevin(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        change(model, ctx.rank)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()], torch.rand(1)


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.shape == b.shape and a.numel())


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("change", [nothing, init_again, init_through_data, noisy_gradients])
def test_random_numbers_are_the_same_on_replicas_and_others_on_every_shard(ranks: RankPool, change: Change) -> None:
    of_rank = ranks(4, trained, "mics", change, 3, ranks_per_node=2)  # ranks 0 and 2 hold the same, as 1 and 3 do
    shards, own = [shards for shards, _ in of_rank], [float(number) for _, number in of_rank]
    assert all(map(torch.equal, shards[0], shards[2]))
    assert all(map(torch.equal, shards[1], shards[3]))
    assert distance(shards[0], shards[1]) > 0.01
    num_draws = 0 if change is nothing else 3 * len(shards[0])  # none in the steps of the optimizer
    for rank, number in enumerate(own):  # a rank's own generator has given one number for each operation
        generator = torch.Generator().manual_seed(rank)
        for _ in range(num_draws):
            torch.randint(1 << 62, (1,), generator=generator)
        assert number == float(torch.rand(1, generator=generator))


@pytest.mark.parametrize("preset", ["mics", "ddp", "hsdp", "paro-nii"])
def test_a_replica_that_has_drifted_is_found_by_name(ranks: RankPool, preset: str) -> None:
    message = r"Unit `blocks.2`: ranks [01] and 3 hold the same shard"
    raises_on_every_rank(
        lambda: ranks(4, trained_with_drift, preset, "start", ranks_per_node=2), LifecycleError, match=message
    )


def trained_with_drift(ctx: RankContext, preset: str, check: str | int) -> int:
    """Job: `one_rank_writes` in the 12th step of 16."""
    model = Stack()
    shard(model, ShardConfig.preset(preset, replica_check=check), units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = 0 if check == "start" else 12
    for step in range(16):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == first:
            one_rank_writes(model, ctx.rank)
    return step


def test_replicas_are_compared_again_every_so_many_steps(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(4, trained_with_drift, "mics", 5, ranks_per_node=2), LifecycleError, match="hold the same shard"
    )
    assert ranks(4, trained_with_drift, "mics", "never", ranks_per_node=2) == [15] * 4


class RankBlock(ClampedBlock):
    """Writes something else on every rank."""

    rank: int

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.fill_(self.rank)
        return super().forward(x)


def write_different_values(ctx: RankContext) -> None:
    RankBlock.rank = ctx.rank
    model = Stack(RankBlock)
    shard(model, "zero3", units=[RankBlock])
    model(torch.ones(2, WIDTH)).square().mean().backward()
    model.head.bias.grad  # noqa: B018


def test_forwards_that_write_different_values_are_detected(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, write_different_values), LifecycleError, match="Ranks wrote different values")


@pytest.mark.parametrize("value", ["always", 0, True, 2.5])
def test_other_checks_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"`replica_check=.*` is not available"):
        ShardConfig(replica_check=value)


def test_replica_check_supports_narrow_dtypes(ranks: RankPool) -> None:
    for parameters in ranks(4, trained_in_bf16, ranks_per_node=2):
        assert parameters.isfinite().all()


def trained_in_bf16(ctx: RankContext) -> Tensor:
    model = Stack().bfloat16()
    shard(model, "mics", units=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.head.weight)
