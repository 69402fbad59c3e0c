"""What a script computes from parameters and keeps: in losses, in buffers, in attributes of parameters."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mics_strategy import LifecycleError, ShardConfig, shard
from tests.ranks import RankContext, RankPool

PRESETS = ["zero3", "zero1", "ddp"]


def _batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _penalized(model: nn.Module, rank: int) -> Tensor:
    """A loss of a rank, with a penalty on the parameters."""
    return model(_batch(rank)).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


@torch.no_grad()
def _evaluated(ctx: RankContext, preset: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    expected = [_penalized(model, rank) for rank in range(ctx.world_size)]
    shard(model, ShardConfig.preset(preset))
    loss = _penalized(model, ctx.rank)
    assert f"{loss:.6f}" == f"{expected[ctx.rank]:.6f}"
    torch.testing.assert_close(loss.tolist(), expected[ctx.rank].item())
    torch.testing.assert_close(float(loss.numpy()), expected[ctx.rank].item())
    parts = [torch.empty_like(expected[0]) for _ in expected]
    dist.all_gather(parts, loss)
    torch.testing.assert_close(parts, expected)
    dist.all_reduce(loss)
    torch.testing.assert_close(float(loss), float(sum(expected)))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_loss_of_each_rank_is_gathered_printed_and_listed(ranks: RankPool, preset: str) -> None:
    ranks(2, _evaluated, preset)


def _values_of_parameters(ctx: RankContext) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    shard(model, ShardConfig.preset("zero3"))
    assert model[0].weight.tolist() == plain[0].weight.tolist()
    assert model[1].bias.abs().max().item() == plain[1].bias.abs().max().item()  # one row for two ranks
    weight = model[0].weight.detach()
    for refused in (weight, weight[:1], weight[0]):  # a write to the array, or by the collective, would be lost
        with pytest.raises(LifecycleError, match=r"`\.full_tensor\(\)\.numpy\(\)`"):
            refused.numpy()
        with pytest.raises(LifecycleError, match="leave the collective out"):
            dist.all_reduce(refused)


def test_values_are_those_of_the_whole_parameter_and_what_would_be_lost_is_refused(ranks: RankPool) -> None:
    ranks(2, _values_of_parameters)


class Masked(nn.Linear):
    """A layer with a mask and a scale that a script sets."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(1))
        self.weight.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "first"):
            self.weight.first = self.weight.detach().clone()
            self.weight.pickled = io.BytesIO()
            torch.save(self.weight, self.weight.pickled)
        return nn.functional.linear(x, self.weight * self.mask, self.bias) * self.weight.scale


def _trained(model: nn.Module, losses: list[int]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        sum(model(_batch(rank, step)).square().mean() / len(losses) for rank in losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in model:
            layer.mask = layer.weight.detach().abs() > 0.2
        for parameter in model.parameters():
            if hasattr(parameter, "first"):
                parameter.scale = parameter.scale * 0.9
                parameter.data.lerp_(parameter.first, 0.1)
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }


def _kept(ctx: RankContext, preset: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Masked(), Masked()).double()
    model = copy.deepcopy(plain)
    for layer in model:
        layer.weight.scale = 2.0  # `deepcopy` of a parameter leaves attributes out
    handle = shard(model, ShardConfig.preset(preset), units=[Masked])
    expected = _trained(plain, [*range(ctx.world_size)])
    found = _trained(model, [ctx.rank])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert isinstance(model[0].mask, DTensor)
    saved = handle.full_state_dict()
    assert ctx.rank or torch.equal(saved["0.mask"], expected["0.mask"])
    pickled = model[0].weight.pickled
    pickled.seek(0)
    assert torch.equal(torch.load(pickled), model[0].weight.first)


@pytest.mark.parametrize("preset", PRESETS)
def test_masks_and_attributes_train_as_in_one_process(ranks: RankPool, preset: str) -> None:
    ranks(2, _kept, preset)


class KeepsItsWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("kept", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.detach()
        return super().forward(x)


@torch.no_grad()
def _detached(ctx: RankContext) -> None:
    model = nn.Linear(1, 4, bias=False)
    shard(model, "zero3")
    doubled = model.weight * 2
    expected = doubled.full_tensor().clone()
    assert torch.equal(doubled.detach().squeeze_(1).full_tensor(), expected.squeeze(1))
    assert torch.equal(doubled.full_tensor(), expected)
    doubled.detach().mul_(2)
    assert torch.equal(doubled.full_tensor(), 2 * expected)


def test_a_detached_result_has_the_values_of_the_other_and_a_shape_of_its_own(ranks: RankPool) -> None:
    ranks(2, _detached)


def _aliased(ctx: RankContext) -> None:
    model = nn.Sequential(*(KeepsItsWeight() for _ in range(4)))
    shard(model, ShardConfig.preset("zero3"), units=[KeepsItsWeight])
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(LifecycleError, match="`kept` shares memory"):  # on every rank
        model(torch.ones(2, 4))


def test_a_buffer_on_the_memory_of_a_parameter_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks(2, _aliased)


def _unfrozen_for_a_moment(ctx: RankContext) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    x = torch.ones(2, 4)
    expected = model(x).detach()
    shard(model, ShardConfig.preset("zero3"))
    model[0].requires_grad_(True)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    with pytest.raises(LifecycleError, match="was frozen when the model was sharded"):
        model(x)


def test_a_frozen_parameter_may_be_unfrozen_where_no_gradients_are_computed(ranks: RankPool) -> None:
    ranks(2, _unfrozen_for_a_moment)
