"""Optimizers with odd tensor handling, or whose step raises, behave as on plain."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import ConfigError, LifecycleError
from tests import models
from tests.engine.loops import Body, Loop, Seen, assert_same_loop
from tests.engine.optimizer.not_elementwise import Simple
from tests.engine.training import Run, assert_same, presets, start, whole, wholes
from tests.ranks import RankContext, RankPool, raises_on_every_rank

NAMES = ("ddp", "zero1", "mics", "paro-iig")


class Rebinding(Simple):
    """A new tensor for the state in every step."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["sum"] = state["sum"] * 0.9 + p.grad if "sum" in state else p.grad.clone()
        p.add_(state["sum"], alpha=-group["lr"])


class NewData(Simple):
    """New memory for the tensor in every step."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] * p.grad


class KeepingGradients(Simple):
    """Keeps the gradient itself until the next step, as diffGrad does."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        previous = self.state[p].get("previous", p.grad)
        p.add_((p.grad - previous).sigmoid() * p.grad, alpha=-group["lr"])
        self.state[p]["previous"] = p.grad


class KeepingValues(Simple):
    """Keeps the values of the step before, by replacing them."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        before = self.state[p].get("before", p.data)
        self.state[p]["before"], p.data = p.data, p.data - group["lr"] * p.grad + 0.5 * (p.data - before)


class KeepingGradientsElsewhere(Simple):
    """Keeps the gradients of the last two steps themselves, in a list and in a tuple."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        recent, (previous, num) = state.setdefault("recent", []), state.get("previous", (p.grad, 0))
        p.sub_(group["lr"] * (p.grad + 0.5 * previous * num + sum(recent)))
        state["recent"], state["previous"] = [*recent[-1:], p.grad], (p.grad, num + 1)


class StepsTwice(Simple):
    """As SAM: keeps the first gradients themselves while the closure computes second ones."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is not None
        closed = torch.enable_grad()(closure)
        closed()
        parameters = self.param_groups[0]["params"]
        first = [p.grad for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.01)
        closed()
        for p, grad in zip(parameters, first, strict=True):
            p.sub_(0.1 * (p.grad + grad))


class ByParameter(Simple):
    """Decay, rates and initial values by parameter, which a script has made before."""

    def __init__(self, params: Iterable[Any]) -> None:
        parameters = list(params)
        super().__init__(parameters)
        self.without_decay = {p for p in parameters if p.dim() < 2}
        self.names = {p: f"{index}" for index, p in enumerate(parameters)}
        for p in parameters[1:]:
            p.rate = 0.5

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        if p not in self.without_decay:
            p.mul_(0.9)
        p.count = getattr(p, "count", 0) + 1
        rate = group["lr"] * getattr(p, "rate", 2.0) / p.count
        p.sub_(p.grad, alpha=rate * (2 if self.names[p] == "1" else 1))


class Copying(Simple):
    """Writes parameters to a file, and takes a step back from copies."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        file = BytesIO()
        torch.save(p, file)
        file.seek(0)
        copies = {copy.deepcopy(p): 0.5, torch.load(file, weights_only=False): 0.25}
        p.sub_(p.grad, alpha=group["lr"])
        for copied, weight in copies.items():
            p.add_(weight * (copied.detach() - p))


class Freezing(Simple):
    """Decays what requires gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.requires_grad:
                p.mul_(0.9)


class FromItsOwnList(Simple):
    """Goes around the groups."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.own = list(params)
        super().__init__(self.own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.own:
            self.update(p, self.param_groups[0])


class FromItsOwnListWithStates(FromItsOwnList):
    """With momentum."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(p)
        p.sub_(group["lr"] * state["sum"].mul_(0.9).add_(p.grad))


class ById(Simple):
    """Rates by the address of a parameter."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.rates = {id(p): 0.1 for p in self.param_groups[0]["params"]}


class WithStatesFromTheBeginning(Simple):
    """Momentum that is made before the first step, with the shapes of parameters then."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full_like(p, 0.01)

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return self.state[p]["sum"].mul_(0.9).add_(p.grad)


class Combined(Optimizer):
    """Several optimizers as one, for one scheduler."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for each in self.optimizers:
            each.step()


class Freeing(Simple):
    """Drops each gradient that it has used."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])
        p.grad = None


class FreeingAfterwards(SGD):
    """As a subclass of an optimizer of torch."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Raising(SGD):
    """Raises in its second step."""

    count = 0

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.count += 1
        if self.count == 2:
            raise ZeroDivisionError
        super().step(closure)


def stepping(loop: Loop, make: Callable[..., Optimizer], zeroes: bool) -> Seen:
    optimizer, seen = make(loop.parameters()), []
    for step in range(5):
        loop.backward(step)
        optimizer.step()
        seen += [loop.values(), loop.grads()]
        if zeroes:
            optimizer.zero_grad()
    return seen


def stepping_with_a_closure(loop: Loop) -> Seen:
    optimizer, seen = StepsTwice(loop.parameters()), []

    def closure(step: int) -> None:
        optimizer.zero_grad()
        loop.backward(step)

    for step in range(4):
        optimizer.step(partial(closure, step))
        seen.append(loop.values())
    return seen


def freezing_in_turns(loop: Loop) -> Seen:
    optimizer, seen = Freezing(loop.parameters()), []
    for step in range(4):
        loop.parameters()[0].requires_grad_(step % 2 == 1)
        loop.step(step, optimizer)
        seen.append(loop.values())
    return seen


def combined_later(loop: Loop) -> Seen:
    """With the states of the steps before."""
    parameters = loop.parameters()
    inner = [SGD(parameters[start::2], lr=0.1, momentum=0.9) for start in (0, 1)]
    for optimizer in inner:
        loop.backward(0)
        optimizer.step()
        loop.model.zero_grad()
    combined, seen = Combined([*inner]), []
    for step in range(1, 4):
        loop.step(step, combined)
        seen.append(loop.values())
    states = [each.state[p]["momentum_buffer"] for each in inner for p in each.param_groups[0]["params"]]
    return [*seen, wholes({f"{index}": value for index, value in enumerate(states)})]


def after_raising(loop: Loop, zeroes_first: bool) -> Seen:
    """The loop goes on when a step has raised.

    Its gradients must be gone, or still there, as in torch.
    """
    optimizer, seen = Raising(loop.parameters(), lr=0.1, momentum=0.9), []
    for step in range(4):
        if zeroes_first:
            optimizer.zero_grad()
        loop.backward(step)
        try:
            optimizer.step()
        except ZeroDivisionError:
            assert step == 1
        if not zeroes_first:
            optimizer.zero_grad()
        seen.append(loop.values())
    return seen


def saved_after_raising(loop: Loop) -> Seen:
    optimizer = Raising(loop.parameters(), lr=0.1, momentum=0.9)
    loop.step(0, optimizer)
    loop.backward(1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return [wholes({f"{index} {key}": value for index in state for key, value in state[index].items()})]


BODIES: dict[str, Body] = {
    "states that are rebound": partial(stepping, make=Rebinding, zeroes=True),
    "new memory": partial(stepping, make=NewData, zeroes=True),
    "gradients kept": partial(stepping, make=KeepingGradients, zeroes=True),
    "values kept": partial(stepping, make=KeepingValues, zeroes=True),
    "gradients kept in containers": partial(stepping, make=KeepingGradientsElsewhere, zeroes=True),
    "gradients kept through a closure": stepping_with_a_closure,
    "choices by parameter": partial(stepping, make=ByParameter, zeroes=True),
    "copies and files": partial(stepping, make=Copying, zeroes=True),
    "a list of its own": partial(stepping, make=FromItsOwnList, zeroes=True),
    "states from the beginning": partial(stepping, make=WithStatesFromTheBeginning, zeroes=True),
    "optimizers in a list": combined_later,
    "a parameter frozen in turns": freezing_in_turns,
    "gradients dropped": partial(stepping, make=Freeing, zeroes=False),
    "gradients dropped by a subclass": partial(stepping, make=partial(FreeingAfterwards, lr=0.1), zeroes=False),
    "after a step that raised": partial(after_raising, zeroes_first=False),
    "zeroed before, after a step that raised": partial(after_raising, zeroes_first=True),
    "saved after a step that raised": saved_after_raising,
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("case", [models.mlp, models.scalar], ids=lambda case: case.__name__)
def test_odd_optimizer_behaves_as_on_the_plain_model(
    ranks: RankPool, case: Callable[[], models.Case], body: str
) -> None:
    runs = [Run(case=case, config=config, accumulation=2) for config in presets(NAMES, update_locality="element")]
    assert_same_loop(ranks, 2, runs, BODIES[body])


@pytest.mark.parametrize("body", ["gradients kept in containers", "choices by parameter", "states from the beginning"])
def test_odd_optimizer_of_whole_tensors_behaves_as_on_the_plain_model(ranks: RankPool, body: str) -> None:
    configs = presets(("zero1", "mics"), update_locality="tensor", optimizer_layout="tensors")
    runs = [Run(case=models.mlp, config=config, accumulation=2) for config in configs]
    assert_same_loop(ranks, 2, runs, BODIES[body])


def states_without_rows(ctx: RankContext, config: ShardConfig) -> Tensor:
    """Job: a slow average is kept among the states of a bias of which one rank has no rows."""
    model = nn.Sequential(nn.Linear(4, 1))
    nn.init.ones_(model[0].bias)
    shard(model, config)
    bias = model[0].bias
    optimizer = SGD([bias], lr=0.1, momentum=0.9)
    for _ in range(4):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        slow = optimizer.state[bias].setdefault("slow", torch.ones_like(bias))
        bias.data.copy_(slow.lerp_(bias.detach(), 0.5))
    return whole(bias)


def test_states_of_a_rank_without_rows_may_be_changed(ranks: RankPool) -> None:
    bias, momentum = 1.0, 0.0
    for _ in range(4):
        momentum = 0.9 * momentum + 1.0
        bias -= 0.05 * momentum  # half of the way
    for found in ranks(2, states_without_rows, *presets(("zero3",))):
        torch.testing.assert_close(found, torch.tensor([bias]))


def step_patched(ctx: RankContext, run: Run) -> None:
    def clipped(optimizer: SGD, closure: Callable[[], Any] | None = None) -> None:
        original(optimizer, closure)

    original = SGD.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGD, "step", clipped)
        start(ctx, run).step(0)


def test_a_known_class_with_another_step_is_not_known(ranks: RankPool) -> None:
    [config] = presets(("zero1",))
    run = Run(case=models.mlp, config=config, optimizer="sgd")
    raises_on_every_rank(lambda: ranks(2, step_patched, run), ConfigError, "Declare it in the ShardConfig")


def step_twice(ctx: RankContext, run: Run, make: Callable[..., Optimizer]) -> None:
    training = start(ctx, run)
    optimizer = make(training.model.parameters())
    for step in range(2):
        training.loss(step).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "options", "error", "told"),
    [
        (FromItsOwnListWithStates, {"update_locality": "element"}, LifecycleError, "from a list of its own"),
        (FromItsOwnList, {"update_locality": "tensor", "optimizer_layout": "tensors"}, LifecycleError, "of its own"),
        (ById, {"update_locality": "element"}, ConfigError, r"`ById.rates` has the `id\(\)` of parameters"),
    ],
)
def test_a_step_around_its_groups_is_refused(
    ranks: RankPool, make: Callable[..., Optimizer], options: dict[str, Any], error: type[Exception], told: str
) -> None:
    [config] = presets(("zero1",), **options)
    run = Run(case=models.mlp, config=config)
    raises_on_every_rank(lambda: ranks(2, step_twice, run, make), error, told)


def unfreeze_and_go_on(ctx: RankContext, run: Run, frozen: str) -> dict[str, Tensor]:
    """A forward is refused because a parameter has no memory for gradients.

    Frozen again, training goes on.
    """
    training = start(ctx, run)
    training.step(0)
    unfrozen = [p for name, p in training.model.named_parameters() if name.startswith(frozen)]
    were = [p.requires_grad for p in unfrozen]
    for p in unfrozen:
        p.requires_grad_(True)
    with pytest.raises(LifecycleError, match="was frozen when the model was sharded"):
        training.loss(1)
    for p, requires_grad in zip(unfrozen, were, strict=True):
        p.requires_grad_(requires_grad)
    for step in (1, 2):
        training.step(step)
    return training.parameters()


@pytest.mark.parametrize("frozen", ["embedding", "blocks.0", "blocks.1.up"])
@pytest.mark.parametrize("preset", NAMES)
def test_training_goes_on_after_an_unfreezing_that_was_refused(ranks: RankPool, preset: str, frozen: str) -> None:
    [config] = presets((preset,))
    run = Run(case=models.frozen, config=config, optimizer="sgd")
    case = models.frozen()
    model = case.build()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        for rank in range(2):
            (case.loss(model, case.batch(step, 0, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(2, unfreeze_and_go_on, run, frozen):
        assert_same(found, {name: p.detach() for name, p in model.named_parameters()})
