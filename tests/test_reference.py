"""Is the truth true?"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests import models
from tests.models import Case
from tests.reference import train_reference

all_cases = pytest.mark.parametrize("make_case", models.ALL, ids=lambda make: make.__name__)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@all_cases
def test_models_and_batches_are_the_same_every_time(make_case: Callable[[], Case]) -> None:
    case, again = make_case(), make_case()
    state, state_again = case.build().state_dict(), again.build().state_dict()
    assert all(torch.equal(state[name], state_again[name]) for name in state)
    batch, batch_again = case.batch(3, 1, 2), again.batch(3, 1, 2)
    assert all(torch.equal(torch.as_tensor(batch[k]), torch.as_tensor(batch_again[k])) for k in batch)
    assert not torch.equal(batch["x"], case.batch(3, 2, 1)["x"])


@all_cases
def test_models_learn(make_case: Callable[[], Case]) -> None:
    case = make_case()
    same_batch = case.batches(1, 1, 2) * 30
    trace = train_reference(case.build(), same_batch, _adamw, loss_fn=case.loss)
    assert trace.losses[-1] < 0.9 * trace.losses[0]


@all_cases
def test_models_contain_their_units(make_case: Callable[[], Case]) -> None:
    case = make_case()
    assert any(isinstance(module, case.units) for module in case.build().modules())


def test_accumulation_and_ranks_are_one_mean_over_the_whole_batch() -> None:
    case = models.mlp()
    batches = case.batches(1, 2, 3)
    trace = train_reference(case.build(), batches, _sgd, loss_fn=case.loss)
    whole = {key: torch.cat([batch[key] for by_rank in batches[0] for batch in by_rank]) for key in "xy"}
    model = case.build()
    loss = case.loss(model, whole)
    loss.backward()
    assert trace.losses[0] == pytest.approx(loss.item())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trace.grads[0][name], parameter.grad)
        torch.testing.assert_close(trace.parameters[name], (parameter - 0.1 * parameter.grad).detach())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert trace.grad_norms[0] == pytest.approx(norm.item())


def test_clipping_bounds_the_update_and_not_the_recorded_norm() -> None:
    case = models.mlp()
    before = dict(case.build().named_parameters())
    trace = train_reference(case.build(), case.batches(1, 1, 1), _sgd, loss_fn=case.loss, clip=0.01)
    change = [after - before[name] for name, after in trace.parameters.items()]
    assert nn.utils.get_total_norm(change).item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert trace.grad_norms[0] > 0.01


@pytest.mark.parametrize("is_zero", [True, False], ids=["zero", "none"])
def test_weight_decay_of_unused_parameters_follows_the_option(is_zero: bool) -> None:
    case = models.unused()
    batches = [[[case.batch(2, 0, 0)]]]  # step 2 leaves the branch out
    trace = train_reference(case.build(), batches, _adamw, loss_fn=case.loss, missing_grads_are_zero=is_zero)
    name = "branch.0.up.weight"
    before = dict(case.build().named_parameters())[name]
    assert torch.equal(before, trace.parameters[name]) is not is_zero
    assert (name in trace.grads[0]) is is_zero


def test_frozen_parameters_stay() -> None:
    case = models.frozen()
    model = case.build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace = train_reference(model, case.batches(2, 1, 1), _adamw, loss_fn=case.loss)
    for name, parameter in model.named_parameters():
        assert torch.equal(before[name], trace.parameters[name]) is not parameter.requires_grad
    assert trace.grads[0].keys() == {n for n, p in model.named_parameters() if p.requires_grad}


def test_buffers_belong_to_their_rank() -> None:
    case = models.conv_bn()
    batches = case.batches(2, 1, 2)
    trace = train_reference(case.build(), batches, _sgd, loss_fn=case.loss)
    name = "blocks.0.norm.running_mean"
    first, second = (buffers[name] for buffers in trace.buffers_by_rank)
    assert not torch.equal(first, second)
    assert trace.buffers_by_rank[0]["blocks.0.norm.num_batches_tracked"].item() == 2


def test_scheduler_advances_once_per_step() -> None:
    case = models.mlp()

    def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else 0.0)

    one = train_reference(case.build(), case.batches(1, 2, 1), _sgd, loss_fn=case.loss)
    three = train_reference(case.build(), case.batches(3, 2, 1), _sgd, loss_fn=case.loss, make_scheduler=make_scheduler)
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, three.parameters[name])
