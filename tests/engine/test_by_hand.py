"""What a script does by hand to sharded parameters and gradients, beside one plain process in fp64."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from mics_strategy import ShardConfig, shard
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool

PRESETS = ("zero3", "mics", "paro-nig", "ddp")
STEPS = 3


class Model(nn.Module):
    """Layers of a shape that ranks divide unevenly, and a head that the loss uses without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_loss(model: Model, x: Tensor) -> Tensor:
    return model(x).square().mean()


# -- losses ---------------------------------------------------------------------------------------------------------


def full_tensor_in_a_loss(model: Model, x: Tensor) -> Tensor:
    return (model(x) @ whole(model.head.weight).t()).square().mean()


def weight_in_a_loss(model: Model, x: Tensor) -> Tensor:
    return nn.functional.linear(model(x), model.head.weight).square().mean()


def norm_times_data(model: Model, x: Tensor) -> Tensor:
    return plain_loss(model, x) * model.head.weight.norm() + x.mean() * model.scale.square()


def penalty_of_rows(model: Model, x: Tensor) -> Tensor:
    return plain_loss(model, x) + 0.1 * model.head.weight[1:4].square().sum() + model.layers[0].weight[6].sum()


def rows_looked_up(model: Model, x: Tensor) -> Tensor:
    rows = model.head.weight[(x[:, 0].abs() * 3).long() % 5]
    return plain_loss(model, x) + (rows * x).mean()


def weight_of_a_layer_is_returned(model: Model, x: Tensor) -> Tensor:
    handle = model.register_forward_hook(lambda module, _, y: (y, module.layers[0].weight))
    y, weight = model(x)
    handle.remove()
    return y.square().mean() + (weight.sum(1) * y.mean()).sum()


def leaves_are_returned(model: Model, x: Tensor) -> Tensor:
    delta = model.__dict__.setdefault("delta", torch.ones(4, dtype=x.dtype, requires_grad=True))  # kept for all steps
    handle = model.register_forward_hook(lambda module, _, y: (y, module.scale, delta))
    y, scale, leaf = model(x)
    handle.remove()
    return (y * leaf).square().mean() + scale.square() * y.mean()


def weight_is_cut_by_strides(model: Model, x: Tensor) -> Tensor:
    """With offsets, which count from the beginning of the parameter."""

    def cut(module: nn.Module, _: object, y: Tensor) -> Tensor:
        return y + module.bias.as_strided((6,), (1,), 1).sum() * module.weight.as_strided((7,), (2,), 3)

    handle = model.layers[0].register_forward_hook(cut)
    loss = plain_loss(model, x)
    handle.remove()
    return loss


def losses_are_balanced_by_norms(model: Model, x: Tensor) -> Tensor:
    """With scalars of this rank that have met results of all ranks."""
    with torch.no_grad():
        balance = x.square().mean() / model.head.weight.norm()
        largest = torch.maximum(model.layers[0].weight.norm(), x.sum())
        scale = model.layers[2].weight.norm()
        scale *= x.mean()
        scale.add_(torch.where(x.sum() > 0, model.scale.abs(), balance))
    return plain_loss(model, x) * balance + (model.head.weight / scale.exp()).norm() * largest


def copies_are_made_in_a_forward(model: Model, x: Tensor) -> Tensor:
    def add(module: nn.Module, _: object, y: Tensor) -> Tensor:
        copied = copy.deepcopy(module.weight).requires_grad_(False)
        return y + copied.sum(1) + (copied.grad or 0)

    handle = model.layers[0].register_forward_hook(add)
    loss = plain_loss(model, x)
    handle.remove()
    return loss


def fast_weights(model: Model, x: Tensor) -> Tensor:
    weight = whole(model.head.weight)
    inner = (model(x) @ weight.t()).square().mean()
    (grad,) = torch.autograd.grad(inner, weight, create_graph=True)
    return (model(x) @ (weight - 0.1 * grad).t()).pow(4).mean()


# -- between backward and step, and after the step ------------------------------------------------------------------


def gradients_are_halved_by_their_other_name(model: Model) -> None:
    for parameter in model.parameters():
        parameter._grad.mul_(0.5)
    model.scale._grad = None


def gradients_are_changed_in_a_forward(model: Model) -> None:
    def change(module: nn.Module, *_: object) -> None:
        module.weight.grad.mul_(0.5)
        module.bias.grad = None

    handles = [
        model.layers[0].register_forward_hook(change),
        model.register_forward_pre_hook(lambda module, _: module.head.zero_grad()),
        model.register_forward_hook(lambda module, *_: module.scale.grad.add_(float(module.scale.grad))),
    ]
    model(torch.ones(2, 4, dtype=model.scale.dtype))
    for handle in handles:
        handle.remove()


def function_is_differentiated_after_a_read(model: Model) -> None:
    norm = model.layers[0].weight.norm()
    slope = torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 4, dtype=norm.dtype)).norm()
    model.head.weight.grad.add_(slope)


def rows_of_gradients_are_cleared(model: Model) -> None:
    model.layers[0].weight.grad[:3].zero_()
    model.head.weight.grad[4] *= 2


def data_of_gradients_is_set(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * 0.1


def plain_gradients_are_set(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = whole(parameter.grad).sign()


def step_is_skipped_by_a_guard(model: Model) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    if any(bool((grad > 0.2).any()) or grad.isnan().any() for grad in gradients):
        model.zero_grad()


def gradients_are_clipped_by_hand(model: Model) -> None:
    total = sum(float(parameter.grad.norm()) ** 2 for parameter in model.parameters()) ** 0.5
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 0.01 / total))


@torch.no_grad()
def rows_are_written(model: Model) -> None:
    model.layers[0].weight.data[2].zero_()
    model.layers[2].weight[1:3].mul_(0.5)
    model.head.weight.select(0, 4).fill_(0.3)
    model.head.weight.t()[2].add_(1)
    model.layers[0].weight.flatten()[-2:].sub_(1)
    model.layers[2].weight.diagonal().mul_(2)
    model.head.weight[0, 1] = 7
    model.layers[0].bias[model.layers[0].bias < 0] = 0.1
    for part in model.layers[2].bias.chunk(2):
        part.clamp_(max=0.2)


@torch.no_grad()
def parts_are_written_after_an_evaluation(model: Model) -> None:
    model(torch.ones(2, 4, dtype=model.scale.dtype))
    for parameter in model.parameters():
        part = parameter.data.to_local() if isinstance(parameter, DTensor) else parameter.data
        part.mul_(0.9)


@torch.no_grad()
def noise_is_taken_back_by_its_seed(model: Model) -> None:
    for sign in (1, -1):
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) + torch.nn.functional.dropout(parameter * 0 + 1), alpha=sign)
    state = torch.get_rng_state()
    model.head.weight.add_(torch.rand_like(model.head.weight))
    torch.set_rng_state(state)
    model.head.weight.sub_(torch.rand_like(model.head.weight))


@torch.no_grad()
def version_tells_of_a_step(model: Model) -> None:
    kept = model.__dict__.setdefault("versions", {})
    for name, parameter in model.named_parameters():
        assert parameter._version > kept.get(name, -1)
        kept[name] = parameter._version
        (parameter.data.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.9)
        assert parameter._version > kept[name]
        kept[name] = parameter._version


@torch.no_grad()
def parameters_are_walked_as_a_set(model: Model) -> None:
    for parameter in set(model.parameters()):
        parameter.mul_(1 / (1 + 0.1 * parameter.norm()))


@torch.no_grad()
def parameters_are_kept_by_address(model: Model) -> None:
    by_address = {parameter.data_ptr(): parameter for parameter in (*model.parameters(), *model.parameters())}
    for parameter in by_address.values():
        parameter.mul_(0.9)
    assert model.head.weight.data.data_ptr() == model.head.weight.data_ptr()


@torch.no_grad()
def views_follow_their_parameter(model: Model) -> None:
    weight = model.layers[0].weight
    row, rows = weight[6], weight[2:6]
    weight.mul_(2)
    row.add_(rows.sum())
    rows.mul_(row.norm())


@torch.no_grad()
def vector_is_written(model: Model) -> None:
    vector = whole(parameters_to_vector(model.parameters()))
    vector_to_parameters(vector * 0.9, model.parameters())


@torch.no_grad()
def weights_are_renormalised(model: Model) -> None:
    weight = model.head.weight
    weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=1e-7))
    model.layers[0].weight.copy_(model.layers[0].weight / model.layers[0].weight.norm(dim=0))


@torch.no_grad()
def values_are_initialised(model: Model) -> None:
    nn.init.eye_(model.layers[0].weight)
    nn.init.ones_(model.layers[2].weight)
    nn.init.orthogonal_(plain := torch.empty(5, 4, dtype=torch.float64), generator=torch.Generator().manual_seed(1))
    model.head.weight.copy_(plain)


def plain_state_is_loaded(model: Model) -> None:
    state = {name: whole(value).clone() * 0.9 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


@torch.no_grad()
def small_values_are_pruned(model: Model) -> None:
    for weight in (model.layers[0].weight, model.head.weight):
        threshold = weight.abs().flatten().kthvalue(5).values
        weight.mul_(weight.abs() > threshold)
    model.layers[2].weight[model.layers[2].weight.abs().argmin() // 7] *= 0.5


@torch.no_grad()
def average_is_kept_and_used(model: Model) -> None:
    average = model.__dict__.setdefault("average", [parameter.detach().clone() for parameter in model.parameters()])
    for kept, parameter in zip(average, model.parameters(), strict=True):
        kept.mul_(0.5).add_(parameter, alpha=0.5)
        parameter.add_(kept - parameter, alpha=0.3)
        kept.view(-1)[:1].copy_(parameter.view(-1)[:1])


def weights_that_a_forward_has_handed_out_are_written(model: Model) -> None:
    """After it, and read in it after a write there."""
    kept: list[nn.Parameter] = []
    weight = model.layers[2].weight

    def change(module: nn.Module, *_: object) -> None:
        module.weight.data.mul_(0.9)
        module.weight.data.add_(0.01 * whole(weight).detach().norm())
        kept.append(module.weight)

    handle = model.layers[2].register_forward_hook(change)
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=weight.dtype))
    handle.remove()
    kept[0].data.clamp_(max=0.2)
    weight.grad.mul_(weight.detach().norm())
    kept[0].data.mul_(0.9)


def norms_are_added_up(model: Model) -> None:
    """In tensors that are plain."""
    total, each = torch.zeros((), dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    for position, parameter in enumerate(model.parameters()):
        total += parameter.grad.norm() ** 2
        each[position] = parameter.grad.abs().max()
    total.lerp_(model.head.weight.grad.norm(), 0.5)
    for position, parameter in enumerate(model.parameters()):
        parameter.grad.mul_((0.01 / total).clamp(max=1) * each[position])


def results_of_whole_tensors_are_set(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.flip(0)
    grad = model.layers[0].weight.grad
    model.layers[0].weight.grad = grad @ grad.t() @ grad


def gradients_are_kept_across_a_second_backward(model: Model) -> None:
    """Without copies, as gradient surgery does."""
    kept, views = [parameter.grad for parameter in model.parameters()], model.head.weight.grad[1:]
    model.zero_grad()
    plain_loss(model, torch.ones(2, 4, dtype=torch.float64)).backward()
    for first, parameter in zip(kept, model.parameters(), strict=True):
        if parameter.grad is None:
            parameter.grad = first
        else:
            parameter.grad = first - (first * parameter.grad).sum().clamp(max=0) * parameter.grad
    model.head.weight.grad[1:].add_(views)


def gradients_are_read_by_another_name(model: Model) -> None:
    """After more was added to them."""
    kept = {name: parameter.grad for name, parameter in model.named_parameters() if name.startswith("layers")}
    plain_loss(model, torch.ones(2, 4, dtype=torch.float64)).backward()
    kept["layers.0.weight"].mul_(kept["layers.0.bias"].norm())
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.grad = kept.get(name, torch.zeros_like(parameter))
    plain_loss(model, torch.ones(2, 4, dtype=torch.float64)).backward()
    kept["layers.2.bias"].mul_(kept["layers.0.weight"].abs().max())
    before = [parameter.grad for parameter in model.parameters()]
    plain_loss(model, torch.full((2, 4), 2.0, dtype=torch.float64)).backward()
    for parameter, grad in zip(model.parameters(), before, strict=True):
        parameter.grad = None  # what was added belongs to `grad`; `zero_grad` would have read it
        parameter.grad = grad * 0.5


def penalties_of_parameters_alone_are_added(model: Model) -> None:
    """Of extreme values, which some ranks do not have, and of a mean over rows that are cut unevenly."""
    weight, bias = model.layers[0].weight, model.layers[2].bias
    penalty = weight.abs().amax() + weight.norm(float("inf")) + bias.amin() + bias.max() + model.scale.amax()
    (penalty + nn.functional.mse_loss(weight, torch.zeros_like(weight))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))


def gradients_are_projected(model: Model) -> None:
    first, second = model.layers[0].weight.grad, model.layers[2].weight.grad
    flat = torch.cat([first.flatten(), second.flatten()])
    direction = flat / flat.norm()
    first.sub_((first * direction[: first.numel()].view_as(first)).sum() * 0.5 * first)
    mask = torch.arange(first.numel(), dtype=first.dtype).view(first.shape) % 2
    first.mul_(mask)  # plain, the same on all ranks
    second[second.abs().max(dim=0).indices[0]].neg_()


@torch.no_grad()
def several_views_are_written_at_once(model: Model) -> None:
    weight = model.layers[0].weight
    torch._foreach_mul_([weight[0], weight[1], weight[3:5]], 0.5)
    model.head.weight.data.apply_(lambda value: value / 2 if value > 0 else value)


@torch.inference_mode()
def values_are_written_in_inference_mode(model: Model) -> None:
    state = {name: whole(value).clone() for name, value in model.state_dict().items()}
    model.layers[0].weight[2].mul_(0.5)
    model.head.weight.data.add_(state["head.weight"], alpha=0.1)
    model.layers[2].load_state_dict({"weight": state["layers.2.weight"] * 0.9, "bias": state["layers.2.bias"]})


@torch.no_grad()
def averages_are_put_in_and_weights_back(model: Model) -> None:
    """By `data`, without copies."""
    named = dict(model.named_parameters())
    shadow = model.__dict__.setdefault("shadow", {name: p.data.clone() for name, p in named.items()})
    backup = {}
    for name, parameter in named.items():
        shadow[name] = 0.5 * parameter.data + 0.5 * shadow[name]
        backup[name], parameter.data = parameter.data, shadow[name]
    evaluated = model(torch.ones(2, 4, dtype=torch.float64)).mean()
    shadow["head.weight"].mul_(1 + 0.01 * evaluated.detach())
    evaluated = evaluated + model.head.weight.norm()
    for name, parameter in named.items():
        parameter.data = backup[name]
    model.head.weight.mul_(1 + 0.01 * evaluated.detach())
    named["scale"].data, shadow["scale"] = shadow["scale"], named["scale"].data


LOSSES = (
    full_tensor_in_a_loss,
    weight_in_a_loss,
    norm_times_data,
    penalty_of_rows,
    rows_looked_up,
    weight_of_a_layer_is_returned,
    leaves_are_returned,
    weight_is_cut_by_strides,
    losses_are_balanced_by_norms,
    copies_are_made_in_a_forward,
    fast_weights,
)
BEFORE_STEPS = (
    gradients_are_halved_by_their_other_name,
    gradients_are_changed_in_a_forward,
    function_is_differentiated_after_a_read,
    rows_of_gradients_are_cleared,
    data_of_gradients_is_set,
    plain_gradients_are_set,
    step_is_skipped_by_a_guard,
    gradients_are_clipped_by_hand,
    weights_that_a_forward_has_handed_out_are_written,
    norms_are_added_up,
    results_of_whole_tensors_are_set,
    gradients_are_kept_across_a_second_backward,
    penalties_of_parameters_alone_are_added,
    gradients_are_read_by_another_name,
    gradients_are_projected,
)
AFTER_STEPS = (
    rows_are_written,
    parts_are_written_after_an_evaluation,
    noise_is_taken_back_by_its_seed,
    version_tells_of_a_step,
    parameters_are_walked_as_a_set,
    parameters_are_kept_by_address,
    views_follow_their_parameter,
    vector_is_written,
    weights_are_renormalised,
    values_are_initialised,
    plain_state_is_loaded,
    small_values_are_pruned,
    average_is_kept_and_used,
    averages_are_put_in_and_weights_back,
    several_views_are_written_at_once,
    values_are_written_in_inference_mode,
)
Loop = tuple[Callable[[Model, Tensor], Tensor], Callable[[Model], None] | None, Callable[[Model], None] | None]
LOOPS: dict[str, Loop] = {
    **{loss.__name__: (loss, None, None) for loss in LOSSES},
    **{change.__name__: (plain_loss, change, None) for change in BEFORE_STEPS},
    **{change.__name__: (weight_in_a_loss, None, change) for change in AFTER_STEPS},
}


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _train(model: Model, loop: Loop, losses_of: Callable[[Model, int], list[Tensor]]) -> dict[str, Tensor]:
    _, before_step, after_step = loop
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        losses = losses_of(model, step)
        (sum(losses) / len(losses)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if before_step is not None:
            before_step(model)
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            with torch.no_grad():
                model(_batch(step, 0))  # gathers values that must not be used after the script has written others
            after_step(model)
    return wholes(model.state_dict())


def train_both(ctx: RankContext, preset: str, name: str) -> None:
    """Train sharded, and in one plain process on the batches of all ranks; compare."""
    loop = LOOPS[name]
    torch.manual_seed(0)
    plain = Model().double()
    sharded = copy.deepcopy(plain)
    shard(sharded, ShardConfig.preset(preset))
    found = _train(sharded, loop, lambda model, step: [loop[0](model, _batch(step, ctx.rank))])
    expected = _train(
        plain, loop, lambda model, step: [loop[0](model, _batch(step, rank)) for rank in range(ctx.world_size)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.one_job
@pytest.mark.parametrize(("preset", "name"), zip(itertools.cycle(PRESETS), LOOPS))
def test_what_a_script_does_by_hand_trains_as_one_process(ranks: RankPool, preset: str, name: str) -> None:
    ranks(4, train_both, preset, name, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.wide(every=3)
@pytest.mark.one_job
@pytest.mark.parametrize(("shift", "name"), itertools.product(range(1, len(PRESETS)), LOOPS))
def test_it_does_so_under_the_other_presets(ranks: RankPool, shift: int, name: str) -> None:
    ranks(4, train_both, PRESETS[([*LOOPS].index(name) + shift) % len(PRESETS)], name, ranks_per_node=2)


def train_after_a_backward(ctx: RankContext, preset: str) -> None:
    """Train with gradients of a backward before `shard()`, and in one plain process; compare."""
    torch.manual_seed(0)
    plain = Model().double()
    sharded = copy.deepcopy(plain)
    plain_loss(sharded, _batch(9, ctx.rank)).backward()
    torch.stack([plain_loss(plain, _batch(9, rank)) for rank in range(ctx.world_size)]).mean().backward()
    shard(sharded, ShardConfig.preset(preset))
    loop = (plain_loss, None, None)
    found = _train(sharded, loop, lambda model, step: [plain_loss(model, _batch(step, ctx.rank))])
    expected = _train(
        plain, loop, lambda model, step: [plain_loss(model, _batch(step, rank)) for rank in range(ctx.world_size)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_of_a_backward_before_count_in_the_first_step(ranks: RankPool, preset: str) -> None:
    ranks(4, train_after_a_backward, preset, ranks_per_node=2)


def draw(ctx: RankContext, preset: str) -> list[Tensor]:
    """Draw into parameters in several ways, after ranks have drawn different numbers of numbers."""
    model = Model()
    shard(model, ShardConfig.preset(preset))
    torch.manual_seed(ctx.rank)
    torch.rand(ctx.rank + 1)
    with torch.no_grad():
        nn.init.trunc_normal_(model.layers[0].weight)
        model.layers[2].weight.mul_(nn.functional.dropout(model.layers[2].weight * 0 + 1))
        model.head.weight[2].normal_()
        model.scale.uniform_()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize("preset", PRESETS)
def test_random_numbers_drawn_by_hand_are_equal_on_replicas(ranks: RankPool, preset: str) -> None:
    first, *others = ranks(4, draw, preset, ranks_per_node=2)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    truncated = first[1]
    assert len(truncated.unique()) == truncated.numel()  # shards draw different numbers


def initialize(ctx: RankContext, preset: str) -> tuple[list[Tensor], list[Tensor]]:
    """Initialize with patterns, here and on a plain model."""
    found = []
    for is_ours in (True, False):
        model = nn.Sequential(nn.Conv1d(4, 7, 3), nn.Linear(5, 6), nn.Linear(8, 7))
        if is_ours:
            shard(model, ShardConfig.preset(preset))
        nn.init.dirac_(model[0].weight)
        nn.init.eye_(model[1].weight)
        nn.init.sparse_(model[2].weight, sparsity=0.5)
        found.append([whole(layer.weight.detach()).clone() for layer in model])
    return found[0], found[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_patterns_written_by_hand_are_those_of_a_plain_model(ranks: RankPool, preset: str) -> None:
    results = ranks(4, initialize, preset, ranks_per_node=2)
    for ours, expected in results:
        torch.testing.assert_close(ours[:2], expected[:2], rtol=0, atol=0)
        assert (ours[2] == 0).sum(0).tolist() == [4] * 8  # of 7 rows in each column
        torch.testing.assert_close(ours[2], results[0][0][2], rtol=0, atol=0)
