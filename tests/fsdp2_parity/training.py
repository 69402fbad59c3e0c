"""FSDP2's scenarios of training: what runs, how often and in which order makes no difference to what is learnt."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP, ChunkedHead
from tests.fsdp2_parity.runner import LOOK, STEP, STEPS, Player, Scenario, Tokens, Vectors, each_step
from tests.models import VOCABULARY, Block


def root_only(_: nn.Module) -> bool:
    return False


def then_a_part(player: Player) -> Iterator[str]:
    """The root, and afterwards its first module alone."""
    for step in range(STEPS):
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP
        player.backward(player.model[0](player.inputs(step, 1)).square().mean())
        yield STEP


def by_a_method(player: Player) -> Iterator[str]:
    """A module is entered by another method than its forward."""
    player.register_forward_method(player.model.encoder, "features")
    yield from each_step(player)


def then_a_layer(player: Player) -> Iterator[str]:
    """The root, and afterwards a layer of its second module alone."""
    for step in range(STEPS):
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP
        player.backward(player.model[1].in_proj(player.inputs(step, 1)).square().mean())
        yield STEP


def accumulated(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        for micro in range(3):
            player.backward(player.model(player.inputs(step, micro)).square().mean() / 3)
        yield STEP


def looked_at(player: Player) -> Iterator[str]:
    """Gradients are read between the micro-steps."""
    for step in range(STEPS):
        for micro in range(3):
            player.backward(player.model(player.inputs(step, micro)).square().mean() / 3)
            yield LOOK
        yield STEP


def one_forward_one_backward(player: Player) -> Iterator[str]:
    """The schedule of a pipeline: two micro-batches are in flight."""
    for step in range(STEPS):
        losses = [player.model(player.inputs(step, micro)).square().mean() for micro in range(2)]
        for micro in range(2, 4):
            player.backward(losses.pop(0))
            losses.append(player.model(player.inputs(step, micro)).square().mean())
        for loss in losses:
            player.backward(loss)
        yield STEP


def head_on_chunks(player: Player) -> Iterator[str]:
    """The head is left out of the forward, and called and differentiated on one chunk after the other."""
    for step in range(STEPS):
        hidden = player.model(player.inputs(step), skip_head=True)
        grads = []
        for chunk in hidden.detach().chunk(3, dim=1):
            leaf = chunk.contiguous().detach().requires_grad_()
            player.backward(player.model.head(leaf).square().mean())
            grads.append(leaf.grad)
            yield LOOK
        hidden.backward(torch.cat(grads, dim=1))
        yield STEP


def head_on_chunks_of_micro_batches(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        for micro in range(2):
            hidden = player.model(player.inputs(step, micro), skip_head=True)
            grads = []
            for chunk in hidden.detach().chunk(2, dim=1):
                leaf = chunk.contiguous().detach().requires_grad_()
                player.backward(player.model.head(leaf).square().mean())
                grads.append(leaf.grad)
            hidden.backward(torch.cat(grads, dim=1))
        yield STEP


def head_left_out_twice(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        one, two = (player.model(player.inputs(step, micro), skip_head=True) for micro in range(2))
        player.backward(one.square().mean() + two.mean())
        yield STEP


def two_forwards(player: Player) -> Iterator[str]:
    """Two forwards before one backward, as in preference optimization."""
    for step in range(STEPS):
        one, two = (player.model(player.inputs(step, micro)) for micro in range(2))
        player.backward((one.mean() - two.mean()).square() + one.square().mean())
        yield STEP


def after_an_exception(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        player.model[1].armed = True
        with pytest.raises(ArithmeticError):
            player.model(player.inputs(step, 1))
        player.model[1].armed = False
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP


def without_inputs(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        player.backward(player.model().square().mean() * (1 + player.inputs(step).mean()))
        yield STEP


def with_evaluation(player: Player) -> Iterator[str]:
    for step in range(STEPS):
        loss = player.model(player.inputs(step)).square().mean()
        with torch.no_grad():
            player.model(player.inputs(step, 1))
        player.backward(loss)
        yield STEP
        with torch.no_grad():
            player.losses.append(player.model(player.inputs(step, 2)).mean().item())
        yield LOOK


WORDS = Tokens(VOCABULARY)
SCENARIOS = {
    "one group, even rows": Scenario(
        build=partial(models.two_linears, (16, 15), (15, 8)), inputs=Vectors((4, 16)), units=root_only
    ),
    "one group, odd rows": Scenario(
        build=partial(models.two_linears, (7, 15), (15, 3)), inputs=Vectors((4, 7)), units=root_only
    ),
    "one group, rows that no rank divides": Scenario(
        build=partial(models.two_linears, (16, 17), (17, 8)), inputs=Vectors((4, 16)), units=root_only
    ),
    "a unit for every layer": Scenario(
        build=partial(models.two_linears, (7, 15), (15, 3)), inputs=Vectors((4, 7)), optimizer="adamw_fused"
    ),
    "blocks": Scenario(build=models.transformer, inputs=WORDS, units=(Block,)),
    "blocks, two units ahead": Scenario(
        build=partial(models.transformer, num_blocks=5), inputs=WORDS, units=(Block,), options=(("prefetch", 2),)
    ),
    "blocks, no overlap": Scenario(
        build=models.transformer, inputs=WORDS, units=(Block,), options=(("overlap", "none"),)
    ),
    "layers in blocks": Scenario(build=models.transformer, inputs=WORDS, units=(Block, nn.Linear)),
    "root, then a part": Scenario(build=models.mlps, inputs=Vectors((4, 6)), units=(MLP,), body=then_a_part),
    "a layer called twice": Scenario(build=models.CalledTwice, inputs=Vectors((4, 4))),
    "recomputed by utils": Scenario(build=partial(models.transformer, "utils"), inputs=WORDS, units=(Block,)),
    "recomputed by a wrapper": Scenario(build=partial(models.transformer, "wrapper"), inputs=WORDS, units=(Block,)),
    "recomputed, tied": Scenario(build=partial(models.transformer, "utils", tie=True), inputs=WORDS, units=(Block,)),
    "recomputed, two forwards": Scenario(
        build=partial(models.transformer, "utils"), inputs=WORDS, units=(Block, nn.Linear), body=two_forwards
    ),
    "recomputed composably": Scenario(build=partial(models.transformer, "composable"), inputs=WORDS, units=(Block,)),
    "recomputed composably, tied": Scenario(
        build=partial(models.transformer, "composable", tie=True), inputs=WORDS, units=(Block,)
    ),
    "recomputed composably, two forwards": Scenario(
        build=partial(models.transformer, "composable"), inputs=WORDS, units=(Block, nn.Linear), body=two_forwards
    ),
    "a method that counts as a forward": Scenario(
        build=models.Captioner, inputs=Vectors((2, 3, 4, 4)), units=(models.Patches, nn.Linear), body=by_a_method
    ),
    "head on chunks": Scenario(
        build=ChunkedHead, inputs=WORDS, body=head_on_chunks, units=(nn.Embedding, nn.Linear, nn.RMSNorm)
    ),
    "head on chunks, recomputed": Scenario(
        build=partial(ChunkedHead, recompute=True), inputs=WORDS, body=head_on_chunks
    ),
    "head on chunks, tied": Scenario(
        build=partial(ChunkedHead, tie=True),
        inputs=WORDS,
        body=head_on_chunks,
        fsdp2_raises="is shared with a parameter already managed",
    ),
    "a layer of a unit, called without the unit": Scenario(
        build=models.mlps,
        inputs=Vectors((4, 6)),
        units=(MLP,),
        body=then_a_layer,
        fsdp2_raises="got mixed torch.Tensor and DTensor",
    ),
    "head on chunks of micro-batches": Scenario(build=ChunkedHead, inputs=WORDS, body=head_on_chunks_of_micro_batches),
    "head left out twice": Scenario(build=ChunkedHead, inputs=WORDS, body=head_left_out_twice),
    "two forwards": Scenario(build=models.transformer, inputs=WORDS, units=(Block,), body=two_forwards),
    "after an exception": Scenario(build=models.raising, inputs=Vectors((4, 6)), body=after_an_exception),
    "tied": Scenario(build=partial(models.transformer, tie=True), inputs=WORDS, units=(Block,)),
    "tied, both users are units": Scenario(
        build=models.Tied,
        inputs=Tokens(17),
        units=(nn.Embedding, nn.Linear),
        fsdp2_raises="is shared with a parameter already managed",
    ),
    "accumulated": Scenario(build=models.mlps, inputs=Vectors((2, 6)), units=(MLP,), body=accumulated),
    "accumulated, reduced every time": Scenario(
        build=models.mlps,
        inputs=Vectors((2, 6)),
        units=(MLP,),
        body=accumulated,
        options=(("second_hop", "micro_step"),),
    ),
    "accumulated, read every time": Scenario(build=models.mlps, inputs=Vectors((2, 6)), units=(MLP,), body=looked_at),
    "one forward, one backward": Scenario(
        build=models.transformer, inputs=WORDS, units=(Block,), body=one_forward_one_backward, optimizer="adamw"
    ),
    "evaluation in between": Scenario(build=models.mlps, inputs=Vectors((2, 6)), units=(MLP,), body=with_evaluation),
    "no inputs": Scenario(build=models.NoInputs, inputs=Vectors((4,)), body=without_inputs, units=root_only),
    "outputs written in place": Scenario(
        build=models.WrittenOutputs, inputs=Vectors((2, 3, 6)), fsdp2_raises="out of bounds for storage of size 0"
    ),
    "compiled": Scenario(build=models.compiled_mlps, inputs=Vectors((2, 6)), units=(MLP,), is_slow=True),
    "one rank": Scenario(build=models.mlps, inputs=Vectors((2, 6)), units=(MLP,), ranks=1),
}
