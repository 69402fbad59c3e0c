"""Ranks that compute together must compute alike: numbers, weights and their order are compared in every step."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mics_strategy import shard
from mics_strategy.engine.origins import origin_of
from mics_strategy.errors import LifecycleError
from tests.ranks import RankContext, RankPool, raises_on_every_rank

WIDTH = 4
Use = Callable[[nn.Sequential, float], Tensor | None]


def a_factor(model: nn.Sequential, number: float) -> Tensor:
    return (model[0].weight * (0.5 + number)).norm()


def an_exponent(model: nn.Sequential, number: float) -> Tensor:
    return model[0].weight.pow(2 + number).sum()


def another_weight(model: nn.Sequential, number: float) -> Tensor:
    return model[int(number)].weight.norm()


def another_whole_weight(model: nn.Sequential, number: float) -> Tensor:
    return model[int(number)].weight.full_tensor().norm()


def another_order(model: nn.Sequential, number: float) -> Tensor:
    first, second = (model[int(number)].weight, model[1 - int(number)].weight)
    return (first.full_tensor() @ second.full_tensor()).sum()


def a_hook(model: nn.Sequential, number: float) -> Tensor:
    norm = model[0].weight.norm()
    norm.register_hook(lambda grad: grad * (1 + number))
    norm.backward()
    return model[1].weight.norm()


def a_temporary_tensor(model: nn.Sequential, number: float) -> None:
    copy = model[0].weight.detach().clone()
    copy.mul_(1 + number)
    assert copy.norm() > 0


def a_list_of_tensors(model: nn.Sequential, number: float) -> None:
    halved = torch._foreach_mul([parameter.detach() for parameter in model.parameters()], 0.5 + number)
    assert sum(torch._foreach_norm(halved)) > 0


def a_plain_scalar(model: nn.Sequential, number: float) -> None:
    with torch.no_grad():
        assert (model[0].weight * torch.tensor(0.5 + number)).norm() > 0


def a_mask_by_a_plain_scalar(model: nn.Sequential, number: float) -> Tensor:
    mask = model[0].weight.data.abs() > torch.tensor(number)
    return torch.where(mask, model[0].weight, 0.0).norm()


def a_plain_scalar_over_a_norm(model: nn.Sequential, number: float) -> Tensor:
    factor = torch.tensor(0.5 + number) / model[0].weight.detach().norm()
    return (model[0].weight.detach() * factor - model[1].weight).norm()


def a_norm_times_a_plain_scalar(model: nn.Sequential, number: float) -> Tensor:
    norm = model[0].weight.detach().norm()
    norm *= torch.tensor(0.5 + number)
    return torch.where(model[0].weight.detach() > norm, model[0].weight, 0.0).norm()


def plain_places(model: nn.Sequential, number: float) -> Tensor:
    counts = torch.zeros_like(model[0].weight)
    counts.index_add_(0, torch.tensor([1, 2] if number else [0, 3]), torch.ones(2, WIDTH))
    return (model[0].weight.square() * counts).sum()


def plain_values(model: nn.Sequential, number: float) -> Tensor:
    target = torch.empty_like(model[0].weight.detach()).copy_(torch.full((WIDTH, WIDTH), number))
    return (model[0].weight - target).square().sum()


def another_noise(model: nn.Sequential, number: float) -> None:
    noises = [torch.randn_like(model[0].weight) for _ in range(2)]
    assert noises[int(number)].norm() > 0


def an_equality(model: nn.Sequential, number: float) -> Tensor | None:
    is_equal = torch.equal(model[0].weight, model[0 if number else 1].weight)
    return model[1].weight.norm() if is_equal else None


READS: list[Use] = [
    *(a_factor, an_exponent, another_weight, another_whole_weight, another_order, a_hook),
    *(a_temporary_tensor, a_list_of_tensors, another_noise, an_equality),
]
PLAIN: list[Use] = [
    *(a_plain_scalar, a_mask_by_a_plain_scalar, a_plain_scalar_over_a_norm, a_norm_times_a_plain_scalar),
    *(plain_places, plain_values),
]


def a_written_weight(model: nn.Sequential, number: float) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1 + number)


def a_written_view(model: nn.Sequential, number: float) -> None:
    model[0].weight.data[1:].mul_(1 + number)


def a_weight_written_with_a_plain_factor(model: nn.Sequential, number: float) -> None:
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor(1 + number))


def a_weight_written_with_plain_values(model: nn.Sequential, number: float) -> None:
    with torch.no_grad():
        model[0].weight.copy_(torch.full((WIDTH, WIDTH), 0.1 + number))


WRITES: list[Use] = [a_written_weight, a_written_view]
PLAIN_WRITES: list[Use] = [a_weight_written_with_a_plain_factor, a_weight_written_with_plain_values]


def a_clipped_gradient(model: nn.Sequential, number: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1 + number)


def a_written_gradient(model: nn.Sequential, number: float) -> None:
    model[0].weight.grad.mul_(1 + number)


def a_plain_gradient(model: nn.Sequential, number: float) -> None:
    model[0].weight.grad = torch.full((WIDTH, WIDTH), number)


AFTER_BACKWARD: list[Use] = [a_clipped_gradient, a_written_gradient]
PLAIN_GRADIENTS: list[Use] = [a_plain_gradient]


def steps(ctx: RankContext, preset: str, use: Use, differing: bool) -> str:
    """Job: three steps with numbers that are equal on all ranks, then some with numbers of each rank, or not."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shard(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        number = float(ctx.rank % 2 if differing and step > 2 else step % 2)
        try:
            _step(model, optimizer, use, number)
        except LifecycleError as error:
            return f"{step}: {error}"
    return "trained"


def _step(model: nn.Sequential, optimizer: torch.optim.Optimizer, use: Use, number: float) -> None:
    if use in (*WRITES, *PLAIN_WRITES):
        use(model, number)
    loss = model(torch.randn(2, WIDTH)).square().mean()
    if use in (*READS, *PLAIN):
        penalty = use(model, number)
        loss = loss if penalty is None else loss + penalty
    loss.backward()
    if use in (*AFTER_BACKWARD, *PLAIN_GRADIENTS):
        use(model, number)
    optimizer.step()
    optimizer.zero_grad()


def named(*uses: Use) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("use", uses, ids=lambda use: use.__name__)


@pytest.mark.parametrize("preset", ["zero3", "mics"])
@named(*READS, *PLAIN, *WRITES, *PLAIN_WRITES, *AFTER_BACKWARD, *PLAIN_GRADIENTS)
def test_numbers_of_each_rank_are_refused_on_every_rank(ranks: RankPool, use: Use, preset: str) -> None:
    for answer in ranks(2, steps, preset, use, True):
        assert answer[0] in "34", answer  # that step, or what it leaves is read in the next one
        is_plain = use in (*PLAIN, *PLAIN_WRITES, *PLAIN_GRADIENTS)
        told = "Ranks wrote different values into" if is_plain else "(operations|writes and steps) of ranks 0, 1[,:]"
        assert re.search(told, answer) or "Unit `0`: ranks 0 and 1" in answer
    assert ranks(2, steps, preset, use, False) == ["trained"] * 2


def by_names_in_any_order(ctx: RankContext) -> None:
    """Job: writes that each rank makes in another order, as in the order of a set of names."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shard(model, "zero3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(1, WIDTH)).sum().backward()
        in_its_order = list(model.parameters())[:: -1 if ctx.rank else 1]
        for parameter in in_its_order:
            parameter.grad.clamp_(-1, 1)
        for parameter in in_its_order:
            parameter.data.mul_(0.99).mul_(torch.tensor(float(parameter.dim())))
        optimizer.step()
        optimizer.zero_grad()


def test_writes_may_have_any_order(ranks: RankPool) -> None:
    ranks(2, by_names_in_any_order)


def plain_tensors_are_written(ctx: RankContext, preset: str) -> None:
    """Job: a rank's own tensors take in what shards hold."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shard(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average, copied = torch.full((WIDTH, WIDTH), float(ctx.rank)), torch.full((WIDTH, WIDTH), float(ctx.rank))
    for step in range(3):
        out = torch.full((2, WIDTH), float(ctx.rank + step)) * model(torch.randn(2, WIDTH))
        out += model[1].bias
        out.addmm_(torch.full((2, WIDTH), float(ctx.rank)), model[1].weight.t())
        out.square().mean().backward()
        weight = model[0].weight.data
        average.lerp_(weight, 0.1)
        copied[0] = weight[ctx.rank % 2 if preset == "ddp" else 1]
        torch.mul(weight, 2, out=copied)
        torch._foreach_copy_([copied], [weight])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("preset", ["zero3", "mics", "ddp"])
def test_plain_tensors_of_each_rank_may_be_written(ranks: RankPool, preset: str) -> None:
    ranks(2, plain_tensors_are_written, preset)


def after_the_end_of_the_job(ctx: RankContext) -> None:
    """Job: shards are read and written when there are no process groups any more."""
    dist.init_process_group("gloo", rank=ctx.rank, world_size=ctx.world_size)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    shard(model, "zero3")
    before = model[0].weight.to_local().clone()
    dist.destroy_process_group()
    model[0].weight.data.mul_(2.0).mul_(torch.tensor(2.0))
    torch.testing.assert_close(model[0].weight.to_local(), 4 * before)


def test_shards_may_be_written_after_the_end_of_the_job(ranks: RankPool) -> None:
    ranks(2, after_the_end_of_the_job, default_group=False)


def after_an_error(ctx: RankContext) -> list[str]:
    return [steps(ctx, "zero3", a_factor, differing) for differing in (True, False)]


def test_a_new_model_knows_nothing_of_an_error_before(ranks: RankPool) -> None:
    for first, second in ranks(2, after_an_error):
        assert first.startswith("3: Ranks ran different units or operations")
        assert second == "trained"


def with_rates_of_each_rank(ctx: RankContext, preset: str, differing: bool) -> None:
    """Job: a scheduler that follows a loss of this rank."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    shard(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        scheduler.step(-float(step) if differing and ctx.rank else 0.0)


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_learning_rates_of_each_rank_are_refused(ranks: RankPool, preset: str) -> None:
    ranks(2, with_rates_of_each_rank, preset, False)
    told = r"`step of SGD with lr 0.0\d+, momentum.*` on rank 0, `step of SGD with lr 0.0\d+,"
    raises_on_every_rank(lambda: ranks(2, with_rates_of_each_rank, preset, True), LifecycleError, told)


def with_two_models(ctx: RankContext, differing: bool) -> None:
    """Job: two models of one architecture, of which each rank reads another one's weight."""
    models = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    for model in models:
        shard(model, "zero3")
    (models[ctx.rank if differing else 1][0].weight.norm() + models[0](torch.ones(1, WIDTH)).sum()).backward()
    torch.optim.SGD(models[0].parameters(), lr=0.1).step()


def test_the_weights_of_two_models_are_told_apart(ranks: RankPool) -> None:
    ranks(2, with_two_models, False)
    told = r"rank 0 sent `reduction of linalg_vector_norm\(0.weight\).*\(0.weight of model 1\)"
    raises_on_every_rank(lambda: ranks(2, with_two_models, True), LifecycleError, told)


@named(another_whole_weight, another_order)
def test_gradients_of_other_weights_are_refused_where_every_rank_has_them_whole(ranks: RankPool, use: Use) -> None:
    for answer in ranks(2, steps, "ddp", use, True):
        assert "rank 0 sent `mean of the gradient of " in answer
    assert ranks(2, steps, "ddp", use, False) == ["trained"] * 2


def test_what_every_rank_has_whole_may_be_read_by_one(ranks: RankPool) -> None:
    for use in (a_temporary_tensor, a_list_of_tensors):
        assert ranks(2, steps, "ddp", use, True) == ["trained"] * 2


def a_restored_weight(weight: nn.Parameter, kept: Tensor) -> None:
    weight.data.copy_(kept)


def a_distance(weight: nn.Parameter, kept: Tensor) -> None:
    (weight - kept).norm().backward()


def a_whole_snapshot(weight: nn.Parameter, kept: Tensor) -> None:
    assert isinstance(kept, DTensor)
    assert kept.full_tensor().shape == weight.shape


def an_average(weight: nn.Parameter, kept: Tensor) -> None:
    weight.data.lerp_(kept * 2.0, 0.1)


def with_snapshots(
    ctx: RankContext, preset: str, use: Callable[[nn.Parameter, Tensor], None], of_gradients: bool, differing: bool
) -> None:
    """Job: a snapshot is kept in some step, which each rank may choose, and used in a later one."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shard(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = model[0].weight
    for step in range(5):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        value = weight.grad if of_gradients else weight  # reading a gradient is collective, copying it is not
        if step == (ctx.rank if differing else 1):
            kept = value.detach().clone()
        if step > 2:
            use(weight, kept)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("preset", ["zero3", "mics"])
@pytest.mark.parametrize("of_gradients", [False, True], ids=["weights", "gradients"])
@pytest.mark.parametrize("use", [a_restored_weight, a_distance, a_whole_snapshot, an_average])
def test_snapshots_of_other_steps_on_each_rank_are_refused(
    ranks: RankPool, preset: str, use: Callable[[nn.Parameter, Tensor], None], of_gradients: bool
) -> None:
    ranks(2, with_snapshots, preset, use, of_gradients, False)
    told = r"0.weight\) of moment \d"
    raises_on_every_rank(lambda: ranks(2, with_snapshots, preset, use, of_gradients, True), LifecycleError, told)


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (torch.ops.aten.mul.Scalar, (torch.ones(1), 0.5), "mul(tensor, 0.5)"),
        (torch.ops.aten.sum.dim_IntList, (torch.ones(1), [0, 1], True), "sum(tensor, [0, 1], True)"),
        (torch.ops.aten._to_copy.default, (torch.ones(1), torch.device("cuda:1")), "_to_copy(tensor, -)"),
    ],
)
def test_an_origin_is_the_operation_with_its_numbers(func: object, args: tuple[object, ...], expected: str) -> None:
    assert origin_of(func, args, {}) == expected


def test_a_long_origin_is_short_and_differs() -> None:
    add = torch.ops.aten._foreach_add.Scalar
    one, other = (origin_of(add, ([torch.ones(1)] * 30 + [factor] + [torch.ones(1)] * 30, 1), {}) for factor in (1, 2))
    assert one != other
    assert len(one) < 130
