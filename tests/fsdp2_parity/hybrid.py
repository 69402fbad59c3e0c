"""FSDP2's scenarios of hybrid sharding: replicas on two nodes, and parameters that are resharded to a node only."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import LOOK, STEP, STEPS, Player, Scenario, Tokens, Vectors
from tests.models import VOCABULARY, Block


def accumulated(player: Player) -> Iterator[str]:
    """Gradients are reduced over the replicas when a step needs them."""
    for step in range(STEPS):
        for micro in range(3):
            player.backward(player.model(player.inputs(step, micro)).square().mean())
        yield STEP


def accumulated_and_read(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        for micro in range(3):
            player.backward(player.model(player.inputs(step, micro)).square().mean())
            yield LOOK
        yield STEP


TWO_NODES = {"ranks": 4, "placements": ("hybrid", "part")}
SCENARIOS = {
    "blocks": Scenario(build=models.transformer, inputs=Tokens(VOCABULARY), units=(Block,), **TWO_NODES),
    "accumulated": Scenario(
        build=partial(models.normed_mlps, 16),
        inputs=Vectors((4, 16)),
        units=(MLP, nn.LayerNorm),
        body=accumulated,
        **TWO_NODES,
    ),
    "accumulated, rows that nothing divides": Scenario(
        build=partial(models.normed_mlps, 3),
        inputs=Vectors((4, 3)),
        units=(MLP, nn.LayerNorm),
        body=accumulated,
        **TWO_NODES,
    ),
    "accumulated, read every time": Scenario(
        build=partial(models.normed_mlps, 17),
        inputs=Vectors((4, 17)),
        units=(MLP, nn.LayerNorm),
        body=accumulated_and_read,
        **TWO_NODES,
    ),
    "recomputed composably": Scenario(
        build=models.composable_mlps, inputs=Vectors((4, 6)), units=(MLP,), body=accumulated, **TWO_NODES
    ),
    "recomputed": Scenario(
        build=models.recomputed_mlps, inputs=Vectors((4, 6)), units=(MLP,), body=accumulated, **TWO_NODES
    ),
}
