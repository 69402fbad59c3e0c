"""Ways in which training loops compute their gradients.

A pattern is a function of a `Play`: it runs forwards and backwards on any model. `play` runs it on a sharded model and
on a plain one with every rank's batches, to compare both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.engine.training import Run, start
from tests.models import Case
from tests.rank_report import RankContext


@dataclass(frozen=True, slots=True)
class Play:
    """A model, sharded or plain, and the batches of one rank."""

    case: Case
    model: nn.Module
    rank: int

    def loss(self, micro: int, step: int = 0) -> Tensor:
        return self.case.loss(self.model, self.case.batch(step, micro, self.rank))

    def read(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


Pattern = Callable[[Play], None]
Grads = dict[str, Tensor]


def play(ctx: RankContext, run: Run, pattern: Pattern) -> tuple[Grads, Grads]:
    """Job: the gradients of a pattern on the sharded model and on plain ones.

    Those of plain models are averaged over ranks.
    """
    training = start(ctx, run)
    pattern(Play(training.case, training.model, ctx.rank))
    return training.grads(), mean_over_ranks(training.case, pattern, ctx.world_size)


def mean_over_ranks(case: Case, pattern: Pattern, world_size: int) -> Grads:
    """What the pattern leaves on a plain model, mean over the ranks' batches.

    A rank without one counts as zero.
    """
    total: Grads = {}
    for rank in range(world_size):
        model = case.build()
        pattern(Play(case, model, rank))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, torch.zeros_like(parameter.grad)) + parameter.grad / world_size
    return {name: total[name] for name, _ in model.named_parameters() if name in total}


# -- what a backward goes through ---------------------------------------------------------------------------


def two_micro_steps(play: Play) -> None:
    play.loss(0).backward()
    play.loss(1).backward()


def one_backward_of_two_forwards(play: Play) -> None:
    (play.loss(0) + 2 * play.loss(1)).backward()


def two_forwards_then_their_backwards(play: Play) -> None:
    losses = [play.loss(0), play.loss(1)]
    losses[0].backward()
    (2 * losses[1]).backward()


def two_forwards_then_the_last_backward_first(play: Play) -> None:
    losses = [play.loss(0), play.loss(1)]
    (2 * losses[1]).backward()
    losses[0].backward()


def two_backwards_of_one_graph(play: Play) -> None:
    loss = play.loss(0)
    loss.backward(retain_graph=True)
    loss.backward()


def another_micro_step_between_two_backwards_of_one_graph(play: Play) -> None:
    loss = play.loss(0)
    loss.backward(retain_graph=True)
    play.loss(1).backward()
    loss.backward()


@contextmanager
def _output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda *args: seen.append(args[2]))
    yield seen
    handle.remove()


def backward_of_the_first_layers_only(play: Play) -> None:
    with _output_of(play.model.blocks[0]) as outputs:
        play.loss(0)
    outputs[0].square().mean().backward()


def backward_of_the_first_layers_then_of_all(play: Play) -> None:
    with _output_of(play.model.blocks[0]) as outputs:
        loss = play.loss(0)
    outputs[0].square().mean().backward(retain_graph=True)
    loss.backward()


def loss_from_an_inner_layer_and_the_last(play: Play) -> None:
    with _output_of(play.model.blocks[1]) as outputs:
        loss = play.loss(0)
    (loss + outputs[0].square().mean()).backward()


def loss_from_an_inner_layer_on_the_first_rank(play: Play) -> None:
    with _output_of(play.model.blocks[0]) as outputs:
        loss = play.loss(0)
    (outputs[0].square().mean() if play.rank == 0 else loss).backward()


def a_forward_that_is_thrown_away(play: Play) -> None:
    play.loss(0)
    play.loss(1).backward()


def evaluation_between_forward_and_backward(play: Play) -> None:
    loss = play.loss(0)
    with torch.no_grad():
        play.loss(1)
    loss.backward()


def inference_between_forward_and_backward(play: Play) -> None:
    loss = play.loss(0)
    with torch.inference_mode():
        play.loss(1)
    loss.backward()


# -- what happens to gradients between backwards ------------------------------------------------------------


def read_between(play: Play) -> None:
    play.loss(0).backward()
    play.read()
    play.loss(1).backward()


def read_after_every_backward(play: Play) -> None:
    for micro in range(4):
        play.loss(micro).backward()
        play.read()
        play.read()


def cleared_by_optimizer(play: Play) -> None:
    play.loss(0).backward()
    torch.optim.SGD(play.trainable()).zero_grad()
    play.loss(1).backward()


def zeroed_by_optimizer(play: Play) -> None:
    play.loss(0).backward()
    torch.optim.SGD(play.trainable()).zero_grad(set_to_none=False)
    play.loss(1).backward()


def cleared_by_model(play: Play) -> None:
    play.loss(0).backward()
    play.model.zero_grad()
    play.loss(1).backward()


def zeroed_by_model(play: Play) -> None:
    play.loss(0).backward()
    play.model.zero_grad(set_to_none=False)
    play.loss(1).backward()


def cleared_and_left(play: Play) -> None:
    play.loss(0).backward()
    play.model.zero_grad()


def cleared_without_reading(play: Play) -> None:
    play.loss(0).backward()
    for parameter in play.trainable():
        parameter.grad = None
    play.loss(1).backward()


def cleared_in_every_second_parameter(play: Play) -> None:
    play.loss(0).backward()
    for parameter in play.trainable()[::2]:
        parameter.grad = None
    play.loss(1).backward()


def cleared_in_every_second_parameter_after_reading(play: Play) -> None:
    play.loss(0).backward()
    play.read()
    for parameter in play.trainable()[::2]:
        parameter.grad = None
    play.loss(1).backward()


def cleared_in_every_second_parameter_and_left(play: Play) -> None:
    play.loss(0).backward()
    for parameter in play.trainable()[::2]:
        parameter.grad = None


def halved_in_place(play: Play) -> None:
    play.loss(0).backward()
    for grad in play.read():
        grad.mul_(0.5)
    play.loss(1).backward()


def replaced_by_user(play: Play) -> None:
    play.loss(0).backward()
    for parameter in play.trainable():
        parameter.grad = parameter.grad * 3
    play.loss(1).backward()


def set_by_user_before(play: Play) -> None:
    for parameter in play.trainable():
        parameter.grad = torch.ones_like(parameter)
    play.loss(0).backward()
    play.loss(1).backward()


def set_by_user_only(play: Play) -> None:
    for parameter in play.trainable():
        parameter.grad = 2 * parameter.detach()


# -- losses of the parameters themselves --------------------------------------------------------------------


def _penalty(play: Play) -> Tensor:
    total = sum(parameter.square().sum() for parameter in play.trainable())
    return total.full_tensor() if isinstance(total, DTensor) else total


def penalised(play: Play) -> None:
    for micro in range(2):
        (play.loss(micro) + 0.1 * _penalty(play)).backward()


def penalised_in_a_backward_of_its_own(play: Play) -> None:
    (0.1 * _penalty(play)).backward()
    play.loss(0).backward()
    (0.1 * _penalty(play)).backward()


def penalised_after_reading(play: Play) -> None:
    play.loss(0).backward()
    play.read()
    (0.1 * _penalty(play)).backward()
    play.read()
    (play.loss(1) + 0.1 * _penalty(play)).backward()


def penalised_and_cleared(play: Play) -> None:
    (play.loss(0) + 0.1 * _penalty(play)).backward()
    play.model.zero_grad()
    play.loss(1).backward()
