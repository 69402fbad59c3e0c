"""Sums of micro-steps in bf16: what they are, what they save, and where they are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ConfigError, ShardConfig, Topology, shard
from mics_strategy.comm.placement import full_tensor
from mics_strategy.estimate import estimate_memory
from mics_strategy.scopes import resolve_scopes
from tests.ranks import RankContext, RankPool

CAST = "second-hop staging buffers"
BF16: dict[str, Any] = {"grad_accum_dtype": "bfloat16"}
CONFIGS = [
    ShardConfig.preset("zero1", **BF16),
    ShardConfig.preset("paro-nig", **BF16),
    ShardConfig.preset("paro-iig", reduce_dtype="bfloat16", **BF16),
    ShardConfig.preset("zero1", grad_codec="int8", grad_codec_hops="second", codec_links="all", **BF16),
]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))


def loss_of(model: nn.Module, rank: int, micro_step: int) -> Tensor:
    torch.manual_seed(100 * rank + micro_step)
    return model(torch.randn(3, 12)).square().mean()


def means(ctx: RankContext, config: ShardConfig, num_micro_steps: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean gradients of one step, in the second step of a job: those of ranks, and of the plain rule."""
    plain, model = build(), build()
    sharded = shard(model, config, units=[nn.Linear])
    sums: dict[str, list[Tensor]] = {}  # of each group that shards gradients
    for step in range(2):
        sums = {}
        for micro_step in range(num_micro_steps):
            loss_of(model, ctx.rank, 10 * step + micro_step).backward()
            for rank in range(ctx.world_size):
                plain.zero_grad()
                loss_of(plain, rank, 10 * step + micro_step).backward()
                for name, parameter in plain.named_parameters():
                    add(sums.setdefault(name, []), rank // sharded.scopes.grads, parameter.grad, config)
        if step == 0:
            model.zero_grad()
    assert sharded.scopes.grads < sharded.scopes.optimizer
    found = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    mean = {name: sum(each.float() for each in of_groups) / ctx.world_size for name, of_groups in sums.items()}
    return {name: (found[name], torch.as_tensor(mean[name])) for name in mean}


def add(sums: list[Tensor], group: int, grad: Tensor | None, config: ShardConfig) -> None:
    """Add one rank's gradient to the sum of its group, as it comes off the wire, rounded to bf16."""
    assert grad is not None
    if config.reduce_dtype is torch.bfloat16:
        grad = grad.bfloat16()
    if group == len(sums):
        sums.append(grad.to(torch.bfloat16, copy=True))
    else:
        sums[group].add_(grad)


@pytest.mark.parametrize("num_micro_steps", [1, 3])
@pytest.mark.parametrize("config", CONFIGS[:3], ids=["zero1", "paro-nig", "paro-iig-bf16"])
def test_sums_are_rounded_to_bf16_after_every_micro_step(
    ranks: RankPool, config: ShardConfig, num_micro_steps: int
) -> None:
    is_sent_in_bf16 = config.reduce_dtype is torch.bfloat16  # the second hop of two nodes rounds once more
    for grads in ranks(4, means, config, num_micro_steps, ranks_per_node=2):
        for found, expected in grads.values():
            assert found.dtype is torch.float32
            tolerance = 2**-8 if is_sent_in_bf16 else 1e-6
            assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def parameters(ctx: RankContext, config: ShardConfig) -> tuple[list[Tensor], dict[str, int], bool]:
    """Parameters after three steps of two micro-steps, memory, and whether what was sent was planned."""
    model = build()
    sharded = shard(model, config, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro_step in range(2):
            loss_of(model, ctx.rank, 10 * step + micro_step).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_as_planned = all(row.sent_bytes == row.planned_bytes for row in sharded.traffic())
    return [full_tensor(p) for p in model.parameters()], sharded.memory.bytes_by_purpose, is_as_planned


@pytest.mark.parametrize("config", CONFIGS, ids=["zero1", "paro-nig", "paro-iig-bf16", "zero1-int8"])
def test_a_training_rounds_and_needs_half_the_memory(ranks: RankPool, config: ShardConfig) -> None:
    exact = ranks(4, parameters, config.replace(grad_accum_dtype="auto"), ranks_per_node=2)
    for (found, memory, is_as_planned), (expected, memory_before, _) in zip(
        ranks(4, parameters, config, ranks_per_node=2), exact, strict=True
    ):
        assert is_as_planned
        assert all(torch.allclose(one, other, atol=2e-3) for one, other in zip(found, expected, strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert 2 * memory["gradients"] == memory_before["gradients"]
        others = [
            {purpose: num_bytes for purpose, num_bytes in each.items() if purpose not in ("gradients", CAST)}
            for each in (memory, memory_before)
        ]
        assert others[0] == others[1]
        is_cast = config.reduce_dtype is not torch.bfloat16  # two units at a time, to the dtype of the wire
        assert bool(memory.get(CAST)) == is_cast


def test_the_estimate_knows_it() -> None:
    config = ShardConfig.preset("zero1", param_dtype="bfloat16", reduce_dtype="bfloat16")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    before, after = (
        estimate_memory(model, each, num_nodes=4, ranks_per_node=8).bytes_by_purpose
        for each in (config, config.replace(**BF16))
    )
    assert before["gradients"] == 2 * after["gradients"] >= 4 * 4 * 1024**2
    assert (before["second-hop staging buffers"] > 0, after["second-hop staging buffers"]) == (True, 0)


PAGE = (Path(__file__).parents[2] / "docs/design/memory.md").read_text()
STATES = ("master shards", "parameter shards", "unsharded parameters", "gradients", "reduced gradients")


@pytest.mark.parametrize("preset", ["paro-iig", "paro-nig", "zero1"])
def test_the_page_has_the_bytes_of_a_parameter(preset: str) -> None:
    config = ShardConfig.preset(preset, param_dtype="bfloat16", reduce_dtype="bfloat16")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    found = []
    for each in (config, config.replace(**BF16)):
        estimate = estimate_memory(model, each, num_nodes=2, ranks_per_node=2)
        states = sum(estimate.bytes_by_purpose[purpose] for purpose in STATES)
        found.append((states + 8 * estimate.num_trained) / (8 * 1024**2))
    assert f"| `{preset}` | {found[0]:g} | {found[1]:g} |" in PAGE


@pytest.mark.parametrize(
    ("preset", "fields", "message"),
    [
        ("mics", {}, "have one scope: the sums are the gradients that the optimizer reads"),
        ("zero3", {}, "`grads` over fewer ranks than `optimizer`"),
        ("ddp", {}, "have one scope"),
        ("paro-iig", {"grad_codec": "int8", "codec_links": "all"}, "adds decoded gradients in fp32"),
    ],
)
def test_where_it_saves_nothing_it_is_refused(preset: str, fields: dict[str, Any], message: str) -> None:
    topology = Topology(ranks_per_node=2)
    with pytest.raises(ConfigError, match=message):
        resolve_scopes(ShardConfig.preset(preset, **fields, **BF16), topology, 4)


def test_sums_in_fp16_would_overflow() -> None:
    with pytest.raises(ConfigError, match="Use 'auto', 'float32' or 'bfloat16'"):
        ShardConfig.preset("zero1", grad_accum_dtype="float16")
