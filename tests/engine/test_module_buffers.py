"""Buffers in training are those of plain data parallel training."""

import contextlib
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mics_strategy import ConfigError, LifecycleError, ShardConfig, Topology, shard
from mics_strategy.comm.transport import Transport
from tests.ranks import RankContext, RankPool, raises_on_every_rank

NODES = Topology(ranks_per_node=2)
CONFIGS = {
    "mics": ShardConfig.preset("mics", topology=NODES),
    "zero3": ShardConfig.preset("zero3"),
    "zero2": ShardConfig.preset("zero2"),
    "ddp": ShardConfig.preset("ddp"),
}


class Coded(nn.Module):
    """Adds the nearest row of a trained codebook, and rows of a constant table."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("codebook", torch.arange(24.0).view(6, 4) / 24)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.int64))
        self.register_buffer("is_used", torch.zeros(6, dtype=torch.bool), persistent=False)
        self.register_buffer("table", torch.linspace(-1, 1, 4 * 8192).view(-1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.mix(x))
        nearest = torch.cdist(x.detach(), self.codebook).argmin(1)
        coded = self.codebook[nearest]
        if self.training and torch.is_grad_enabled():
            self.codebook.data[nearest] += 0.1 * (x.detach() - coded)  # past the version counter
            self.seen[nearest] += 1
            self.is_used.logical_or_(self.seen > 0)
        return x + coded.detach() * x + self.table[nearest + 7]


class Model(nn.Module):
    """Two of them; may recompute the first."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coded(), Coded()])
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = checkpoint(first, x, use_reentrant=False) if self.recomputes else first(x)
        return second(x)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * number + rank))


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes of each broadcast."""
    sizes: list[int] = []
    stock = Transport.broadcast

    def broadcast(self: Transport, tensor: Tensor, source: int) -> Any:
        sizes.append(tensor.numel() * tensor.itemsize)
        return stock(self, tensor, source)

    with mock.patch.object(Transport, "broadcast", broadcast):
        yield sizes


def contents(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): buffer.clone() for name, buffer in model.named_buffers()}


def compare(ctx: RankContext, name: str, accumulation: int, says: bool, recomputes: bool) -> list[int]:
    """Train both ways for four steps, with an evaluation; returns what was broadcast."""
    torch.manual_seed(5)
    model = Model(recomputes)
    plain = DistributedDataParallel(copy.deepcopy(model))
    if ctx.rank:
        model.layers[0].codebook.mul_(1 + ctx.rank)  # rank 0's count from the beginning
    sharded = shard(model, CONFIGS[name], units=[Coded])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    with counting() as sizes:
        for step in range(4):
            for micro in range(accumulation):
                is_last = micro == accumulation - 1 or not says
                x = batch(ctx.rank, 10 * step + micro)
                with contextlib.nullcontext() if is_last else plain.no_sync():
                    expected = plain(x).square().mean()
                    expected.backward()
                with sharded.micro_step(micro, of=accumulation) if says else contextlib.nullcontext():
                    found = model(x).square().mean()
                    own = contents(model)
                    found.backward()
                torch.testing.assert_close(found, expected, msg=f"step {step}, micro-step {micro}")
                if not recomputes:  # which updates them once more, here as there
                    torch.testing.assert_close(own, contents(plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step < 3:  # what the evaluation has gathered is still there
                assert all(row.planned_bytes == row.sent_bytes for row in sharded.traffic())
            if step == 2:
                plain.eval(), model.eval()
                with torch.no_grad():
                    torch.testing.assert_close(model(batch(0, step)), plain(batch(0, step)))
                plain.train(), model.train()
    return sizes


def cases() -> Iterator[Any]:
    for name in CONFIGS:
        for accumulation, says in ((1, False), (3, True), (3, False)):
            if CONFIGS[name].params != "replicate" or accumulation == 1 or says:
                for recomputes in (False, True)[: 1 + (name in ("mics", "ddp"))]:
                    yield name, accumulation, says, recomputes


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(("name", "accumulation", "says", "recomputes"), list(cases()))
def test_buffers_in_training_are_those_of_ddp(
    ranks: RankPool, name: str, accumulation: int, says: bool, recomputes: bool
) -> None:
    sizes = ranks(4, compare, name, accumulation, says, recomputes, ranks_per_node=2)
    changing = 2 * (4 * 6 * 4 + 8 * 6 + 6 + 4 * 4 * 2 + 8) + 2  # and a flag for each buffer that is not persistent
    is_whole = CONFIGS[name].params == "replicate"
    num_sent = 4 if is_whole else 3 if says or accumulation == 1 else 3 * accumulation + 2
    assert sizes[0] == [changing] * num_sent  # without the tables, which were sent when the model was sharded
    assert sizes == [sizes[0]] * 4


def left_alone(ctx: RankContext) -> tuple[list[int], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(5)
    model = Model()
    shard(model, ShardConfig.preset("zero3", broadcast_buffers=False), units=[Coded])
    with counting() as sizes:
        for step in range(2):
            model(batch(ctx.rank, step)).sum().backward()
        in_training = list(sizes)
        before = contents(model)
        model.eval()
        with torch.no_grad():
            model(batch(0, 0))
    return in_training, before, contents(model)


def test_buffers_may_be_left_to_each_rank_until_the_model_is_evaluated(ranks: RankPool) -> None:
    (sent, first, after), (_, second, also_after) = ranks(2, left_alone)
    assert sent == []
    assert not torch.equal(first["layers.0.codebook"], second["layers.0.codebook"])
    for name, value in first.items():
        assert torch.equal(value, after[name])
        assert torch.equal(value, also_after[name])


def of_different_length(ctx: RankContext, preset: str) -> dict[str, Tensor]:
    """Rank 1 skips a forward, and runs another one of a part of the model alone."""
    torch.manual_seed(5)
    model = Model()
    shard(model, preset, units=[Coded])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if ctx.rank == 0 or step != 1:
            model(batch(ctx.rank, step)).sum().backward()
        model.layers[0](batch(ctx.rank, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return contents(model)


@pytest.mark.parametrize("preset", ["ddp", "zero1"])
def test_ranks_that_run_different_forwards_do_not_wait(ranks: RankPool, preset: str) -> None:
    first, second = ranks(2, of_different_length, preset, timeout_s=20.0)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Centred(nn.Module):
    """Subtracts a centre, which the loop moves after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) - self.centre


def centred(ctx: RankContext, preset: str, is_common: bool, replaces: bool) -> tuple[dict[str, Tensor], ...]:
    """Contents after training, here and under DDP."""
    found = []
    for is_ours in (True, False):
        torch.manual_seed(5)
        model = Centred()
        call: nn.Module = model
        if is_ours:
            shard(model, preset)
        else:
            call = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            output = call(batch(ctx.rank, step))
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            centre = torch.full((4,), float(step)) if is_common else output.detach().mean(0)
            if replaces:
                model.centre = 0.5 * model.centre + centre
            else:
                model.centre.mul_(0.5).add_(centre)
        found.append({name: DTensor.full_tensor(p.detach()) if is_ours else p for name, p in model.named_parameters()})
    return tuple(found)


@pytest.mark.parametrize(("preset", "replaces"), [("ddp", False), ("zero1", True), ("zero3", False)])
def test_what_all_ranks_write_to_a_buffer_after_a_step_is_in_the_next_forward(
    ranks: RankPool, preset: str, replaces: bool
) -> None:
    for ours, expected in ranks(2, centred, preset, True, replaces):
        torch.testing.assert_close(ours, dict(expected))


@pytest.mark.parametrize("replaces", [False, True])
def test_another_write_of_each_rank_to_a_buffer_after_a_step_is_rank_0s_or_refused(
    ranks: RankPool, replaces: bool
) -> None:
    for ours, expected in ranks(2, centred, "zero3", False, replaces):
        torch.testing.assert_close(ours, dict(expected))
    raises_on_every_rank(
        lambda: ranks(2, centred, "zero1", False, replaces), LifecycleError, "a buffer was written to after a step"
    )


class Caching(nn.Module):
    """Caches a result of the first forward, in any mode, for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.register_buffer("cached", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = torch.full((4,), x[0, 0].item())
        return self.mix(x) * (self.cached if not self.training else self.cached.clone())


def cached(ctx: RankContext) -> list[float]:
    model = Caching().eval()
    shard(model, "mics")
    found = []
    for _ in range(2):
        with torch.inference_mode():
            model.eval()(batch(ctx.rank, 0))
            found.append(model.cached[0].item())
        model.train()(batch(ctx.rank, 1)).sum().backward()
        found.append(model.cached[0].item())
    return found


def test_buffers_made_in_inference_mode_are_synchronized(ranks: RankPool) -> None:
    first, second = ranks(2, cached)
    assert first == [first[0]] * 4
    assert second == [second[0]] * 2 + [first[0]] * 2
    assert first[0] != second[0]


class Registering(nn.Module):
    """Grows a cache with its input, counts its forwards, and registers a buffer of a rank in the second one."""

    def __init__(self, persistent: dict[int, bool]) -> None:
        super().__init__()
        self.persistent = persistent
        self.num_forwards = 0
        self.mix = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("adjacency", torch.eye(4).to_sparse())
        self.grow(2)

    def grow(self, length: int) -> None:
        self.register_buffer("cosines", torch.cos(torch.arange(length)), persistent=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        length = 3 + (x[0, 0].abs() * 100).int().item() % (9 + 9 * rank)
        if length > len(self.cosines):
            self.grow(length)
        self.seen += 1 + rank
        self.num_forwards += 1
        if self.num_forwards > 1 and rank in self.persistent and not hasattr(self, "late"):
            self.register_buffer("late", torch.full((3,), float(rank)), persistent=self.persistent[rank])
        return torch.sparse.mm(self.adjacency, self.mix(x).T).T * self.cosines[:length].sum()


def registering(ctx: RankContext, preset: str, persistent: dict[int, bool], shapes: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = Registering(persistent)
    model.seen = torch.zeros(shapes) if shapes > 1 else model.seen
    model.grow(2 + ctx.rank)
    plain = copy.deepcopy(model)
    shard(model, preset, units=[Registering])
    for step in range(5):
        x = batch(ctx.rank, step)
        torch.testing.assert_close(model(x, ctx.rank), plain(x, ctx.rank))
        model(x, ctx.rank).sum().backward()
        assert model.mix.weight.grad is not None  # gradients are final
    return contents(model)


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_caches_that_grow_on_each_rank_are_its_own(ranks: RankPool, preset: str) -> None:
    first, second = ranks(2, registering, preset, {0: False})
    assert len(first["cosines"]) != len(second["cosines"])
    assert "late" in first
    assert "late" not in second


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_persistent_buffers_that_all_ranks_register_later_are_rank_0s(ranks: RankPool, preset: str) -> None:
    first, second = ranks(2, registering, preset, {0: True, 1: True})
    assert first["late"].tolist() == second["late"].tolist() == [0.0] * 3


def registering_on_one_rank(ctx: RankContext) -> None:
    registering(ctx, "zero3", {1: True})


def test_a_persistent_buffer_that_one_rank_registers_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, registering_on_one_rank, timeout_s=40.0),
        LifecycleError,
        match=r"buffer `late` was registered or replaced after `shard\(\)` on rank 1 .*`persistent=False`",
    )


def of_another_shape(ctx: RankContext) -> None:
    registering(ctx, "zero3", {}, shapes=2 + ctx.rank)


def test_persistent_buffers_of_different_shapes_are_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, of_another_shape),
        ConfigError,
        match=r"buffer `seen` differs between ranks: shape \(2,\).* on rank 0, shape \(3,\).* on rank 1",
    )


class Nested(nn.Module):
    """Calls itself, as a step of a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        return self(self.norm(x), depth - 1) if depth else self.norm(x)


def nested(ctx: RankContext, with_buffers: bool) -> list[int]:
    model = Nested() if with_buffers else nn.Linear(4, 4)
    shard(model, "mics")
    with counting() as sizes:
        for step in range(3):
            model(batch(ctx.rank, step)).sum().backward()
    return sizes


def test_a_forward_sends_once_and_nothing_where_there_are_no_buffers(ranks: RankPool) -> None:
    assert ranks(2, nested, True) == [[4 * 4 * 2 + 8] * 2] * 2
    assert ranks(2, nested, False) == [[]] * 2


def test_a_value_other_than_true_and_false_is_refused() -> None:
    with pytest.raises(ConfigError, match="broadcast_buffers='no'"):
        ShardConfig(broadcast_buffers="no")  # type: ignore[arg-type]
