"""FSDP2's scenarios of partial training: frozen parameters inside of units and beside them, and changes of mind."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import STEP, STEPS, Player, Scenario, Vectors, each_step


def biases_only(model: nn.Module) -> None:
    """As BitFit."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)


def frozen_before(build: object) -> nn.Module:
    model = build()
    biases_only(model)
    return model


def frozen_after(player: Player) -> Iterator[str]:
    """Weights are frozen when the model is sharded already."""
    biases_only(player.model)
    yield from each_step(player)


def thawed_later(player: Player) -> Iterator[str]:
    """Every other layer is frozen, a step runs without gradients, and the last step trains all layers."""
    for layer in player.model[0::4]:
        layer.requires_grad_(False)
    player.backward(player.model(player.inputs(0)).square().mean())
    yield STEP
    with torch.no_grad():
        player.losses.append(player.model(player.inputs(1)).mean().item())
    player.model.requires_grad_(True)
    for step in range(2, 2 + STEPS):
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP


def frozen_by_turns(player: Player) -> Iterator[str]:
    for step in range(STEPS + 1):
        for number, layer in enumerate(player.model[0::2]):
            layer.requires_grad_(number % 2 == step % 2)
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP
    player.model.requires_grad_(True)


VECTORS = Vectors((4, 6))
SCENARIOS = {
    "biases only": Scenario(build=partial(frozen_before, models.mlps), inputs=VECTORS, units=(MLP,)),
    "biases only, recomputed": Scenario(
        build=partial(frozen_before, models.recomputed_mlps), inputs=VECTORS, units=(MLP,)
    ),
    "biases only, recomputed composably": Scenario(
        build=partial(frozen_before, models.composable_mlps), inputs=VECTORS, units=(MLP,)
    ),
    "weights frozen after sharding": Scenario(build=models.mlps, inputs=VECTORS, units=(MLP,), body=frozen_after),
    "weights frozen after sharding, recomputed": Scenario(
        build=models.recomputed_mlps, inputs=VECTORS, units=(MLP,), body=frozen_after
    ),
    "every other layer frozen, then thawed": Scenario(build=models.linears, inputs=VECTORS, body=thawed_later),
    "layers frozen by turns": Scenario(build=models.linears, inputs=VECTORS, body=frozen_by_turns),
    "trained and frozen layers called often": Scenario(build=models.NoGradBetween, inputs=Vectors((8, 5))),
}
