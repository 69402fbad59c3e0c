"""Every parameter has its own scale under a codec, however small its values are.

The values of a block share a scale. With two parameters in a block the smaller one would become zero for ever: a gain
whose gradients are a ten-thousandth of a matrix's would never be trained, a small bias never be used.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import Codec, ConfigError, ShardConfig, load_checkpoint, save_checkpoint, shard
from mics_strategy.comm import route as routes
from mics_strategy.comm.route import Route, Stage
from mics_strategy.engine.layout import make_layout
from tests import models
from tests.checkpoint.test_matrix import state_of
from tests.engine.test_codecs_in_training import BOUND, CASES, PRESETS, config_of, printed
from tests.engine.training import Run, assert_identical, start, whole
from tests.ranks import RankContext, RankPool

SMALL = 1e-4


class Beside(nn.Module):
    """Large numbers and gradients beside small ones, in shapes that leave padding."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(SMALL * (1 + torch.rand(9)))
        self.weight = nn.Parameter(1 + torch.rand(9, 9))
        self.scalar = nn.Parameter(torch.tensor(SMALL))
        self.bias = nn.Parameter(SMALL * (1 + torch.rand(9)))
        self.wide = nn.Parameter(1 + torch.rand(2, 9))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        small = SMALL * (self.gain * x + self.bias + self.scalar * x)
        return x + x @ self.weight / 9 + small + self.wide.sum(0)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Beside(), Beside(), Beside())


def loss_of(model: nn.Module, rank: int) -> Tensor:
    x = 1 + torch.rand(4, 9, generator=torch.Generator().manual_seed(rank))
    return model(x).square().mean()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def distances(ctx: RankContext, config: ShardConfig) -> dict[str, float]:
    """Distances of gradients and of unsharded parameters from plain training."""
    plain, model = build(), build()
    sum(loss_of(plain, rank) / ctx.world_size for rank in range(ctx.world_size)).backward()
    sharded = shard(model, config, units=[Beside])
    (loss_of(model, ctx.rank) * math.inf).backward()  # must leave nothing behind
    sharded.internals.engine.finish_gradients()
    model.zero_grad()
    loss_of(model, ctx.rank).backward()
    sharded.internals.engine.finish_gradients()
    found = {}
    for index, unit in enumerate(model):
        for name, parameter in unit.named_parameters():
            expected = plain[index].get_parameter(name)
            found[f"grad of {index}.{name}"] = relative(whole(parameter.grad), expected.grad)
            found[f"{index}.{name}"] = relative(unit.seen[name].float(), expected.detach())
    return found


def distances_of_each(ctx: RankContext, configs: list[ShardConfig]) -> list[dict[str, float]]:
    return [distances(ctx, config) for config in configs]


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("preset", PRESETS)
def test_small_values_next_to_large_ones_keep_their_digits(ranks: RankPool, preset: str) -> None:
    configs = {case: config for case in CASES if (config := config_of(preset, case)) is not None}
    for of_rank in ranks(4, distances_of_each, list(configs.values())):
        for (case, config), found in zip(configs.items(), of_rank, strict=True):
            weights, grads = config.codec_of("weight_codec"), config.codec_of("grad_codec")
            of_weights = BOUND[weights.bits] if weights else 0.01  # of bf16
            of_grads = of_weights + (1.5 * BOUND[grads.bits] if grads else 0.01)
            bounds = {name: of_grads if "grad" in name else of_weights for name in found}
            assert {name: off for name, off in found.items() if not off < bounds[name]} == {}, case


def test_no_block_holds_two_parameters_wherever_shards_begin() -> None:
    shapes = [("gain", (9,)), ("weight", (9, 31)), ("scalar", ()), ("wide", (2, 64)), ("none", (0, 3))]
    for ranks, block in itertools.product((1, 2, 6), (2, 6, 256)):
        layout = make_layout([(name, torch.Size(shape)) for name, shape in shapes], ranks, block)
        owners = torch.full((ranks, layout.shard_numel), -1)
        for number, param_slice in enumerate(layout.param_slices):
            owners[:, param_slice.offset : param_slice.offset + param_slice.chunk_numel] = number
        for of_block in owners.flatten().split(block):
            assert len({*of_block.tolist()} - {-1}) < 2
        assert all(layout.numel_at(degree) % block == 0 for degree in (1, 2, 3) if ranks % degree == 0)
        assert layout.padding_numel <= sum(
            ranks * (param_slice.chunk_numel + math.lcm(8, block)) - param_slice.numel
            for param_slice in layout.param_slices
        )


@pytest.mark.parametrize("degree", [1, 2, 6])
def test_every_element_is_padding_or_belongs_to_a_parameter(degree: int) -> None:
    shapes = [(9,), (9, 31), (), (2, 64), (0, 3), (12, 2), (1,)]
    layout = make_layout([(str(shape), torch.Size(shape)) for shape in shapes], 6, 32)
    for rows in layout.shard_slices(degree):
        slice_ = torch.zeros(layout.numel_at(degree), dtype=torch.int64)
        for row, table_row in zip(rows, slice_.view(len(rows), -1), strict=True):
            for param_slice in layout.param_slices:
                table_row[param_slice.offset :][: param_slice.local_shape(row).numel()] += 1
        for view in layout.padding_views(slice_, rows):
            view += 1
        assert (slice_ == 1).all()


@pytest.mark.parametrize("numel", [1, 300, 70_000])
def test_shares_of_an_all_reduce_begin_with_a_block(numel: int) -> None:
    codec = Codec(bits=8, block_size=256)
    route = Route(stages=(Stage(axis="inter_node", size=3, codec=codec), Stage(axis="intra_node", size=2, codec=codec)))
    slice_numel = routes.all_reduce_slice(route, numel)
    assert 2 * slice_numel >= numel
    assert slice_numel - numel / 2 <= 3 * 256
    assert slice_numel % (3 * 256) == 0


def test_blocks_without_a_common_size_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"`weight_codec` of 4094, `grad_codec` of 4098 values.*one divides the other"
    ):
        ShardConfig(weight_codec=Codec(bits=8, block_size=4094), grad_codec=Codec(bits=8, block_size=4098))


def test_blocks_that_may_span_parameters_are_reported(ranks: RankPool) -> None:
    long, bound = Codec(bits=8, block_size=2**20), Codec(bits=8, block_size=8192)
    config = ShardConfig.preset("zero3", codec_links="all", grad_codec=long, weight_codec=bound)
    first, second = ranks(2, printed, config)
    assert first.startswith("`grad_codec=Codec(bits=8, block_size=1048576")
    assert "Use blocks of 8192 values or fewer" in first
    assert (first.count("\n"), second) == (1, "")


def resume(ctx: RankContext, run: Run, path: Path, saves: bool) -> dict[str, Tensor]:
    """Job: what a training saves, or loads."""
    training = start(ctx, run)
    training.step(0)
    if saves:
        save_checkpoint(path, training.sharded, [training.optimizer])
    else:
        load_checkpoint(path, training.sharded, [training.optimizer])
    return state_of(training)


def test_a_checkpoint_knows_no_padding(ranks: RankPool, tmp_path: Path) -> None:
    plain = Run(case=models.transformer, config=ShardConfig.preset("mics"), optimizer="adamw")
    coded = plain.replace(config=ShardConfig.preset("zero3", codec_links="all", weight_codec="int8", grad_codec="int4"))
    for number, (one, other) in enumerate([(plain, coded), (coded, plain)]):
        [expected, *_] = ranks(4, resume, one, tmp_path / str(number), True)
        for found in ranks(2, resume, other, tmp_path / str(number), False):
            assert found.keys() == expected.keys()
            assert_identical({name: found[name] for name in expected}, expected)
