"""A parameter that is kept and read when its memory holds other values is refused, in training and in evaluation.

Units take turns in slots. Each way to keep a parameter is a layer of its own here; the model has more of them than
slots, so the first ones have lost theirs by the time they are read.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint

from mics_strategy import ShardConfig, Sharded, shard
from mics_strategy.errors import ConfigError
from tests import models
from tests.engine.training import Run, assert_identical, train_each
from tests.ranks import RankContext, RankPool
from tests.seeds import seed_generators

WIDTH, DEPTH = 8, 5
REFUSAL = "read while its unit was not unsharded"
sharded_presets = pytest.mark.parametrize("preset", ["mics", "zero3"])
Kept = list[Any]


class Linear(torch.autograd.Function):
    """A kernel that keeps its weight as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight.detach()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ ctx.weight, grads[0].t() @ ctx.x


class Layer(nn.Module):
    """A layer that lets `keep` see its input and its weight."""

    def __init__(self, keep: Callable[[Kept, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.keep = keep

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        x = x + self.linear(x).tanh()
        self.keep(kept, x, self.weight)
        return x


class Model(nn.Module):
    """Runs the layers, then `use` of what they have kept."""

    def __init__(
        self,
        keep: Callable[[Kept, Tensor, Tensor], object],
        use: Callable[[Kept, Tensor], Tensor] | None = None,
        depth: int = DEPTH,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(keep) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.use = use
        self.kept: Kept = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        for layer in self.layers:
            x = layer(x, self.kept)
        return self.head(x if self.use is None else self.use(self.kept, x))


def build(model: Callable[[], nn.Module], **fields: Any) -> tuple[nn.Module, Sharded]:
    seed_generators()
    built = model().double()
    config = ShardConfig.preset(fields.pop("preset", "zero3"), **fields)
    return built, shard(built, config, units=[Layer])


def batch() -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def message(run: Callable[[], object]) -> str:
    """The error of a run with its notes; empty where it raises none."""
    try:
        run()
    except RuntimeError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def applied(kept: Kept, x: Tensor) -> Tensor:
    for function in kept:
        x = x + function(x)
    return x


def backward(model: nn.Module) -> None:
    """Of the kept losses and the model's own."""
    output = model(batch())
    torch.stack([output.square().mean(), *model.kept]).sum().backward()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch())


def saved_elsewhere(model: nn.Module) -> None:
    """As activation offloading saves tensors: parameters stay where they are."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        output = model(batch())
    (output.square().mean() + torch.stack(model.kept).sum()).backward()


def frozen_layers(model: nn.Module) -> None:
    model.layers[1:].requires_grad_(False)
    saved_elsewhere(model)


def closure(kept: Kept, x: Tensor, weight: Tensor) -> None:
    kept.append(lambda y: (y @ weight).tanh())


def first(kept: Kept, x: Tensor, weight: Tensor) -> None:
    kept.append(kept[0] if kept else weight)
    x + x @ kept[0]


def auxiliary(kept: Kept, x: Tensor, weight: Tensor) -> None:
    kept.append((x @ weight).square().mean())


def kernel(kept: Kept, x: Tensor, weight: Tensor) -> None:
    kept.append(Linear.apply(x, weight).square().mean())


def training(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "closure": (lambda: Model(closure, applied), training),
    "closure in evaluation": (lambda: Model(closure, applied), evaluate),
    "cache": (lambda: Model(first), training),
    "cache in evaluation": (lambda: Model(first), evaluate),
    "saved-tensor hooks": (lambda: Model(auxiliary), saved_elsewhere),
    "saved-tensor hooks, frozen": (lambda: Model(auxiliary), frozen_layers),
    "attribute of ctx": (lambda: Model(kernel), backward),
}


def read_late(ctx: RankContext, way: str, preset: str) -> str:
    """What a read at the wrong time raises."""
    model, _ = build(WAYS[way][0], preset=preset)
    return message(lambda: WAYS[way][1](model))


@pytest.mark.wide
@pytest.mark.one_job
@sharded_presets
@pytest.mark.parametrize("way", WAYS)
def test_a_late_read_is_refused(ranks: RankPool, way: str, preset: str) -> None:
    for error in ranks(2, read_late, way, preset):
        assert REFUSAL in error
        assert "params='replicate'" in error


def train_on_kept(ctx: RankContext, preset: str) -> float:
    """Largest difference from the plain model of a gradient, where closures read parameters after their layers."""
    model, _ = build(lambda: Model(closure, applied), preset=preset)
    seed_generators()
    reference = Model(closure, applied).double()
    for each in (model, reference):
        training(each)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - r.grad).abs().max()) for p, r in pairs)


@pytest.mark.parametrize("preset", ["ddp", "zero1"])
def test_whole_parameters_may_be_read_late(ranks: RankPool, preset: str) -> None:
    assert max(ranks(2, train_on_kept, preset)) < 1e-12


def keep_and_not_read(ctx: RankContext) -> list[int]:
    """Parameters, views and aliases are kept, also in cycles, over several steps and evaluations."""

    def keep(kept: Kept, x: Tensor, weight: Tensor) -> None:
        box: Kept = [weight, weight.detach(), weight.t()[1:], weight.data, x @ weight]
        box.append(box)
        kept.append(box)
        everything.append(box)

    everything: Kept = []
    model, _ = build(lambda: Model(keep))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for grad in (torch.enable_grad, torch.no_grad) * 2:
        with grad():
            output = model(batch()).square().mean()
        if output.requires_grad:
            output.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [len(everything)]


def test_parameters_that_are_kept_and_not_read_are_no_error(ranks: RankPool) -> None:
    assert ranks(2, keep_and_not_read) == [[4 * DEPTH]] * 2


def read_around_a_step(ctx: RankContext, preset: str) -> tuple[str, str, bool]:
    """Reads of an alias whose slot no other unit takes: before a step, after it, and after the next forward."""
    model, _ = build(lambda: Model(lambda kept, x, weight: kept.append(weight.detach()), depth=1), preset=preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training(model)
    alias = model.kept[0]
    before = message(alias.clone)
    optimizer.step()
    after = message(alias.clone)
    model(batch())
    return before, after, torch.equal(alias, model.layers[0].weight.full_tensor())


@pytest.mark.parametrize("preset", ["zero3", "zero1"])
def test_values_from_before_a_step_are_refused_until_the_next_forward(ranks: RankPool, preset: str) -> None:
    for before, after, current in ranks(2, read_around_a_step, preset):
        assert before == ""
        assert "Cannot access data" in str(after)
        assert current is True


def read_through_numpy(ctx: RankContext, check: str, way: str) -> bool:
    """Whether a NumPy array of a weight, which torch cannot see, holds NaN when the values are no longer valid."""
    model, _ = build(lambda: Model(lambda kept, x, weight: kept.append(weight.detach().numpy())), check=check)
    model.layers[1:].requires_grad_(way != "frozen")
    if way == "evaluation":
        evaluate(model)
    else:
        training(model)
    if way == "step":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    stale = model.kept[0 if way in ("step", "evaluation") else -1]
    return bool(torch.from_numpy(stale).isnan().all())


@pytest.mark.parametrize("way", ["training", "frozen", "evaluation", "step"])
def test_poison_shows_what_torch_cannot_see(ranks: RankPool, way: str) -> None:
    assert ranks(2, read_through_numpy, "poison", way) == [True, True]
    assert ranks(2, read_through_numpy, "none", way) == [False, False]


def _runs(check: str) -> Iterable[Run]:
    for fields in PRODUCT.values():
        yield Run(case=fields.get("case", models.mlp), config=_config(fields, check), steps=2, accumulation=2)


def _config(fields: dict[str, Any], check: str) -> ShardConfig:
    rest = {name: value for name, value in fields.items() if name not in ("case", "preset")}
    return ShardConfig.preset(fields["preset"], check=check, hierarchical=True, **rest)


def recomputed() -> models.Case:
    """Every unit is recomputed."""
    case = models.mlp()

    def build() -> nn.Module:
        model = case.build()
        for module in model.modules():
            if isinstance(module, models.Residual):
                checkpoint(module)
        return model

    return replace(case, build=build)


PRODUCT: dict[str, dict[str, Any]] = {
    "zero1": {"preset": "zero1"},
    "mics": {"preset": "mics", "case": models.frozen},
    "zero2": {"preset": "zero2", "overlap": "none"},
    "zero3": {"preset": "zero3", "prefetch": 3},
    "bf16": {"preset": "zero3", "param_dtype": "bfloat16"},
    "zeropp": {"preset": "zeropp", "partition_size": 2},
    "paro-nig": {"preset": "paro-nig", "overlap": "none", "case": models.tied},
    "recomputed": {"preset": "zero3", "case": recomputed},
    "scalar": {"preset": "zero3", "case": models.scalar},
}


def test_a_right_training_has_the_same_bits_with_poison(ranks: RankPool) -> None:
    with_poison, without = (ranks(2, train_each, list(_runs(check))) for check in ("poison", "none"))
    for poisoned, usual in zip(with_poison, without, strict=True):
        for name, one, other in zip(PRODUCT, poisoned, usual, strict=True):
            assert one.losses == other.losses, name
            assert_identical(one.parameters, other.parameters)


def test_another_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="check='nan'"):
        ShardConfig(check="nan")
