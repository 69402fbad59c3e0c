"""Scenarios that FSDP2 is tested with, and the three ways to play one.

A scenario is a model and a *body*, a generator that runs forwards and backwards and yields where gradients are looked
at (`LOOK`) or an optimizer steps (`STEP`). `sharded` plays it with `shard()`, `fully_sharded` with FSDP2, and `plain`
in one process on one copy of the model for each rank, whose gradients are averaged at each yield.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mics_strategy import ShardConfig, Sharded, shard
from tests.engine.training import OPTIMIZERS, wholes
from tests.rank_report import RankContext

STEPS = 3
LOOK, STEP = "look", "step"
PLACEMENTS: dict[str, ShardConfig] = {  # by the argument `reshard_after_forward` of FSDP2 that means the same
    "reshard": ShardConfig.preset("zero3"),
    "keep": ShardConfig.preset("zero2"),
    "part": ShardConfig.preset("zeropp-hpz"),
    "hybrid": ShardConfig.preset("mics"),
}


@dataclass(slots=True)
class Player:
    """A model of one rank, and what its body reports.

    Attributes:
        model: Sharded or plain model.
        rank: Rank whose batches it gets.
        batch: Inputs by step, micro-step and rank.
        losses: Losses of the backwards so far.
        handle: Handle of a model sharded by `shard()`.
        scaler: Scaler of losses; None where they are not scaled.
    """

    model: Any
    rank: int
    batch: Callable[[int, int, int], Tensor]
    losses: list[float] = field(default_factory=list)
    handle: Sharded | None = None
    scaler: GradScaler | None = None

    def inputs(self, step: int, micro: int = 0) -> Tensor:
        return self.batch(step, micro, self.rank)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a method of a module count as its forward."""
        if self.handle is not None:
            self.handle.register_forward_method(module, name)
        else:
            register_fsdp_forward_method(module, name)  # does nothing for a plain module

    def backward(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()


Body = Callable[[Player], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Normal inputs of some shape."""

    shape: tuple[int, ...]

    def __call__(self, step: int, micro: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a language model."""

    vocabulary: int
    shape: tuple[int, ...] = (2, 6)

    def __call__(self, step: int, micro: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
        return torch.randint(self.vocabulary, self.shape, generator=generator)


def each_step(player: Player) -> Iterator[str]:
    """The body of most scenarios: a forward and a backward in every step."""
    for step in range(STEPS):
        player.backward(player.model(player.inputs(step)).square().mean())
        yield STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model and what is done with it.

    Attributes:
        build: Returns the plain model.
        inputs: Batches.
        body: Forwards, backwards and yields of the whole training.
        units: Units, as `shard` takes them: classes in a tuple, or a predicate.
        optimizer: Key of `OPTIMIZERS`.
        options: Fields of `ShardConfig`, as pairs.
        clip: Largest gradient norm and its order; None for no clipping.
        scaled: Whether losses are scaled.
        dtype: Dtype of the model.
        tolerance: Relative and absolute.
        ranks: Number of ranks; four are two nodes of two.
        placements: Keys of `PLACEMENTS` that the scenario is about.
        fsdp2_raises: What FSDP2 raises in this scenario; empty where it trains as plain.
        is_slow: Whether it is in the slow tier alone.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, int], Tensor]
    body: Body = each_step
    units: Any = (nn.Linear,)
    optimizer: str = "adam"
    options: tuple[tuple[str, Any], ...] = ()
    clip: tuple[float, float] | None = None
    scaled: bool = False
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    ranks: int = 2
    placements: tuple[str, ...] = ("reshard", "keep")
    fsdp2_raises: str = ""
    is_slow: bool = False

    def is_unit(self, module: nn.Module) -> bool:
        """Whether a module forms a unit by the rule."""
        return self.units(module) if callable(self.units) else isinstance(module, self.units)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of forward and backward."""
        name = dict(self.options).get("param_dtype")
        return self.dtype if name is None else getattr(torch, name)

    def model(self) -> nn.Module:
        """The plain model, the same values in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(42)
            return self.build().to(self.dtype)

    def batch(self, step: int, micro: int, rank: int) -> Tensor:
        """Inputs in the dtype of the model."""
        inputs = self.inputs(step, micro, rank)
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def player(self, model: nn.Module, rank: int, handle: Sharded | None = None) -> Player:
        """What the body of one rank gets."""
        scaler = GradScaler("cpu", init_scale=2.0**10) if self.scaled else None
        return Player(model, rank, self.batch, handle=handle, scaler=scaler)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw at one yield.

    Attributes:
        losses: Losses of the backwards so far.
        norm: Gradient norm before clipping; 0 without clipping.
        scale: Scale of the losses; 1 where they are not scaled.
        grads: Whole gradients by name, before clipping.
        parameters: Whole parameters by name, after the optimizer's step.
    """

    losses: tuple[float, ...]
    norm: float
    scale: float
    grads: dict[str, Tensor]
    parameters: dict[str, Tensor]


@dataclass(slots=True)
class _Copy:
    """One player, its optimizer, and the parameters that the optimizer steps."""

    player: Player
    masters: dict[str, nn.Parameter]
    optimizer: Optimizer
    compute_params: dict[str, nn.Parameter]

    def load(self) -> None:
        """Copy the masters into what is computed with."""
        with torch.no_grad():
            for name, parameter in self.compute_params.items():
                parameter.copy_(self.masters[name])


def sharded(ctx: RankContext, scenario: Scenario, placement: str) -> list[Seen]:
    """Job: the scenario with `shard()`."""
    model = scenario.model()
    handle = shard(model, PLACEMENTS[placement].replace(**dict(scenario.options)), units=scenario.units)
    return _follow([_copy_of(scenario.player(model, ctx.rank, handle), scenario)], scenario)[0]


def fully_sharded(ctx: RankContext, scenario: Scenario, placement: str) -> list[Seen]:
    """Job: the scenario with FSDP2 on the same units."""
    model = scenario.model()
    policy = MixedPrecisionPolicy(param_dtype=scenario.compute_dtype, reduce_dtype=scenario.dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if placement == "hybrid" else None
    options: dict[str, Any] = {"reshard_after_forward": {"keep": False, "part": 2}.get(placement, True), "mesh": mesh}
    for module in reversed([*model.modules()][1:]):
        if scenario.is_unit(module):
            fully_shard(module, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    return _follow([_copy_of(scenario.player(model, ctx.rank), scenario)], scenario)[0]


@lru_cache(maxsize=512)
def plain(scenario: Scenario) -> list[list[Seen]]:
    """What each rank sees in one plain process: [rank][yield]."""
    return _follow([_plain_copy(scenario, rank) for rank in range(scenario.ranks)], scenario)


def _copy_of(player: Player, scenario: Scenario) -> _Copy:
    masters = {name: p for name, p in player.model.named_parameters() if p.requires_grad}
    return _Copy(player, masters, OPTIMIZERS[scenario.optimizer](masters.values()), {})


def _plain_copy(scenario: Scenario, rank: int) -> _Copy:
    """A plain model; for mixed precision one in the dtype of compute, whose gradients move to masters."""
    player = scenario.player(scenario.model(), rank)
    if scenario.compute_dtype == scenario.dtype:
        return _copy_of(player, scenario)
    copy = _copy_of(player, scenario)
    player.model = scenario.model()
    _cast(player.model, scenario)
    copy.compute_params = dict(player.model.named_parameters())

    for name, parameter in copy.compute_params.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_Move(copy.masters[name]))
    copy.load()
    return copy


@dataclass(frozen=True, slots=True)
class _Move:
    """Hook that adds a gradient to that of a master."""

    master: nn.Parameter

    def __call__(self, parameter: Tensor) -> None:
        grad = parameter.grad.to(self.master.dtype)
        self.master.grad = grad if self.master.grad is None else self.master.grad + grad
        parameter.grad = None


def _cast(model: nn.Module, scenario: Scenario) -> None:
    """Parameters in the dtype of compute, and inputs of units cast to it."""
    dtype = scenario.compute_dtype
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)

    def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))

    for module in model.modules():
        if module is model or scenario.is_unit(module):
            module.register_forward_pre_hook(cast, with_kwargs=True)


def _average(copies: Sequence[_Copy]) -> None:
    if len(copies) == 1:
        return
    for parameters in zip(*(copy.masters.values() for copy in copies), strict=True):
        grads = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters if grads else ():
            parameter.grad = sum(grads) / len(copies)


def _follow(copies: Sequence[_Copy], scenario: Scenario) -> list[list[Seen]]:
    """Run the bodies of all copies in lockstep; returns [copy][yield]."""
    seen: list[list[Seen]] = [[] for _ in copies]
    bodies = [scenario.body(copy.player) for copy in copies]
    for number, points in enumerate(_in_lockstep(bodies)):
        _average(copies)
        grads = wholes({name: p.grad for name, p in copies[0].masters.items() if p.grad is not None})
        norms = [_step(copy, scenario, number) if points[0] == STEP else 0.0 for copy in copies]
        values = wholes(copies[0].masters)
        for copy, norm, of_copy in zip(copies, norms, seen, strict=True):
            scale = 1.0 if copy.player.scaler is None else copy.player.scaler.get_scale()
            of_copy.append(Seen(tuple(copy.player.losses), norm, scale, grads, values))
    return seen


def _in_lockstep(bodies: Sequence[Iterator[str]]) -> Iterator[tuple[str, ...]]:
    """Yields of all bodies, without warnings of Dynamo and FSDP2 that say nothing here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        yield from zip(*bodies, strict=True)


def _step(copy: _Copy, scenario: Scenario, number: int) -> float:
    norm, scaler = 0.0, copy.player.scaler
    if scaler is not None:
        scaler.unscale_(copy.optimizer)
    if scenario.clip is not None:
        total = nn.utils.clip_grad_norm_(copy.masters.values(), scenario.clip[0], norm_type=scenario.clip[1])
        norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
    if scaler is None:
        copy.optimizer.step()
    else:
        scaler.step(copy.optimizer)
        scaler.update()
    copy.optimizer.zero_grad(set_to_none=number % 2 == 0)
    copy.load()
    return norm


def assert_parity(found: Sequence[Sequence[Seen]], scenario: Scenario) -> None:
    """Check that every rank saw what the plain process saw, at every yield."""
    for of_rank, expected in zip(found, plain(scenario), strict=True):
        assert len(of_rank) == len(expected)
        for one, other in zip(of_rank, expected, strict=True):
            assert_close = partial(
                torch.testing.assert_close, rtol=scenario.tolerance, atol=scenario.tolerance, equal_nan=True
            )
            assert_close([one.norm, one.scale, *one.losses], [other.norm, other.scale, *other.losses])
            assert_close(one.grads, other.grads)
            assert_close(one.parameters, other.parameters)
