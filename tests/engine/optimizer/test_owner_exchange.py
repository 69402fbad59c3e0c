"""Optimizers that need whole tensors step on their owners as on the plain model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import Prodigy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from mics_strategy import Codec, ShardConfig, Topology, shard
from mics_strategy.errors import ConfigError
from tests import models
from tests.engine.chains import REAL, chains
from tests.engine.counting import CountC10d, planned_kinds
from tests.engine.optimizer.not_elementwise import Clipping, Lamb
from tests.engine.training import (
    Run,
    Training,
    assert_identical,
    assert_same,
    distance,
    start,
    unused_alike,
)
from tests.ranks import RankContext, RankPool, assert_refused, refusal
from tests.reference import train_reference

Make = Callable[[list[nn.Parameter]], Optimizer]
adafactor = partial(Adafactor, lr=0.1, eps=(1e-3, 1e-3))  # as for the others, an eps that drowns rounding
PRESETS = [p for p in ShardConfig.PRESETS if p.startswith("paro-") and p != "paro-nnn"]
THIRDS = [tuple(PRESETS[i::3]) for i in range(3)]


class MuonAndAdam(Muon):
    """Muon for matrices and AdamW for the rest, in one optimizer."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__([p for p in params if p.dim() == 2], lr=0.05)
        self.rest = AdamW([p for p in params if p.dim() != 2], lr=0.01, eps=1e-3)

    def step(self, closure: Any = None) -> Any:
        self.rest.step()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.rest.zero_grad(set_to_none)
        super().zero_grad(set_to_none)


def layout(preset: str = "mics", **options: Any) -> ShardConfig:
    return ShardConfig.preset(preset, optimizer_layout="tensors", update_locality="tensor", **options)


def begin(ctx: RankContext, run: Run, make: Make) -> Training:
    training = start(ctx, run)
    training.optimizer = make([p for p in training.model.parameters() if p.requires_grad])
    return training


def train_with(ctx: RankContext, runs: list[Run], make: Make) -> list[dict[str, Tensor]]:
    found = []
    for run in runs:
        training = begin(ctx, run, make)
        for step in range(run.steps):
            training.step(step)
        found.append(training.parameters())
    return found


def plain_with(run: Run, world_size: int, make: Make) -> dict[str, Tensor]:
    case = run.case()
    batches = case.batches(run.steps, run.accumulation, world_size)
    return train_reference(case.build(), batches, make, loss_fn=case.loss, missing_grads_are_zero=False).parameters


@pytest.mark.parametrize(
    "case", [*(case for case in models.ALL if case is not models.unused), unused_alike], ids=lambda case: case.__name__
)
@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-nng", "paro-iig"])
def test_every_model_trains_as_plain(ranks: RankPool, preset: str, case: Callable[[], models.Case]) -> None:
    run = Run(case=case, config=layout(preset), steps=4)
    expected = plain_with(run, 4, adafactor)
    for (found,) in ranks(4, train_with, [run], adafactor, ranks_per_node=2):
        assert_same(found, expected, 1e-5)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("presets", THIRDS, ids=" ".join)
def test_muon_steps_as_in_one_process(ranks: RankPool, presets: tuple[str, ...], accumulation: int) -> None:
    """To the tolerance of its own arithmetic, which is bf16: see the exact test below."""
    runs = [Run(case=models.transformer, config=layout(p), accumulation=accumulation) for p in presets]
    expected = plain_with(runs[0], 4, MuonAndAdam)
    for of_rank in ranks(4, train_with, runs, MuonAndAdam, ranks_per_node=2):
        for found in of_rank:
            assert_same(found, expected, 2e-3)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zeropp-hpz", "paro-nig"])
def test_muon_with_codecs_stays_near_and_the_same_on_all_ranks(ranks: RankPool, preset: str) -> None:
    codec = Codec(bits=8, block_size=32)
    runs = [
        Run(case=models.transformer, config=layout(preset, weight_codec=codec, grad_codec=codec, codec_links=links))
        for links in ("slow", "all")
    ]
    expected = plain_with(runs[0], 4, MuonAndAdam)
    start = dict(runs[0].case().build().named_parameters())
    moved = distance(start, expected)
    of_ranks = ranks(4, train_with, runs, MuonAndAdam, ranks_per_node=2)
    for found, *others in zip(*of_ranks, strict=True):
        assert 1e-5 < distance(found, expected) < 0.25 * moved
        for other in others:
            assert_identical(other, found)


class Product(nn.Linear):
    """The gradient of its weight is what it is given."""

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


class Exact(nn.Module):
    """Its gradients are small whole numbers, so no order of additions rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Product(5 + i, 7 + 2 * i, bias=False) for i in range(3)])

    def forward(self, factors: list[Tensor]) -> Tensor:
        return sum(layer(factor) for layer, factor in zip(self.layers, factors, strict=True))


def exact() -> models.Case:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return Exact()

    def batch(step: int, micro: int, rank: int) -> models.Batch:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        return {"x": [torch.randint(-8, 9, (7 + 2 * i, 5 + i), generator=generator).float() for i in range(3)]}

    return models.Case(build=build, batch=batch, loss=lambda model, batch: model(batch["x"]), units=(Product,))


@pytest.mark.parametrize("make", [partial(Muon, lr=0.05), adafactor, Lamb], ids=["Muon", "Adafactor", "Lamb"])
@pytest.mark.parametrize("presets", THIRDS, ids=" ".join)
def test_equal_gradients_give_bitwise_equal_training(ranks: RankPool, presets: tuple[str, ...], make: Make) -> None:
    runs = [Run(case=exact, config=layout(preset), steps=4, accumulation=2) for preset in presets]
    expected = plain_with(runs[0], 4, make)
    for of_rank in ranks(4, train_with, runs, make, ranks_per_node=2):
        for found in of_rank:
            assert_identical(found, expected)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(("nodes", "per_node"), REAL)
def test_every_chain_trains_as_plain(ranks: RankPool, nodes: int, per_node: int) -> None:
    configs = [config.replace(optimizer_layout="tensors") for config in chains(nodes, per_node)]
    runs = [Run(case=models.scalar, config=config) for config in configs]
    expected = plain_with(runs[0], nodes * per_node, adafactor)
    for of_rank in ranks(nodes * per_node, train_with, runs, adafactor, ranks_per_node=per_node):
        for config, found in zip(configs, of_rank, strict=True):
            assert_same(found, expected, 1e-5), config


@pytest.mark.parametrize(
    "options",
    [
        {"param_dtype": "bfloat16"},
        {"reduce_dtype": "bfloat16"},
        {"overlap": "none"},
        {"second_hop": "micro_step"},
        {"secondary_params": 2, "params": "world", "grads": "world", "optimizer": "world"},
    ],
    ids=str,
)
def test_layout_goes_with_every_option(ranks: RankPool, options: dict[str, Any]) -> None:
    """As the same options do with whole optimizer states, which need no exchange."""
    runs = [
        Run(case=models.transformer, config=layout("paro-nii", **options)),
        Run(case=models.transformer, config=ShardConfig.preset("ddp", **_dtypes(options))),
    ]
    for found, expected in ranks(4, train_with, runs, adafactor, ranks_per_node=2):
        assert_same(found, expected, 2e-2 if _dtypes(options) else 1e-5)


def _dtypes(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.endswith("dtype")}


def count(ctx: RankContext, run: Run, make: Make) -> tuple[Any, ...]:
    """Issued, planned and reported collectives of the third step.

    Also the exchanged bytes by the owner assignment.
    """
    training = begin(ctx, run, make)
    for step in range(3):
        with CountC10d() as counted:
            training.step(step)
    return counted.kinds, planned_kinds(training.sharded.plan), training.sharded.traffic()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("make", [adafactor, MuonAndAdam], ids=["Adafactor", "MuonAndAdam"])
def test_a_step_sends_what_was_planned(ranks: RankPool, make: Make, preset: str) -> None:
    run = Run(case=models.transformer, config=layout(preset), accumulation=2)
    for issued, planned, rows in ranks(4, count, run, make, ranks_per_node=2):
        assert issued == planned
        assert any(row.collective == "all_to_all" for row in rows)
        for row in rows:
            assert (row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes)


def exchanged_bytes(ctx: RankContext) -> tuple[int, int]:
    """That this rank sent, and that the whole model's parameters take."""
    training = begin(ctx, Run(case=exact, config=layout("zero3")), partial(Muon, lr=0.05))
    training.step(0)
    row = next(row for row in training.sharded.traffic() if row.collective == "all_to_all")
    return row.sent_bytes, sum(p.numel() * 4 for p in training.model.parameters())


def test_three_model_sizes_are_exchanged_less_the_local_rows(ranks: RankPool) -> None:
    """By all ranks together: values and gradients one way, values the other.

    A rank keeps its rows of its tensors.
    """
    found = ranks(4, exchanged_bytes)
    model_bytes = found[0][1]
    assert 3 * model_bytes * 0.6 < sum(sent for sent, _ in found) < 3 * model_bytes


def write_between_steps(ctx: RankContext, run: Run, make: Make) -> dict[str, Tensor]:
    """Rank 1 alone writes into its rows; all ranks write whole parameters.

    Gradients are set by hand.
    """
    training = begin(ctx, run, make)
    training.step(0)
    weight = training.model.layers[0].weight
    with torch.no_grad():
        if ctx.rank == 1:
            weight.to_local().fill_(0.5)
        training.model.layers[1].weight.mul_(2)
    training.backward(1)
    training.model.layers[2].weight.grad = None
    training.optimizer.step()
    return training.parameters()


def test_writes_between_steps_are_used(ranks: RankPool) -> None:
    run = Run(case=exact, config=layout("zero3"))
    case, make = exact(), partial(Muon, lr=0.05)
    model = case.build()
    optimizer = make(list(model.parameters()))
    for step in range(2):
        for rank in range(4):
            (case.loss(model, case.batch(step, 0, rank)) / 4).backward()
        if step:
            model.layers[2].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            with torch.no_grad():
                model.layers[0].weight[2:4].fill_(0.5)
                model.layers[1].weight.mul_(2)
    assert_identical(ranks(4, write_between_steps, run, make)[0], {n: p.detach() for n, p in model.named_parameters()})


def step_with_closure(ctx: RankContext, run: Run, make: Make) -> dict[str, Tensor]:
    training = begin(ctx, run, make)
    steps = iter(range(run.steps))

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(next(steps))
        loss.backward()
        return loss

    for _ in range(run.steps):
        training.optimizer.step(closure)
    return training.parameters()


def test_closure_runs_on_rows(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=layout())
    assert_same(ranks(2, step_with_closure, run, adafactor)[0], plain_with(run, 2, adafactor), 1e-5)


class Failing(Lamb):
    """Raises when told to, after it has written."""

    fails = False

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails:
            raise ValueError("on purpose")


def fail_once(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    """The second step raises, its gradients are those of the third step, too."""
    training = begin(ctx, run, Failing)
    training.step(0)
    training.optimizer.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        training.step(1)
    training.optimizer.fails = False
    training.optimizer.step()
    assert all(isinstance(p, DTensor) for p in training.optimizer.param_groups[0]["params"])
    return training.parameters()


def test_updates_before_an_error_in_a_step_count_as_in_torch(ranks: RankPool) -> None:
    run = Run(case=exact, config=layout())
    case = exact()
    model = case.build()
    optimizer = Lamb(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (case.loss(model, case.batch(step, 0, rank)) / 2).backward()
        optimizer.step()
    optimizer.step()
    assert_identical(ranks(2, fail_once, run)[0], {n: p.detach() for n, p in model.named_parameters()})


class Decaying(Lamb):
    """Decays its tensors before and after the step of its parent.

    The parent's step has its own hooks.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(mine, 0.75)
        super().step()
        torch._foreach_clamp_max_(mine, 0.5)


def step_in_steps(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], bool]:
    Lamb([nn.Parameter(torch.ones(1))])  # from now on the steps of the parent class have hooks
    training = begin(ctx, run, Decaying)
    for step in range(run.steps):
        training.step(step)
    rows = training.sharded.traffic()
    return training.parameters(), all(row.sent_bytes == row.planned_bytes for row in rows)


def test_a_step_inside_a_step_of_the_same_optimizer_is_one_step(ranks: RankPool) -> None:
    run = Run(case=exact, config=layout())
    for found, sent_as_planned in ranks(2, step_in_steps, run):
        assert_identical(found, plain_with(run, 2, Decaying))
        assert sent_as_planned


def add_later(ctx: RankContext, run: Run, make: Make) -> dict[str, Tensor]:
    training = start(ctx, run)
    parameters = list(training.model.parameters())
    optimizer = training.optimizer = make(parameters[:3])
    for step in range(run.steps):
        training.step(step)
        if not step:
            optimizer.add_param_group({"params": parameters[3:]})
    return training.parameters()


def plain_add_later(run: Run, world_size: int, make: Make) -> dict[str, Tensor]:
    case = run.case()
    model = case.build()
    parameters = list(model.parameters())
    optimizer = make(parameters[:3])
    for step in range(run.steps):
        for rank in range(world_size):
            (case.loss(model, case.batch(step, 0, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            optimizer.add_param_group({"params": parameters[3:]})
    return {name: p.detach() for name, p in model.named_parameters()}


def test_parameters_added_later_get_owners(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=layout(), steps=4)
    found = ranks(2, add_later, run, adafactor)
    assert_same(found[0], plain_add_later(run, 2, adafactor), 1e-5)


def exchange_parameters(ctx: RankContext, run: Run, make: Make) -> dict[str, Tensor]:
    """Another parameter replaces the first of its group."""
    training = start(ctx, run)
    first, second, *_ = training.model.parameters()
    optimizer = training.optimizer = make([first])
    training.step(0)
    training.sharded.model.zero_grad()
    optimizer.param_groups[0]["params"] = [second]
    training.step(1)
    return training.parameters()


def plain_exchange_parameters(run: Run, world_size: int, make: Make) -> dict[str, Tensor]:
    case = run.case()
    model = case.build()
    first, second, *_ = model.parameters()
    optimizer = make([first])
    for step, parameter in enumerate((first, second)):
        optimizer.param_groups[0]["params"] = [parameter]
        model.zero_grad()
        for rank in range(world_size):
            (case.loss(model, case.batch(step, 0, rank)) / world_size).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_parameter_that_replaces_another_gets_an_owner(ranks: RankPool) -> None:
    run = Run(case=exact, config=layout("zero3"))
    assert_identical(ranks(2, exchange_parameters, run, Lamb)[0], plain_exchange_parameters(run, 2, Lamb))


def step_once(ctx: RankContext, run: Run, make: Make) -> None:
    begin(ctx, run, make).step(0)


def adopt_only(ctx: RankContext, run: Run, make: Make) -> None:
    case = run.case()
    model = case.build()
    optimizer = make(list(model.parameters()))
    shard(model, run.config, units=case.units).adopt(optimizer)


@pytest.mark.parametrize("job", [step_once, adopt_only], ids=lambda job: job.__name__)
@pytest.mark.parametrize(
    ("make", "optimizer_layout", "message"),
    [
        (Adafactor, "rows", "Adafactor needs whole tensors.*optimizer_layout='tensors'.*'ddp'"),
        (Lamb, "rows", "not known.*not_elementwise.Lamb` depends.*update_locality='element'.*'ddp'"),
        (Lamb, "tensors", "not known.*not_elementwise.Lamb` depends.*update_locality='tensor'.*'ddp'"),
        (Prodigy, "tensors", "Prodigy couples parameters.*depends on other tensors.*'ddp'"),
        (torch.optim.LBFGS, "tensors", "LBFGS needs whole tensors of all parameters together"),
    ],
    ids=["whole-on-rows", "unknown-on-rows", "unknown-on-tensors", "all-on-tensors", "LBFGS"],
)
def test_an_optimizer_with_too_wide_locality_is_refused(
    ranks: RankPool, job: Any, make: Make, optimizer_layout: str, message: str
) -> None:
    run = Run(case=models.mlp, config=ShardConfig(optimizer_layout=optimizer_layout))
    assert_refused(ranks(2, refusal, job, run, make), ConfigError, message)


@pytest.mark.parametrize("make", [Lamb, Clipping])
def test_any_locality_is_allowed_if_states_are_not_sharded(ranks: RankPool, make: Make) -> None:
    runs = [Run(case=models.mlp, config=layout("ddp")), Run(case=models.mlp, config=ShardConfig.preset("ddp"))]
    for of_rank in ranks(2, train_with, runs, make):
        for found in of_rank:
            assert_same(found, plain_with(runs[0], 2, make), 1e-5)


def test_elementwise_optimizers_step_on_rows(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=layout())
    _, _, rows = ranks(2, count, run, partial(AdamW, lr=0.01, eps=1e-3))[0]
    assert all(row.collective != "all_to_all" for row in rows)


def test_one_rank_holds_all_states(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=layout(topology=Topology(ranks_per_node=1)))
    [[found]] = ranks(1, train_with, [run], MuonAndAdam)
    assert_same(found, plain_with(run, 1, MuonAndAdam), 1e-5)
