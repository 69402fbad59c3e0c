"""Do ranks with GPUs, whose collectives start in another order than on gloo, train as a plain process? In fp64."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import shard
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import WIDTH, Layer, Tower, config_of
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.rank_report import RankContext

RANKS, PER_NODE, STEPS, MICRO_STEPS = 4, 2, 2, 2


def _tower() -> Tower:
    torch.manual_seed(5)
    return Tower().double()


def _batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def _train(model: Any, ranks: Sequence[int], device: Any, micro_step: Any, clip: Callable[[], object]) -> None:
    """Two backwards in each micro-step, one more than was declared, and a gradient that is read before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def backward(number: int, shift: float) -> None:
        batches = [_batch(rank, number).to(device) + shift for rank in ranks]
        (sum(model(batch).square().mean() for batch in batches) / len(batches)).backward()

    for step in range(STEPS):
        for micro in range(MICRO_STEPS):
            with micro_step(micro, of=MICRO_STEPS):
                backward(10 * step + micro, 0.0)
                backward(10 * step + micro, 1.0)
        if step:
            assert float(model.inlet.weight.grad.norm()) > 0.0
        backward(10 * step + 9, 0.0)
        clip()
        optimizer.step()
        optimizer.zero_grad()


def _job(ctx: RankContext, machine: Machine, preset: str, options: dict[str, Any]) -> list[Tensor]:
    model = _tower()
    config = config_of(preset, ranks_per_node=PER_NODE, **options)
    sharded = shard(model, config, units=[Layer], device=machine.device)
    _train(model, [ctx.rank], machine.device, sharded.micro_step, lambda: sharded.clip_grad_norm_(0.3))
    return [parameter.full_tensor().cpu().clone() for parameter in model.parameters()]


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("options", [{}, {"second_hop": "micro_step"}], ids=["default", "every backward"])
@pytest.mark.parametrize("preset", ["mics", "paro-iig", "zero3", "ddp"])
def test_parameters_are_those_of_a_plain_process(preset: str, options: dict[str, Any]) -> None:
    model = _tower()
    _train(
        model,
        range(RANKS),
        "cpu",
        lambda micro, of: nullcontext(),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.3),
    )
    _, by_rank = simulate_gpus(RANKS, _job, preset, options, ranks_per_node=PER_NODE)
    for parameters in by_rank:
        for found, expected in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=0.0, atol=1e-14)
