"""References to parameters outside of `_parameters` follow the parameters, or are refused."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import ConfigError, LifecycleError, MiCSError
from tests.engine.training import whole, wholes
from tests.ranks import RankContext, RankPool, assert_refused, refusal

WIDTH = 6


class Listing(nn.Module):
    """Reads its parameters from a list, a dict in a list and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.3)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.3)
        self.third = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.plain = [self.first, {"second": self.second}]
        object.__setattr__(self, "direct", self.third)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.plain[0] @ self.plain[1]["second"]) * self.direct


def listing_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Listing() for _ in range(4)], nn.Linear(WIDTH, 2, dtype=torch.float64))
    object.__setattr__(model, "everything", list(model.parameters()))
    return model


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def train_listing(ctx: RankContext, config: ShardConfig) -> dict[str, Tensor]:
    model = listing_model()
    shard(model, config, units=[Listing])
    optimizer = torch.optim.SGD(model.everything, lr=0.1)
    for step in range(3):
        model(batch(ctx.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


def trained_plain(num_ranks: int) -> dict[str, Tensor]:
    model = listing_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        losses = [model(batch(rank, step)).square().mean() for rank in range(num_ranks)]
        (torch.stack(losses).sum() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", [ShardConfig.preset("zero3"), ShardConfig.preset("ddp")], ids=["zero3", "ddp"])
def test_plain_containers_follow_their_parameters(ranks: RankPool, config: ShardConfig) -> None:
    expected = trained_plain(2)
    for parameters in ranks(2, train_listing, config):
        torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-12)


def linears() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def tied_by_data(ctx: RankContext) -> None:
    model = linears()
    model[2].weight.data = model[1].weight.data
    shard(model)


def tied_by_data_in_part(ctx: RankContext) -> None:
    model = linears()
    model[2].weight.data = model[1].weight.data[:2]
    shard(model)


def buffer_of_a_parameter(ctx: RankContext) -> None:
    model = linears()
    model[1].register_buffer("first", model[1].weight.data[0], persistent=False)
    shard(model)


def attribute_of_a_parameter(ctx: RankContext) -> None:
    model = linears()
    model[1].transposed = model[1].weight.data.t()
    shard(model)


def rows_in_lists(ctx: RankContext) -> None:
    model = linears()
    model[1].parts = {"rows": [list(model[1].weight.data.chunk(2))]}
    shard(model)


def loss_of_before(ctx: RankContext) -> None:
    model = linears()
    weight = model[1].weight
    shard(model)
    (model(torch.ones(2, 4)).sum() + weight.square().sum()).backward()


def read_without_gradients(ctx: RankContext) -> None:
    model = linears()
    kept = (model[1].weight, model[1].bias)
    shard(model)
    with torch.no_grad():
        nn.functional.linear(torch.ones(2, 4), *kept)


def clipped_list_of_before(ctx: RankContext) -> None:
    model = linears()
    parameters = list(model.parameters())
    shard(model)
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def graph_of_before(ctx: RankContext) -> None:
    model = linears()
    loss = model(torch.ones(2, 4)).sum()
    shard(model)
    loss.backward()


REFUSED: list[tuple[Callable[[RankContext], None], type[MiCSError], str]] = [
    (tied_by_data, ConfigError, "`1.weight` and `2.weight` are two parameters over one memory.*Tie them"),
    (tied_by_data_in_part, ConfigError, "`1.weight` and `2.weight` are two parameters over one memory"),
    (buffer_of_a_parameter, ConfigError, "`1.first` is a view of the parameter `1.weight`.*in the forward"),
    (attribute_of_a_parameter, ConfigError, "`1.transposed` is a view of the parameter `1.weight`"),
    (rows_in_lists, ConfigError, "`1.parts` is a view of the parameter `1.weight`"),
    (loss_of_before, LifecycleError, "plain parameter `1.weight` was used after `shard.*Read the parameter from"),
    (read_without_gradients, LifecycleError, "plain parameter `1.weight` was used"),
    (clipped_list_of_before, LifecycleError, "plain parameter `0.weight` was used"),
    (graph_of_before, LifecycleError, "plain parameter `2.bias` was used"),
]


@pytest.mark.one_job
@pytest.mark.parametrize(("job", "error", "message"), REFUSED, ids=[job.__name__ for job, _, _ in REFUSED])
def test_every_rank_refuses(
    ranks: RankPool, job: Callable[[RankContext], None], error: type[MiCSError], message: str
) -> None:
    assert_refused(ranks(2, refusal, job, timeout_s=15.0), error, f"(?s){message}")


def shard_columns_and_frozen_views(ctx: RankContext) -> list[float]:
    model = linears()
    columns = torch.arange(32.0).view(4, 8)
    model[0].weight.data, model[1].weight.data = columns[:, :4], columns[:, 4:]
    model[2].weight.requires_grad_(False)
    model[2].register_buffer("first", model[2].weight.data[0])
    shard(model)
    return [whole(layer.weight).sum().item() for layer in model[:2]]


def test_interleaved_parameters_and_views_of_frozen_ones_are_allowed(ranks: RankPool) -> None:
    columns = torch.arange(32.0).view(4, 8)
    assert ranks(2, shard_columns_and_frozen_views) == [[columns[:, :4].sum().item(), columns[:, 4:].sum().item()]] * 2


def metadata_of_a_replaced_parameter(ctx: RankContext) -> tuple[object, ...]:
    model = linears()
    weight = model[1].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model).adopt(optimizer)
    is_adopted = optimizer.param_groups[0]["params"][2] is model[1].weight
    return weight.shape, weight.requires_grad, weight.dtype, len(weight), repr(weight), is_adopted


def test_replaced_parameters_have_metadata_and_are_adopted(ranks: RankPool) -> None:
    text = "ReplacedParameter('1.weight', shape=(4, 4))"
    assert ranks(2, metadata_of_a_replaced_parameter) == [(torch.Size([4, 4]), True, torch.float32, 4, text, True)] * 2


def change_containers_after_shard(ctx: RankContext) -> Tensor:
    model = listing_model()
    shard(model, "zero3", units=[Listing])
    other = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    model[0].plain[0] = other
    model[1].plain[:] = [model[1].plain[1], model[1].plain[0]]
    model[1].plain.reverse()
    del model.everything[:]
    return model(batch(0, 0)).detach()


def test_scripts_may_change_the_containers(ranks: RankPool) -> None:
    plain = listing_model()
    plain[0].plain[0] = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for output in ranks(2, change_containers_after_shard):
        torch.testing.assert_close(output, plain(batch(0, 0)).detach())


def shard_attributes_that_are_computed(ctx: RankContext) -> list[Tensor]:
    differences = []
    for normalized in (nn.utils.spectral_norm, nn.utils.weight_norm):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                models.append(nn.Sequential(normalized(linears()[0])))
        model, plain = models
        model[0].seen = [torch.ones(2, 4), torch.ones(2, 4).requires_grad_()]  # of no parameter
        shard(model, "zero3")
        differences.append((model(torch.ones(2, 4)) - plain(torch.ones(2, 4))).detach().abs().max())
    return differences


def test_attributes_that_a_hook_computes_are_allowed(ranks: RankPool) -> None:
    for differences in ranks(2, shard_attributes_that_are_computed):
        assert max(differences) < 1e-6
