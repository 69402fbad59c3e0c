"""Writes of a forward into a parameter are kept exactly, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import ConfigError, LifecycleError
from tests.engine.training import whole, wholes
from tests.engine.unusual import WIDTH, Block, ClampedBlock, Stack
from tests.ranks import RankContext, RankPool, raises_on_every_rank


class Bounded(ClampedBlock):
    """Writes what changes nothing."""

    limit: float = 100.0

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters() if self.limit else ():
            with torch.no_grad():
                parameter.clamp_(max=self.limit)
        return Block.forward(self, x)


class Codebook(nn.Module):
    """Entries that no optimizer trains and every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.ones(5, WIDTH), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.entries.lerp_(torch.full((5, WIDTH), 2.0), 0.5)
        return self.linear(x) + self.entries.mean(0)


def stack(block: type[Block], **attributes: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Stack(block)
    for each in model.blocks:
        for name, value in attributes.items():
            setattr(each, name, value)
    return model


def trained(ctx: RankContext, limit: float, config: ShardConfig) -> dict[str, Tensor]:
    """Job: parameters after three steps of a model that may write into all of them."""
    model = stack(Bounded, limit=limit)
    shard(model, config, units=[Bounded])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        model(torch.randn(3, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "paro-nig", "zeropp-hpz"])
def test_writes_that_change_nothing_cost_masters_no_precision(ranks: RankPool, preset: str) -> None:
    config = ShardConfig.preset(preset, param_dtype="bfloat16")
    (with_writes, *_), (without, *_) = (ranks(4, trained, limit, config, ranks_per_node=2) for limit in (100.0, 0.0))
    assert all(torch.equal(with_writes[name], without[name]) for name in without)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in without.values())


def moved_codebook(ctx: RankContext, preset: str) -> Tensor:
    """Job: the entries after two training forwards and one in evaluation."""
    model = nn.Sequential(Codebook(), Codebook(), nn.Linear(WIDTH, 2))
    shard(model, preset, units=[Codebook])
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    return whole(model[1].entries)


@pytest.mark.parametrize("preset", ["mics", "zero2", "ddp"])
def test_writes_into_frozen_parameters_are_kept(ranks: RankPool, preset: str) -> None:
    for entries in ranks(2, moved_codebook, preset):
        torch.testing.assert_close(entries, torch.full((5, WIDTH), 2 - 0.5**3))


def written_under_a_codec(ctx: RankContext) -> None:
    model = stack(ClampedBlock)
    shard(model, ShardConfig.preset("zero3", weight_codec="int8"), units=[ClampedBlock])
    model(torch.ones(2, WIDTH))


def test_writes_into_decoded_parameters_are_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(4, written_under_a_codec, ranks_per_node=2),
        LifecycleError,
        match="wrote into parameter `blocks.0.scale`.*weight_codec='none'",
    )


def continued_after_a_refusal(ctx: RankContext, prefetch: int, has_gradients: bool) -> tuple[list[Tensor], set[type]]:
    """Job: outputs before a refused write and twice after it, and types of the parameters."""
    model = stack(Bounded, limit=0.0)
    shard(model, ShardConfig.preset("mics", prefetch=prefetch, weight_codec="int8", codec_links="all"), units=[Bounded])
    x = torch.ones(2, WIDTH)
    outputs = [model(x).detach().clone()]
    model.blocks[1].limit = 1e-3
    with torch.set_grad_enabled(has_gradients), pytest.raises(LifecycleError):
        model(x)
    model.blocks[1].limit = 0.0
    for _ in range(2):
        outputs.append(model(x).detach().clone())
    model(x).sum().backward()
    return outputs, {type(parameter) for parameter in model.blocks[1].parameters()}


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_after_a_refused_write_training_goes_on(ranks: RankPool, prefetch: int, has_gradients: bool) -> None:
    for (before, *after), kinds in ranks(4, continued_after_a_refusal, prefetch, has_gradients, ranks_per_node=2):
        assert all(torch.equal(before, each) for each in after)
        assert kinds == {ShardedParameter}


def embedding(max_norm: float | None) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, WIDTH, max_norm=max_norm), nn.Linear(WIDTH, 2))


def sharded_max_norm(ctx: RankContext) -> None:
    shard(embedding(1.0), "mics")


def test_renormalization_that_would_diverge_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, sharded_max_norm), ConfigError, match="`0` renormalizes the rows that a batch looks up"
    )


def renormalized_by_hand(ctx: RankContext) -> Tensor:
    """Job: what the refusal advises."""
    model = embedding(None)
    shard(model, "mics")
    weight, max_norm = model[0].weight, 1.0
    with torch.no_grad():
        weight.mul_((max_norm / weight.norm(dim=1, keepdim=True).clamp(min=1e-7)).clamp(max=1))
    found = whole(weight)
    model(torch.tensor([1])).sum().backward()
    return found


def test_rows_can_be_renormalized_after_the_step(ranks: RankPool) -> None:
    for weight in ranks(2, renormalized_by_hand):
        assert weight.norm(dim=1).max() <= 1 + 1e-6
        assert weight.norm(dim=1).max() > 0.9


def handed_out(ctx: RankContext, preset: str, is_changed: bool) -> Tensor:
    """Job: a weight as a forward has it is written later, perhaps after the sharded one."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    nn.init.ones_(model[0].weight)
    shard(model, preset)
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
        if is_changed:
            model[0].weight.add_(1)
        kept[0].data[1:].mul_(3)
    kept[0].requires_grad_(False)
    assert not model[0].weight.requires_grad
    return whole(model[0].weight)


@pytest.mark.parametrize("preset", ["zero3", "zero1", "mics"])
def test_a_weight_that_was_handed_out_is_written_or_refused(ranks: RankPool, preset: str) -> None:
    for found in ranks(2, handed_out, preset, False):
        torch.testing.assert_close(found, torch.tensor([1.0, *[3.0] * (WIDTH - 1)]).view(-1, 1).expand(WIDTH, WIDTH))
    told = "was written after the sharded parameter had changed"
    raises_on_every_rank(lambda: ranks(2, handed_out, preset, True), LifecycleError, told)


def handed_out_before_a_step(ctx: RankContext, preset: str) -> tuple[Tensor, Tensor]:
    """Job: a weight as a forward has it is written between a backward and the step. Returns it, and its gradient."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    shard(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    model(torch.ones(1, WIDTH)).sum().backward()
    kept[0].data.fill_(2.0)
    optimizer.step()
    return whole(model[0].weight), whole(model[0].weight.grad)


@pytest.mark.parametrize("preset", ["zero3", "zero1", "mics"])
def test_a_step_takes_what_was_written_into_a_weight_that_was_handed_out(ranks: RankPool, preset: str) -> None:
    for found, grad in ranks(2, handed_out_before_a_step, preset):
        torch.testing.assert_close(found, 2.0 - 0.5 * grad)
