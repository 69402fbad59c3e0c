"""Tensors that a script assigns to parameters and gradients, and writes to later."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from mics_strategy import ShardConfig, shard
from mics_strategy.engine.tensor_memory import digest_of_places
from mics_strategy.errors import LifecycleError
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool, assert_refused, refusal

PRESETS = ("zero3", "mics", "paro-nig", "ddp")
Script = Callable[[nn.Module, SGD], object]


def build() -> tuple[nn.Module, nn.Module]:
    """A plain model in fp64, and the same one sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    return plain, copy.deepcopy(plain)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat_copy(model: nn.Module) -> Tensor:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in model.parameters()])


def views_of(flat: Tensor, model: nn.Module) -> list[Tensor]:
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    return [part.view_as(parameter) for part, parameter in zip(parts, model.parameters(), strict=True)]


def assign(model: nn.Module, flat: Tensor) -> None:
    for parameter, part in zip(model.parameters(), views_of(flat, model), strict=True):
        parameter.data = part


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.float64))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()


# -- refused --------------------------------------------------------------------------------------------------------


def flat_buffer_is_scaled(model: nn.Module, _: SGD) -> None:
    flat = flat_copy(model)
    assign(model, flat)
    evaluate(model)  # nothing was written yet
    flat.mul_(0.5)
    evaluate(model)


def vector_is_scaled(model: nn.Module, _: SGD) -> None:
    vector = flat_copy(model)
    vector_to_parameters(vector, model.parameters())
    vector.mul_(0.5)
    evaluate(model)


def vector_of_parameters_is_scaled(model: nn.Module, _: SGD) -> None:
    with torch.no_grad():
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector, model.parameters())
        vector.mul_(0.5)
    evaluate(model)


def rows_are_reversed(model: nn.Module, _: SGD) -> None:
    flat = flat_copy(model)
    assign(model, flat)
    flat.copy_(flat.flip(0))
    evaluate(model)


def one_element_is_written_through_a_view(model: nn.Module, _: SGD) -> None:
    flat = flat_copy(model)
    last = flat[-1:]
    assign(model, flat)
    del flat
    last.add_(1)
    evaluate(model)


def written_before_a_step(model: nn.Module, optimizer: SGD) -> None:
    flat = flat_copy(model)
    assign(model, flat)
    backward(model)
    flat.add_(1)
    optimizer.step()


def written_before_a_norm(model: nn.Module, _: SGD) -> None:
    flat = flat_copy(model)
    assign(model, flat)
    flat.add_(1)
    model[0].weight.norm()


def average_is_written(model: nn.Module, _: SGD) -> None:
    averages = [parameter.detach() * 0.5 for parameter in model.parameters()]
    for parameter, average in zip(model.parameters(), averages, strict=True):
        parameter.data = average.data
    for average in averages:
        average.add_(1)
    evaluate(model)


def gradients_are_scaled_in_their_buffer(model: nn.Module, optimizer: SGD) -> None:
    flat = torch.ones_like(flat_copy(model))
    for parameter, part in zip(model.parameters(), views_of(flat, model), strict=True):
        parameter.grad = part
    flat.mul_(0.1)
    optimizer.step()


def data_of_gradients_is_scaled(model: nn.Module, optimizer: SGD) -> None:
    backward(model)
    flat = torch.ones_like(flat_copy(model))
    for parameter, part in zip(model.parameters(), views_of(flat, model), strict=True):
        parameter.grad.data = part
    flat.mul_(0.1)
    optimizer.step()


def gradients_are_added_to_a_buffer(model: nn.Module, optimizer: SGD) -> None:
    flat = torch.zeros_like(flat_copy(model))
    for parameter, part in zip(model.parameters(), views_of(flat, model), strict=True):
        parameter.grad = part
    backward(model)
    optimizer.step()


def rows_of_another_parameter(model: nn.Module, _: SGD) -> None:
    model[2].bias.data = model[2].weight.data[:, 1]


def transposed_memory_of_another_parameter(model: nn.Module, _: SGD) -> None:
    model[0].weight.data = model[2].weight.data.t()


def same_tensor_for_two_parameters(model: nn.Module, _: SGD) -> None:
    value = torch.zeros(7, 4, dtype=torch.float64)
    model[0].weight.data = value
    model[0].weight.grad = value


def columns_are_written(model: nn.Module, _: SGD) -> None:
    table = torch.ones(4, 3, dtype=torch.float64)
    model[2].bias.data = table[:, 1]
    table[0, 1] = 2
    evaluate(model)


REFUSED: dict[Script, str] = {
    same_tensor_for_two_parameters: r"gradient of `0.weight` would share memory with `0.weight`.*tensor.clone\(\)",
    columns_are_written: r"`2.bias` was set to a tensor",
    flat_buffer_is_scaled: r"`0.weight` was set to a tensor .* written later.*Set it again",
    vector_is_scaled: r"`0.weight` was set to a tensor",
    vector_of_parameters_is_scaled: r"`0.weight` was set to a tensor",
    rows_are_reversed: r"`0.weight` was set to a tensor",
    one_element_is_written_through_a_view: r"`4.bias` was set to a tensor",
    written_before_a_step: r"`0.weight` was set to a tensor",
    written_before_a_norm: r"`0.weight` was set to a tensor",
    average_is_written: r"`0.weight` was set to a tensor",
    gradients_are_scaled_in_their_buffer: r"The gradient of `0.weight` was set to a tensor",
    data_of_gradients_is_scaled: r"was set to a tensor",
    gradients_are_added_to_a_buffer: r"gradient of `.*`, which a script has set to a tensor.*tensor.clone\(\)",
    rows_of_another_parameter: r"`2.bias` would share memory with another parameter",
    transposed_memory_of_another_parameter: r"`0.weight` would share memory with another parameter",
}


def run_script(ctx: RankContext, preset: str, script: Script) -> None:
    _, model = build()
    shard(model, ShardConfig.preset(preset))
    script(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.one_job
@pytest.mark.parametrize("script", REFUSED, ids=lambda script: script.__name__)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_write_to_an_assigned_tensor_is_refused(ranks: RankPool, preset: str, script: Script) -> None:
    errors = ranks(4, refusal, run_script, preset, script, ranks_per_node=2)
    assert_refused(errors, LifecycleError, f"(?s){REFUSED[script]}")


# -- right ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def vector_is_reused(model: nn.Module, scratch: Tensor) -> None:
    """And set again before the next forward."""
    scratch.copy_(flat_copy(model)).mul_(0.9)
    vector_to_parameters(scratch, model.parameters())
    evaluate(model)
    scratch.zero_()
    scratch.copy_(torch.linspace(-1, 1, len(scratch), dtype=scratch.dtype))
    vector_to_parameters(scratch, model.parameters())


@torch.no_grad()
def buffer_is_filled_and_set_by_turns(model: nn.Module, scratch: Tensor) -> None:
    for parameter, part in zip(model.parameters(), views_of(scratch, model), strict=True):
        part.copy_(whole(parameter))
        parameter.data = part


@torch.no_grad()
def the_rest_of_a_buffer_is_written(model: nn.Module, scratch: Tensor) -> None:
    buffer = torch.cat([flat_copy(model), scratch])
    model.__dict__["buffer"] = buffer
    assign(model, buffer[: len(scratch)])
    buffer[len(scratch) :].add_(1)


@torch.no_grad()
def tensor_is_freed(model: nn.Module, _: Tensor) -> None:
    assign(model, flat_copy(model).mul_(0.9))


def gradients_are_set_from_one_buffer(model: nn.Module, scratch: Tensor) -> None:
    """In each step, after it was filled with something else in the meantime."""
    scratch.copy_(torch.cat([whole(parameter.grad).flatten() for parameter in model.parameters()]))
    for parameter, part in zip(model.parameters(), views_of(scratch, model), strict=True):
        parameter.grad = part * 2
        parameter.grad = part


@torch.no_grad()
def parameters_are_overwritten(model: nn.Module, scratch: Tensor) -> None:
    """After a write to what they were set to, as the error advises."""
    assign(model, scratch)
    scratch.add_(1)
    for parameter in model.parameters():
        parameter.data.copy_(torch.full(parameter.shape, 0.1, dtype=torch.float64))
        if parameter.dim() > 1:
            nn.init.zeros_(parameter)
    evaluate(model)


def gradients_are_overwritten(model: nn.Module, scratch: Tensor) -> None:
    for parameter, part in zip(model.parameters(), views_of(scratch, model), strict=True):
        parameter.grad = part
    scratch.add_(1)
    model[0].weight.grad.copy_(torch.ones(7, 4, dtype=torch.float64))
    SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)


@torch.no_grad()
def averages_are_swapped_in_by_reference(model: nn.Module, _: Tensor) -> None:
    """Of two biases with fewer elements than ranks, of which some ranks have none."""
    averages = [parameter.detach() * 0.9 for parameter in model.parameters()]
    kept = [parameter.data for parameter in model.parameters()]
    for values in (averages, kept, averages):
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data = value
        evaluate(model)


def gradients_are_set_again_and_again(model: nn.Module, scratch: Tensor) -> None:
    """Twice to the same memory, which is written in between."""
    for value in (1.0, 2.0):
        scratch.fill_(value)
        for parameter, part in zip(model.parameters(), views_of(scratch, model), strict=True):
            parameter.grad = part


ALLOWED = (
    averages_are_swapped_in_by_reference,
    gradients_are_set_again_and_again,
    parameters_are_overwritten,
    gradients_are_overwritten,
    vector_is_reused,
    buffer_is_filled_and_set_by_turns,
    the_rest_of_a_buffer_is_written,
    tensor_is_freed,
    gradients_are_set_from_one_buffer,
)


def train(model: nn.Module, script: Callable[[nn.Module, Tensor], None]) -> dict[str, Tensor]:
    optimizer, scratch = SGD(model.parameters(), lr=0.1, momentum=0.9), torch.zeros_like(flat_copy(model))
    for _ in range(3):
        backward(model)
        script(model, scratch)
        optimizer.step()
        optimizer.zero_grad()
        if script is gradients_are_set_from_one_buffer:
            scratch.zero_()
    return wholes(model.state_dict())


def train_both(ctx: RankContext, preset: str, script: Callable[[nn.Module, Tensor], None]) -> None:
    plain, sharded = build()
    shard(sharded, ShardConfig.preset(preset))
    torch.testing.assert_close(train(sharded, script), train(plain, script), rtol=1e-9, atol=1e-11)


@pytest.mark.one_job
@pytest.mark.parametrize("script", ALLOWED, ids=lambda script: script.__name__)
@pytest.mark.parametrize("preset", PRESETS)
def test_assigned_tensors_train_as_in_one_process(
    ranks: RankPool, preset: str, script: Callable[[nn.Module, Tensor], None]
) -> None:
    ranks(4, train_both, preset, script, ranks_per_node=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8], ids=str)
def test_a_digest_changes_with_values_and_places(dtype: torch.dtype) -> None:
    values = torch.arange(3 * 8191 + 5).remainder(101).to(dtype)
    digests = [
        digest_of_places(values),
        digest_of_places(values.flip(0)),
        digest_of_places(values.neg()),
        digest_of_places(values.roll(8)),
    ]
    assert len({int(value) for value in digests}) == len(digests)
    spread = torch.zeros(3, 4).to(dtype)
    assert digest_of_places(spread[:1, 1:2].as_strided((1, 1), (3, 7))) == digest_of_places(spread[0, :1].clone())
    assert digest_of_places(spread[:, 1]) == digest_of_places(spread[:, 1].clone()) == 0
    assert digest_of_places(values[:0]) == digest_of_places(values.new_empty(0, 3)) == 0
