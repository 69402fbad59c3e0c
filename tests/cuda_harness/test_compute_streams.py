"""A training on several compute streams: parameters stay until all have read them, gradients wait for all."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mics_strategy import shard
from mics_strategy.engine.backward_grads import BackwardGrads
from mics_strategy.engine.lifecycle import GradFlags
from mics_strategy.engine.memory import Slot
from mics_strategy.engine.streams import current_stream
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.pretence import pretended_cuda
from tests.cuda_harness.runs import WIDTH, Layer, Tower, Training, config_of, declared, one_of_many


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretended_cuda(), Machine() as made:
        yield made


@pytest.mark.parametrize("joins", [False, True])
def test_gradients_of_another_compute_stream_are_read_behind_it(machine: Machine, joins: bool) -> None:
    collected = BackwardGrads("unit", GradFlags(2), None)
    here = current_stream(torch.device("cuda", 0))
    for position, stream in enumerate((here, torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            collected.follow(current_stream(torch.device("cuda", 0)))
            collected.kept[position] = torch.ones(4, device="cuda")
    if joins:
        collected.join_streams()
    first, second = (collected.kept[position] + 1 for position in range(2))
    assert first.is_cuda
    assert second.is_cuda
    assert bool(machine.races) is not joins


class _Switch(torch.autograd.Function):
    """Go on on another stream; in the backward return, as autograd does, which the pretence does not do by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Any) -> Tensor:
        ctx.before, ctx.stream = torch.cuda.current_stream(), stream
        stream.wait_stream(ctx.before)
        torch.cuda.set_stream(stream)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.cuda.set_stream(ctx.before)
        ctx.before.wait_stream(ctx.stream)
        return grad, None


class Branches(Tower):
    """Two layers at a time run side by side, each on a stream of its own."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        x, default, other = self.inlet(x), torch.cuda.current_stream(), self.other
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            on_other = first(_Switch.apply(x, other))
            torch.cuda.set_stream(default)
            on_default = second(x)
            torch.cuda.set_stream(other)
            x = on_default + _Switch.apply(on_other, default)
        return self.outlet(x)


def _train_branches(preset: str, **options: Any) -> Machine:
    with one_of_many() as machine:
        model = Branches()
        model.other = torch.cuda.Stream()
        sharded = shard(model, config_of(preset, **options), units=[Layer], device=machine.device)
        batch = torch.randn(4, WIDTH).to(machine.device)
        declared(Training(model, sharded, [torch.optim.AdamW(model.parameters())], machine, batch))
    return machine


@pytest.mark.wide(every=4)
@pytest.mark.parametrize("options", [{}, {"prefetch": 2}], ids=str)
@pytest.mark.parametrize("preset", ["mics", "zero3", "ddp", "zero2", "zeropp", "paro-iig"])
def test_layers_on_two_streams_do_not_race(preset: str, options: dict[str, Any]) -> None:
    assert _train_branches(preset, **options).races == []


def test_a_gather_that_waits_for_the_current_stream_alone_is_found() -> None:
    with mock.patch.object(Slot, "users", property(lambda _: (), lambda *_: None)):
        assert "split_with_sizes_copy" in _train_branches("mics").races[0]
