"""With weight differences all ranks have the same parameters, within one rounded step of the masters.

The twin holds the reference in one process: each shard's difference is encoded, decoded and added, block by block.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import Codec, ConfigError, ShardConfig, Topology, load_checkpoint, save_checkpoint, shard
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.scopes import resolve_scopes
from tests.engine.training import whole
from tests.ranks import RankContext, RankPool, simulate

ROWS, COLUMNS, STEPS, LR = 64, 8, 4, 0.1
TWO_NODES = Topology(ranks_per_node=2)


def codec(bits: int = 4, **options: Any) -> Codec:
    return Codec(bits=bits, block_size=32, differences=True, **options)


class Recording(nn.Module):
    """One matrix, and what forwards have seen of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().float().clone())
        return (self.weight.float() * x).sum()


def gradient(step: int) -> Tensor:
    """The same on all ranks."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))


def config(preset: str = "paro-iig", **options: Any) -> ShardConfig:
    fields = {"weight_codec": codec(), "topology": TWO_NODES, **options}
    return ShardConfig.preset(preset, **fields)


class Loop:
    def __init__(self, each: ShardConfig) -> None:
        self.model = Recording()
        self.sharded = shard(self.model, each, units=[Recording])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.masters: list[Tensor] = []

    def step(self, number: int) -> None:
        self.masters.append(whole(self.model.weight))
        self.model(gradient(number)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(
    ctx: RankContext, each: ShardConfig, path: Path | None = None, first: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """What each forward has seen, and the masters before each and at the end."""
    loop = Loop(each)
    if first:
        loop.step(99)
        assert path is not None
        load_checkpoint(path, loop.sharded, [loop.optimizer])
        loop.model.seen.clear()
        loop.masters.clear()
    for number in range(first, STEPS):
        if number == 2 and path is not None and not first:
            save_checkpoint(path, loop.sharded, [loop.optimizer])
        loop.step(number)
        if number > 1:
            for row in loop.sharded.traffic():
                assert (row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes)
    return loop.model.seen, [*loop.masters, whole(loop.model.weight)]


def twin(each: Codec, masters: list[Tensor], dtype: torch.dtype = torch.float32, world: int = 4) -> list[Tensor]:
    """What forwards see."""
    quantizer, rows = Quantizer(each, torch.device("cpu")), ROWS // world
    reference = masters[0].to(dtype)
    scratch, decoded = torch.empty(rows * COLUMNS), torch.empty(rows * COLUMNS)
    encoded = torch.empty(each.encoded_bytes(rows * COLUMNS), dtype=torch.uint8)
    seen = []
    for master in masters[:STEPS]:
        for start in range(0, ROWS, rows):
            piece = reference[start : start + rows]
            scratch.copy_(master[start : start + rows].to(dtype).reshape(-1)).sub_(piece.reshape(-1))
            quantizer.encode(scratch, encoded)
            quantizer.decode(encoded, decoded)
            piece.copy_((decoded + piece.reshape(-1)).view(rows, COLUMNS))
        seen.append(reference.float().clone())
    return seen


CASES = {
    "one stage": ({}, codec()),
    "bf16": ({"param_dtype": "bfloat16"}, codec()),
    "int8, rotated": ({"weight_codec": codec(8, rotation=True)}, codec(8, rotation=True)),
    "at once": ({"overlap": "none"}, codec()),
    "replicas of shards": ({"codec_links": "all"}, codec()),
}


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("case", CASES)
def test_forwards_see_what_the_twin_holds(ranks: RankPool, case: str) -> None:
    options, each = CASES[case]
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    run = config(**options)
    for seen, masters in (*ranks(4, train, run), *simulate(4, train, run, ranks_per_node=2)):
        for number, expected in enumerate(twin(each, masters, dtype)):
            assert torch.equal(seen[number], expected), number
            assert number == 0 or not torch.equal(expected, masters[number].to(dtype).float())


@pytest.mark.parametrize("links", ["slow", "all"])
def test_two_stages_add_the_same_differences(ranks: RankPool, links: str) -> None:
    """Two nodes of four ranks, parameters over two of them."""
    run = config(params=2, grads=2, optimizer="world", topology=Topology(ranks_per_node=4), codec_links=links)
    for seen, masters in (*ranks(8, train, run), *simulate(8, train, run, ranks_per_node=4)):
        for number, expected in enumerate(twin(codec(), masters, world=8)):
            assert torch.equal(seen[number], expected), number


def test_a_step_is_rounded_instead_of_the_parameters(ranks: RankPool) -> None:
    """The error is that of INT4 on the last step; without differences it is that of INT4 on the parameters."""
    errors = []
    for each in (codec(), Codec(bits=4, block_size=32)):
        seen, masters = ranks(4, train, config(weight_codec=each))[0]
        errors.append(float((seen[-1] - masters[STEPS - 1]).abs().max()))
    assert errors[0] < LR * gradient(STEPS - 2).abs().max() / 10
    assert errors[1] > 3 * errors[0]


def seen_after_nonfinite_step(ctx: RankContext, options: dict[str, Any], value: float) -> tuple[Tensor, Tensor]:
    """What a forward sees, and the masters before it, after weights with NaN were written over by finite ones."""
    loop = Loop(config(**options))
    before = loop.sharded.internals.parameters[0].detach().clone()
    loop.step(0)
    loop.model(gradient(1) * value).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    with torch.no_grad():
        assert not loop.model(gradient(2)).isfinite()
        loop.sharded.internals.parameters[0].copy_(before)
    for number in range(3):  # each difference is a rounded step
        masters = whole(loop.model.weight)
        loop.step(number)
    return loop.model.seen[-1], masters


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_set_back_after_a_step_that_was_not_finite_arrive(
    ranks: RankPool, case: str, value: float
) -> None:
    options, _ = CASES[case]
    for seen, masters in ranks(4, seen_after_nonfinite_step, options, value):
        torch.testing.assert_close(seen, masters, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("overlap", ["all", "none"])
def test_a_resumed_training_has_the_bits_of_the_uninterrupted_one(
    ranks: RankPool, tmp_path: Path, overlap: str
) -> None:
    run = config(overlap=overlap)
    expected, _ = ranks(4, train, run, tmp_path / "saved")[0]
    for found, _ in ranks(4, train, run, tmp_path / "saved", 2):
        for value, expected_value in zip(found, expected[2:], strict=True):
            assert torch.equal(value, expected_value)
    other = config(topology=Topology(ranks_per_node=1), params=1, weight_codec="none")
    assert len(ranks(2, train, other, tmp_path / "saved", 2)[0][0]) == STEPS - 2


def loaded(ctx: RankContext, path: Path, how: str) -> tuple[Tensor, Tensor]:
    """What a forward sees after parameters were loaded without references, and the masters."""
    loop = Loop(config())
    loop.step(0)
    other = {"weight": torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))}
    if how == "state dict":
        loop.sharded.load_full_state_dict(other)
    else:
        plain = Loop(config(weight_codec="none"))
        plain.sharded.load_full_state_dict(other)
        save_checkpoint(path, plain.sharded, [plain.optimizer])
        load_checkpoint(path, loop.sharded, [loop.optimizer])
    loop.step(1)
    return loop.model.seen[-1], other["weight"]


@pytest.mark.parametrize("how", ["state dict", "checkpoint"])
def test_loaded_parameters_are_exact(ranks: RankPool, tmp_path: Path, how: str) -> None:
    for seen, expected in ranks(4, loaded, tmp_path / "saved", how):
        assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    ("preset", "options", "problem"),
    [
        ("zero1", {}, "`params='replicate'` keeps them whole.*Use params='partition'"),
        ("zero3", {}, "both sharded over 4 ranks.*Shard `optimizer` over more ranks"),
        ("zeropp-hpz", {}, "`secondary_params='partition'`.*Use secondary_params='none' and `params` over 2 ranks"),
    ],
)
def test_differences_without_a_param_sync_are_refused(preset: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"`weight_codec` encodes differences.*{problem}.*differences=False"):
        resolve_scopes(config(preset, **options), TWO_NODES, 4)


def test_differences_of_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`grad_codec=.*encodes differences.*Only `weight_codec`"):
        ShardConfig(grad_codec=codec())
