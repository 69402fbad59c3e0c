"""Jobs that train a sharded model, and the references to compare with.

`train` is the job that most tests send to ranks: it trains one case and returns what plain training returns, so that
`assert_same_training` can compare it with `train_reference`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from mics_strategy import ShardConfig, Sharded, shard
from mics_strategy.comm.placement import full_tensor, is_partial
from tests import models
from tests.models import Batch, Case
from tests.rank_report import RankContext
from tests.reference import Trace, train_reference

# An eps that drowns rounding: gradients that are zero but for it (key biases) would be steps of full length.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(Adam, lr=0.01, eps=1e-3),
    "adamw": partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adamw_single": partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=False),
    "adamw_foreach": partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=True),
    "adamw_fused": partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.1, fused=True),
    "adagrad": partial(Adagrad, lr=0.02, eps=1e-3),
    "rmsprop": partial(RMSprop, lr=0.005, eps=1e-3, momentum=0.5, centered=False),
    "nadam": partial(NAdam, lr=0.01, eps=1e-3),
    "radam": partial(RAdam, lr=0.01, eps=1e-3),
    "adamax": partial(Adamax, lr=0.01, eps=1e-3),
    "adadelta": partial(Adadelta, lr=0.5, eps=1e-3),
    "asgd": partial(ASGD, lr=0.05, t0=2),
    "amsgrad": partial(AdamW, lr=0.01, eps=1e-3, amsgrad=True, maximize=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to train, and how.

    Attributes:
        case: One of `tests.models`, or of this file.
        config: How to shard.
        optimizer: A key of `OPTIMIZERS`.
        units: As `shard` takes them; None for the case's own.
        signal: Whether the loop says where the boundary is.
    """

    case: Callable[[], Case]
    config: ShardConfig
    steps: int = 3
    accumulation: int = 1
    optimizer: str = "momentum"
    clip: float | None = None
    units: Any = None
    signal: bool = False

    def replace(self, **changes: Any) -> "Run":
        return replace(self, **changes)


@dataclass(slots=True)
class Outcome:
    """What one rank saw: as `Trace`, with its own losses."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Training:
    """A sharded model about to be trained by hand."""

    run: Run
    ctx: RankContext
    case: Case
    model: nn.Module
    sharded: Sharded
    optimizer: Optimizer

    def batch(self, step: int, micro: int = 0) -> Batch:
        return self.case.batch(step, micro, self.ctx.rank)

    def loss(self, step: int, micro: int = 0) -> Tensor:
        return self.case.loss(self.model, self.batch(step, micro)) / self.run.accumulation

    def micro_step(self, micro: int) -> AbstractContextManager[None]:
        return self.sharded.micro_step(micro, of=self.run.accumulation) if self.run.signal else nullcontext()

    def backward(self, step: int) -> float:
        """All micro-steps of a step; returns the mean loss."""
        total = 0.0
        for micro in range(self.run.accumulation):
            with self.micro_step(micro):
                loss = self.loss(step, micro)
                loss.backward()
            total += loss.item()
        return total

    def step(self, step: int) -> float:
        loss = self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def grads(self) -> dict[str, Tensor]:
        return wholes({name: g for name, p in self.model.named_parameters() if (g := p.grad) is not None})

    def parameters(self) -> dict[str, Tensor]:
        return wholes(dict(self.model.named_parameters()))


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, whether sharded or not. Collective."""
    return (full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()).clone()


@torch.no_grad()
def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies as `whole` makes them; all shards of a group in one gather, where it spends a quarter of a test's time.

    Collective.
    """
    of_groups: dict[dist.ProcessGroup, dict[str, tuple[DTensor, int]]] = {}
    for name, tensor in tensors.items():
        dims = [(dim, place.dim) for dim, place in enumerate(getattr(tensor, "placements", ())) if place.is_shard()]
        if len(dims) == 1 and tensor.numel() and not is_partial(tensor):
            ((mesh_dim, dim),) = dims
            of_groups.setdefault(tensor.device_mesh.get_group(mesh_dim), {})[name] = tensor, dim
    found: dict[str, Tensor] = {}
    for group, of_group in of_groups.items():
        found |= _gathered(of_group, group)
    return {name: found[name] if name in found else whole(tensor) for name, tensor in tensors.items()}


def _gathered(tensors: dict[str, tuple[DTensor, int]], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Whole tensors of one group, each sharded along its dimension; the last shards are padded to the others' size."""
    padded = []
    for tensor, dim in tensors.values():
        rows = tensor.to_local().movedim(dim, 0)
        missing = -(-tensor.shape[dim] // group.size()) - len(rows)
        padded.append(torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous())
    own = torch.cat([piece.view(-1).view(torch.uint8) for piece in padded])
    of_ranks = own.new_empty(group.size(), own.numel())
    dist.all_gather(list(of_ranks), own, group)
    split = of_ranks.split([piece.nbytes for piece in padded], dim=1)
    found = {}
    for (name, (tensor, dim)), piece, parts in zip(tensors.items(), padded, split, strict=True):
        rows = parts.clone(memory_format=torch.contiguous_format).view(piece.dtype).view(-1, *piece.shape[1:])
        found[name] = rows[: tensor.shape[dim]].movedim(0, dim).contiguous()
    return found


def start(ctx: RankContext, run: Run) -> Training:
    """Build and shard the model, and make its optimizer."""
    case = run.case()
    model = case.build()
    sharded = shard(model, run.config, units=case.units if run.units is None else run.units)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Training(run, ctx, case, model, sharded, OPTIMIZERS[run.optimizer](trainable))


def train(ctx: RankContext, run: Run) -> Outcome:
    """Job: train and tell."""
    training, outcome = start(ctx, run), Outcome()
    for step in range(run.steps):
        outcome.losses.append(training.backward(step))
        outcome.grads.append(training.grads())
        norm = training.sharded.clip_grad_norm_(math.inf if run.clip is None else run.clip)
        outcome.grad_norms.append(norm.item())
        training.optimizer.step()
        training.optimizer.zero_grad()
    outcome.parameters = training.parameters()
    return outcome


def train_each(ctx: RankContext, runs: list[Run]) -> list[Outcome]:
    """Job: one training after the other."""
    return [train(ctx, run) for run in runs]


def train_without_reading(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    """Job: the barest loop, nothing between backward and step.

    The parameters at the end.
    """
    training = start(ctx, run)
    for step in range(run.steps):
        training.step(step)
    return training.parameters()


def plain(run: Run, world_size: int) -> Trace:
    """What one process with the whole batch does."""
    return _plain(run.case, world_size, run.steps, run.accumulation, run.optimizer, run.clip)


@lru_cache(maxsize=256)
def _plain(make_case: Any, world_size: int, steps: int, accumulation: int, optimizer: str, clip: Any) -> Trace:
    case = make_case()
    batches = case.batches(steps, accumulation, world_size)
    return train_reference(
        case.build(), batches, OPTIMIZERS[optimizer], loss_fn=case.loss, clip=clip, missing_grads_are_zero=False
    )


def assert_same_training(outcomes: list[Outcome], trace: Trace, tolerance: float = 1e-6) -> None:
    """Check that every rank's outcome is that of plain training.

    Losses, norms, gradients and parameters are compared.
    """
    for rank, outcome in enumerate(outcomes):
        for step, by_rank in enumerate(trace.losses_by_rank):
            assert math.isclose(outcome.losses[step], by_rank[rank], rel_tol=1e-5, abs_tol=tolerance), f"loss {step}"
            assert math.isclose(outcome.grad_norms[step], trace.grad_norms[step], rel_tol=1e-5), f"norm {step}"
            assert_same(outcome.grads[step], trace.grads[step], tolerance)
        assert_same(outcome.parameters, trace.parameters, tolerance)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """The same names with the same values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=partial(_about, name))


def _about(name: str, message: str) -> str:
    return f"{name}: {message}"


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names with the same bits."""
    assert list(found) == list(expected)
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert different == []


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference by the norm of what was expected."""
    off = sum((found[name].detach() - value).square().sum() for name, value in expected.items())
    return float((off / sum(value.square().sum() for value in expected.values())).sqrt())


def root_only(_: nn.Module) -> bool:
    """A unit rule: everything travels with the root."""
    return False


def unused_alike() -> Case:
    """As `models.unused`, but all ranks use the branch or none does."""
    case = models.unused()

    def batch(step: int, micro: int, rank: int) -> Batch:
        return case.batch(step, micro, rank) | {"use_branch": step % 4 != 2 and (step + micro) % 2 == 1}

    return replace(case, batch=batch)


def presets(names: tuple[str, ...], **overrides: Any) -> Iterator[ShardConfig]:
    """Their configurations."""
    return (ShardConfig.preset(name, **overrides) for name in names)
