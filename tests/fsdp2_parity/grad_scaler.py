"""FSDP2's scenarios of loss scaling: ranks agree on overflows, and skip the same steps."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import STEP, STEPS, Player, Scenario, Vectors


def overflow_on_the_last_rank(player: Player) -> Iterator[str]:
    for step in range(STEPS + 1):
        loss = player.model(player.inputs(step)).square().mean()
        player.backward(loss * math.inf if step == 1 and player.rank == 1 else loss)
        yield STEP


def overflow_in_one_shard(player: Player) -> Iterator[str]:
    """One row of the gradient overflows, which one rank holds."""
    for step in range(STEPS):
        weights = torch.ones(8, dtype=torch.float64)
        weights[0] = math.inf if step == 1 else 1.0
        player.backward((player.model(player.inputs(step)) * weights).sum())
        yield STEP


def overflow_in_one_micro_step(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        for micro in range(2):
            loss = player.model(player.inputs(step, micro)).square().mean()
            player.backward(loss * math.inf if (step, micro, player.rank) == (1, 0, 0) else loss)
        yield STEP


VECTORS = Vectors((4, 6))
SCENARIOS = {
    "no overflow": Scenario(build=models.mlps, inputs=VECTORS, units=(MLP,), scaled=True),
    "an overflow on one rank": Scenario(
        build=models.mlps, inputs=VECTORS, units=(MLP,), scaled=True, body=overflow_on_the_last_rank
    ),
    "an overflow in one shard": Scenario(
        build=partial(nn.Linear, 6, 8), inputs=VECTORS, units=(nn.Linear,), scaled=True, body=overflow_in_one_shard
    ),
    "an overflow in one micro-step": Scenario(
        build=models.mlps, inputs=VECTORS, units=(MLP,), scaled=True, body=overflow_in_one_micro_step
    ),
    "clipped between unscaling and stepping": Scenario(
        build=models.mlps, inputs=VECTORS, units=(MLP,), scaled=True, clip=(1e-3, 2.0)
    ),
}
