"""FSDP2's scenarios of autograd: outputs and modules that no loss uses, activations in containers."""

from collections.abc import Iterator
from functools import partial

from mics_strategy import ConfigError, LifecycleError, shard
from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP, ContainerLayer
from tests.fsdp2_parity.runner import STEP, STEPS, Player, Scenario, Vectors
from tests.rank_report import RankContext


def both_outputs_then_one(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        first, second = player.model(player.inputs(step))
        player.backward((first * second).square().mean() if step < 1 else first.square().mean())
        yield STEP


def one_of_two_losses(player: Player) -> Iterator[str]:
    """Each output has its backward, the second one's in every other step."""
    for step in range(STEPS):
        first, second = player.model(player.inputs(step))
        player.backward(first.square().mean())
        if step % 2:
            player.backward(second.square().mean())
        yield STEP


VECTORS = Vectors((2, 6))
SCENARIOS = {
    "an output that no loss uses": Scenario(build=models.both_outputs, inputs=VECTORS, body=both_outputs_then_one),
    "a loss for each output": Scenario(build=models.both_outputs, inputs=VECTORS, body=one_of_two_losses),
    "a module that no loss uses": Scenario(build=models.one_output, inputs=VECTORS),
    **{
        f"activations in a {name}": Scenario(
            build=partial(models.contained, container), inputs=VECTORS, units=(ContainerLayer,)
        )
        for name, container in {
            "list": models.in_list,
            "tuple": models.in_tuple,
            "dict": models.in_dict,
            "named tuple": models.in_pair,
            "dataclass": models.in_record,
            "dataclass of dataclasses": models.in_nested,
        }.items()
    },
}


def hooked(ctx: RankContext) -> None:
    sharded_mlp().in_proj.weight.register_post_accumulate_grad_hook(print)


def hooked_before(ctx: RankContext) -> None:
    model = MLP(4)
    model.in_proj.weight.register_post_accumulate_grad_hook(print)
    shard(model, "zero3")


def gradient_hooked(ctx: RankContext) -> None:
    sharded_mlp().in_proj.weight.register_hook(print)


def sharded_mlp() -> MLP:
    model = MLP(4)
    shard(model, "zero3")
    return model


REFUSED = {
    "an optimizer in the backward": (
        hooked,
        LifecycleError,
        "step optimizers after the backward (gradients stay in buffers that `shard()` allocated",
    ),
    "an optimizer in the backward, hooked before `shard()`": (
        hooked_before,
        ConfigError,
        "Remove them. Read `grad`, change it and step optimizers after the backward",
    ),
    "a hook on a gradient": (
        gradient_hooked,
        LifecycleError,
        "Read `grad`, change it",
    ),
}
