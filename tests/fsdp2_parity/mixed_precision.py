"""FSDP2's scenarios of mixed precision: compute in 16 bits, reduction and optimizer in 32.

The plain process keeps masters in fp32, computes with copies in 16 bits, and adds gradients in fp32.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP, ContainerLayer
from tests.fsdp2_parity.runner import STEP, STEPS, Player, Scenario, Vectors

HALF = (("param_dtype", "bfloat16"),)


def accumulated(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        for micro in range(4):
            player.backward(player.model(player.inputs(step, micro)).square().mean())
        yield STEP


def frozen_first(player: Player) -> Iterator[str]:
    """The first forward has no gradients, and nothing to train."""
    player.model.requires_grad_(False)
    with torch.no_grad():
        player.losses.append(player.model(player.inputs(7)).mean().item())
    player.model.requires_grad_(True)
    for step in range(STEPS):
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))


SHARED = {"dtype": torch.float32, "tolerance": 2e-6}
VECTORS = Vectors((4, 6))
SCENARIOS = {
    "compute in bf16": Scenario(build=models.mlps, inputs=VECTORS, units=(MLP,), options=HALF, **SHARED),
    "compute in fp16": Scenario(
        build=models.mlps, inputs=VECTORS, units=(MLP,), options=(("param_dtype", "float16"),), **SHARED
    ),
    "accumulated in fp32": Scenario(
        build=models.mlps, inputs=VECTORS, units=(MLP,), options=HALF, body=accumulated, **SHARED
    ),
    "full precision between two layers": Scenario(build=models.WideBetween, inputs=VECTORS, options=HALF, **SHARED),
    "frozen in the first forward": Scenario(
        build=models.mlps,
        inputs=VECTORS,
        units=(MLP,),
        options=HALF,
        body=frozen_first,
        **SHARED,
        fsdp2_raises="attempting to assign a gradient with dtype",
    ),
    "recomputed": Scenario(build=models.recomputed_mlps, inputs=VECTORS, units=(MLP,), options=HALF, **SHARED),
    "a layer norm": Scenario(build=normed, inputs=VECTORS, units=(nn.Linear, nn.LayerNorm), options=HALF, **SHARED),
    **{
        f"activations in a {name}": Scenario(
            build=partial(models.contained, container),
            inputs=VECTORS,
            units=(ContainerLayer,),
            options=HALF,
            **SHARED,
        )
        for name, container in {
            "named tuple": models.in_pair,
            "dataclass": models.in_record,
            "dataclass of dataclasses": models.in_nested,
        }.items()
    },
}
