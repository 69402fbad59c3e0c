"""With error feedback, what steps have not sent yet is what the residuals hold; nothing else is lost or added.

The loss is linear in the parameters, so that gradients are known without a model: what the optimizer has seen over all
steps, plus the residuals of all ranks, must be the sum of the gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics_strategy import Codec, ConfigError, ShardConfig, Sharded, Topology, shard
from mics_strategy.comm.codecs.quantizer import Quantizer
from tests.engine.test_codecs_in_training import config_of
from tests.engine.training import whole, wholes
from tests.ranks import RankContext, RankPool

INT4 = Codec(bits=4, block_size=32, feedback=True)
ROTATED = Codec(bits=4, block_size=32, feedback=True, rotation=True)
SHAPES = {"wide": (64, 8), "odd": (37, 3), "few": (3, 5)}
STEPS = 3


class Linear(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tensors = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.tensors[name] * value).sum() for name, value in inputs.items()]).sum()


def inputs(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mean_of(step: int, accumulation: int, world: int) -> dict[str, Tensor]:
    """The gradient of one step: the sum over micro-steps, the mean over ranks."""
    given = [inputs(step, micro, rank) for micro in range(accumulation) for rank in range(world)]
    return {name: torch.stack([each[name] for each in given]).sum(0) / world for name in SHAPES}


def residual_total(sharded: Sharded) -> dict[str, Tensor]:
    """The residuals of all ranks, added, as gradients in the mean over ranks. Collective."""
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for feedback in sharded.internals.feedback:
        for residual in feedback.residuals.values():
            shard_numel = feedback.layout.shard_numel
            for row, values in zip(residual.rows(shard_numel), residual.table(shard_numel), strict=True):
                for param_slice in feedback.layout.param_slices:
                    name = param_slice.name.rpartition(".")[2]
                    param_slice.narrow(total[name], row).add_(param_slice.view_in(values, row))
    for value in total.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return total


@dataclass
class Loop:
    """A loop under test, with what an optimizer has seen so far."""

    ctx: RankContext
    sharded: Sharded
    optimizer: torch.optim.Optimizer
    model: nn.Module
    accumulation: int
    seen: dict[str, Tensor]

    def backward(self, step: int, micro: int) -> None:
        self.model(inputs(step, micro, self.ctx.rank)).backward()

    def grads(self) -> dict[str, Tensor]:
        self.sharded.internals.engine.finish_gradients()
        named = self.model.named_parameters()
        return wholes({name.rpartition(".")[2]: p.grad for name, p in named if p.grad is not None})

    def step(self) -> None:
        for name, value in self.grads().items():
            self.seen[name] = self.seen[name] + value
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_loop(loop: Loop, step: int) -> None:
    for micro in range(loop.accumulation):
        loop.backward(step, micro)
    loop.step()


def read_between(loop: Loop, step: int) -> None:
    """Gradients are read, and finished, after every micro-step."""
    for micro in range(loop.accumulation):
        loop.backward(step, micro)
        loop.grads()
    loop.step()


def clipped(loop: Loop, step: int) -> None:
    """Clipping scales what the optimizer sees, not what the residuals hold."""
    for micro in range(loop.accumulation):
        with loop.sharded.micro_step(micro, of=loop.accumulation):
            loop.backward(step, micro)
    exact = loop.grads()
    loop.sharded.clip_grad_norm_(1e-3)
    for name, parameter in loop.model.named_parameters():
        assert parameter.grad is not None
        assert whole(parameter.grad).norm() <= 1e-3, name
    for name, value in exact.items():
        loop.seen[name] = loop.seen[name] + value
    loop.optimizer.step()
    loop.optimizer.zero_grad()


LOOPS: dict[str, Callable[[Loop, int], None]] = {"plain": plain_loop, "read": read_between, "clipped": clipped}


def start_loop(ctx: RankContext, config: ShardConfig, accumulation: int = 2) -> Loop:
    model = Linear()
    sharded = shard(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return Loop(ctx, sharded, optimizer, model, accumulation, zeros)


def lost(ctx: RankContext, config: ShardConfig, name: str) -> tuple[float, float, bool]:
    """The largest part of a gradient that is nowhere, the largest residual, and whether traffic was as planned."""
    loop, expected = start_loop(ctx, config), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    is_planned = True
    for step in range(STEPS):
        LOOPS[name](loop, step)
        for key, value in mean_of(step, loop.accumulation, ctx.world_size).items():
            expected[key] += value
        rows = loop.sharded.traffic() if step and name != "read" else ()
        is_planned &= all((r.count, r.sent_bytes) == (r.planned_count, r.planned_bytes) for r in rows)
    left = residual_total(loop.sharded)
    nowhere = max(float((expected[key] - loop.seen[key] - left[key]).abs().max()) for key in SHAPES)
    return nowhere, max(float(value.abs().max()) for value in left.values()), is_planned


def lost_each(ctx: RankContext, configs: list[ShardConfig], name: str) -> list[tuple[float, float, bool]]:
    return [lost(ctx, config, name) for config in configs]


def config(preset: str, **options: Any) -> ShardConfig:
    fields = {"grad_codec": INT4, "codec_links": "all", "topology": Topology(ranks_per_node=2), **options}
    return ShardConfig.preset(preset, **fields)


CONFIGS = {
    "zero3": config("zero3"),
    "zero3, slow": config("zero3", codec_links="slow", grad_codec=ROTATED),
    "zero3, one stage": config("zero3", hierarchical=False),
    "mics": config("mics", codec_links="slow"),
    "ddp": config("ddp"),
    "ddp, slow": config("ddp", codec_links="slow"),
    "zero2": config("zero2", reduce_dtype="bfloat16"),
    "paro-iig": config("paro-iig", grad_codec_hops="second"),
    "paro-nig": config("paro-nig"),
    "paro-nii": config("paro-nii"),
    "zeropp": config("zeropp"),
    "every micro-step": config("mics", second_hop="micro_step"),
}


@pytest.mark.wide(every=2)
@pytest.mark.one_job
@pytest.mark.parametrize("loop", LOOPS)
def test_the_residuals_are_what_was_not_sent(ranks: RankPool, loop: str) -> None:
    for of_rank in ranks(4, lost_each, [*CONFIGS.values()], loop):
        for (case, each), (nowhere, left, is_planned) in zip(CONFIGS.items(), of_rank, strict=True):
            assert nowhere < (0.05 if each.reduce_dtype != "auto" else 2e-5), case
            assert left > 0.01, case
            assert is_planned, case


def lost_unused(ctx: RankContext, configs: list[ShardConfig]) -> list[float]:
    """The largest part of a gradient that is nowhere after no rank has used a parameter in one step."""
    largest = []
    for each in configs:
        loop, expected = start_loop(ctx, each), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            used = [name for name in SHAPES if step != 1 or name != "odd"]
            for micro in range(loop.accumulation):
                given = inputs(step, micro, ctx.rank)
                loop.model({name: given[name] for name in used}).backward()
                assert loop.grads().keys() == {*used}
            for name in used:
                expected[name] += mean_of(step, loop.accumulation, ctx.world_size)[name]
            loop.step()
        left = residual_total(loop.sharded)
        largest.append(max(float((expected[key] - loop.seen[key] - left[key]).abs().max()) for key in SHAPES))
    return largest


@pytest.mark.one_job
def test_residuals_of_an_unused_parameter_are_not_lost(ranks: RankPool) -> None:
    cases = [CONFIGS[name] for name in ("zero3", "mics", "ddp", "paro-iig", "zeropp")]
    for largest in ranks(4, lost_unused, cases):
        assert max(largest) < 2e-5


def gradients_of(ctx: RankContext) -> list[dict[str, Tensor]]:
    """Gradients of some steps, ZeRO-3 in one stage."""
    loop, found = start_loop(ctx, CONFIGS["zero3, one stage"], accumulation=1), []
    for step in range(STEPS):
        loop.backward(step, 0)
        found.append(loop.grads())
        loop.step()
    return found


@pytest.mark.one_job
def test_gradients_have_the_bits_of_a_plain_twin(ranks: RankPool) -> None:
    """Rows of one parameter for each rank, in the order of the shards; each with its residual by sender."""
    found = ranks(4, gradients_of)[0]
    world, rows, (length, width) = 4, 16, SHAPES["wide"]
    quantizer, index_of = Quantizer(INT4, torch.device("cpu")), {0: 0, 1: 2, 2: 1, 3: 3}  # local rank first
    residuals = torch.zeros(world, world, rows * width)  # sender, shard
    encoded = torch.empty(INT4.encoded_bytes(rows * width), dtype=torch.uint8)
    for step in range(STEPS):
        by_index = {index_of[rank]: inputs(step, 0, rank)["wide"].view(world, -1) for rank in range(world)}
        total = torch.zeros(world, rows * width)
        for owner in range(world):
            for sender in range(world):
                if sender == owner:
                    total[owner] += by_index[sender][owner]
                else:
                    quantizer.encode(by_index[sender][owner].contiguous(), encoded, residuals[sender, owner])
                    quantizer.decode_add(encoded, total[owner])
        assert torch.equal(found[step]["wide"], (total / world).view(length, width))


def after_abandoning(ctx: RankContext, how: str) -> list[dict[str, Tensor]]:
    """Gradients after a window that was dropped, and those of a run without it."""
    found = []
    for abandons in (True, False):
        loop = start_loop(ctx, CONFIGS["zero3"], accumulation=1)
        if abandons:
            loop.backward(7, 0) if how != "overflow" else (loop.model(inputs(7, 0, 0)) * torch.inf).backward()
            if how != "unfinished":
                loop.grads()
            loop.optimizer.zero_grad()
            assert all(bool((value == 0).all()) for value in residual_total(loop.sharded).values())
        loop.backward(0, 0)
        found.append(loop.grads())
        loop.step()
        assert any(bool((value != 0).any()) for value in residual_total(loop.sharded).values())
    return found


@pytest.mark.parametrize("how", ["finished", "unfinished", "overflow"])
def test_dropped_gradients_leave_nothing_behind(ranks: RankPool, how: str) -> None:
    for with_window, without in ranks(4, after_abandoning, how):
        for name, value in without.items():
            assert torch.equal(with_window[name], value)


def residuals_in_flight(ctx: RankContext) -> bool:
    """Whether residuals read after a declared last backward are those of its second hops."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    sharded = shard(model, config("mics", codec_links="slow"), units=[nn.Linear])
    with sharded.micro_step(0, of=1):
        model(torch.randn(4, 512)).square().mean().backward()
    residuals = [r.values for feedback in sharded.internals.feedback for r in feedback.residuals.values()]
    before = [values.clone() for values in residuals]
    sharded.internals.engine.finish_gradients()
    return all(torch.equal(*pair) for pair in zip(before, residuals, strict=True))


def test_residuals_are_read_after_the_hops_in_flight(ranks: RankPool) -> None:
    assert ranks(4, residuals_in_flight, ranks_per_node=2) == [True] * 4


def drop_one(ctx: RankContext) -> list[bool]:
    """Which parameters have residuals after the gradient of one was dropped."""
    loop = start_loop(ctx, config("mics", codec_links="slow"), accumulation=1)
    loop.backward(0, 0)
    loop.grads()
    loop.model.tensors["odd"].grad = None
    return [bool((value != 0).any()) for value in residual_total(loop.sharded).values()]


def test_only_the_dropped_parameter_forgets(ranks: RankPool) -> None:
    assert ranks(4, drop_one) == [[True, False, True]] * 4


def after_two_optimizers(ctx: RankContext, each: ShardConfig) -> list[dict[str, Tensor]]:
    """The second gradients of parameters whose optimizer has not used the first, and those of a run without them.

    Another optimizer has stepped with the first gradients of the other parameters.
    """
    found = []
    for is_dropped in (True, False):
        model = Linear()
        sharded = shard(model, each)
        one = torch.optim.SGD([model.tensors["wide"]], lr=0.1)
        other = torch.optim.SGD([model.tensors["odd"], model.tensors["few"]], lr=0.1)
        given = inputs(0, 0, ctx.rank)
        for name in ("odd", "few"):
            given[name] = given[name] if is_dropped else torch.zeros(SHAPES[name])
        model(given).backward()
        one.step()
        has_lost = residual_total(sharded)
        one.zero_grad()
        other.zero_grad()
        kept = residual_total(sharded)
        assert bool((has_lost["odd"] != 0).any()) == is_dropped
        assert torch.equal(kept["wide"], has_lost["wide"])
        assert bool((kept["wide"] != 0).any())
        assert all(bool((kept[name] == 0).all()) for name in ("odd", "few"))
        model(inputs(1, 0, ctx.rank)).backward()
        sharded.internals.engine.finish_gradients()
        found.append(wholes({name: parameter.grad for name, parameter in model.tensors.items()}))
        one.step()
        other.step()
        before = residual_total(sharded)
        one.zero_grad()
        other.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in residual_total(sharded).items())
    return found


@pytest.mark.parametrize("name", ["zero3", "mics", "ddp"])
def test_an_optimizer_settles_its_own_parameters(ranks: RankPool, name: str) -> None:
    for with_dropped, without in ranks(4, after_two_optimizers, CONFIGS[name]):
        for key, value in without.items():
            assert torch.equal(with_dropped[key], value), key


def until(ctx: RankContext) -> list[dict[str, Tensor]]:
    loop, found = start_loop(ctx, config("mics", grad_codec_until=0.5, training_steps=4), accumulation=1), []
    for step in range(4):
        loop.backward(step, 0)
        found.append(loop.grads())
        loop.step()
    return found


def test_gradients_are_exact_once_the_codec_is_off(ranks: RankPool) -> None:
    for found in ranks(4, until):
        for step, grads in enumerate(found):
            expected = mean_of(step, 1, 4)
            errors = [float((grads[name] - expected[name]).abs().max()) for name in SHAPES]
            assert (max(errors) < 1e-6) == (step >= 2)


def allocated(ctx: RankContext, each: ShardConfig) -> tuple[int, int]:
    sharded = start_loop(ctx, each).sharded
    held = sum(r.values.numel() * 4 for feedback in sharded.internals.feedback for r in feedback.residuals.values())
    return sharded.memory.bytes_by_purpose.get("error feedback", 0), held


def test_residuals_are_counted_as_memory(ranks: RankPool) -> None:
    shards = sum(-(-(-(-rows // 4) * columns) // 32) * 32 for rows, columns in SHAPES.values())
    for each, numel in ((CONFIGS["zero3"], 4 * shards), (CONFIGS["zero3, slow"], 2 * shards)):
        assert set(ranks(4, allocated, each)) == {(4 * numel, 4 * numel)}
    without = config("zero3", grad_codec="int4")
    assert set(ranks(4, allocated, without)) == {(0, 0)}


def test_feedback_of_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`weight_codec=.*has feedback.*exact masters.*Only `grad_codec`"):
        ShardConfig(weight_codec=INT4)


def test_codecs_may_be_mappings() -> None:
    fields = {"bits": 4, "block_size": 32, "feedback": True}
    assert ShardConfig(grad_codec=fields).codec_of("grad_codec") == INT4
    with pytest.raises(ConfigError, match=r"`grad_codec`: `.*'widths'.* is not a codec: `widths` is not a field"):
        ShardConfig(grad_codec={"bits": 4, "widths": 2})
    with pytest.raises(ConfigError, match="`bits` is missing"):
        ShardConfig(grad_codec={"feedback": True})


def test_feedback_with_nothing_to_encode_is_refused() -> None:
    assert config_of("zero3", "second hop") is None
