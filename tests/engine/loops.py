"""Training loops for sharded models and, with every rank's batches, plain ones.

A body is a function of a `Loop`: it trains, and returns values to compare. `follow` runs it on sharded models,
`assert_same_loop` compares the values of every rank with those of the plain model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mics_strategy import Sharded
from tests.engine.training import OPTIMIZERS, Run, assert_same, start, wholes
from tests.models import Case
from tests.rank_report import RankContext
from tests.ranks import RankPool

Seen = list[dict[str, Tensor]]
Body = Callable[..., Seen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A model, sharded or plain, and the ranks whose batches it is given.

    The mean of their losses is trained.
    """

    run: Run
    case: Case
    model: nn.Module
    ranks: Sequence[int]
    sharded: Sharded | None = None

    def parameters(self, *prefixes: str) -> list[nn.Parameter]:
        """Those whose names begin with one of `prefixes`; all without any."""
        return [p for name, p in self.model.named_parameters() if name.startswith(prefixes or "")]

    def optimizer(self, *prefixes: str) -> Optimizer:
        """That of the run, over such parameters."""
        return OPTIMIZERS[self.run.optimizer](self.parameters(*prefixes))

    def loss(self, step: int, micro: int, rank: int) -> Tensor:
        loss = self.case.loss(self.model, self.case.batch(step, micro, rank))
        return loss / (len(self.ranks) * self.run.accumulation)

    def micro_step(self, step: int, micro: int) -> None:
        with self._declared(micro):
            for rank in self.ranks:
                self.loss(step, micro, rank).backward()

    def _declared(self, micro: int) -> AbstractContextManager[None]:
        if self.sharded is None or not self.run.signal:
            return nullcontext()
        return self.sharded.micro_step(micro, of=self.run.accumulation)

    def backward(self, step: int) -> None:
        for micro in range(self.run.accumulation):
            self.micro_step(step, micro)

    def step(self, step: int, optimizer: Optimizer) -> None:
        self.backward(step)
        optimizer.step()
        optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        return wholes(dict(self.model.named_parameters()))

    def grads(self) -> dict[str, Tensor]:
        return wholes({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})


def follow(ctx: RankContext, runs: list[Run], body: Body, *args: Any) -> list[Seen]:
    """Job: what `body` sees on the sharded model of each run."""
    seen = []
    for run in runs:
        training = start(ctx, run)
        loop = Loop(run=run, case=training.case, model=training.model, ranks=[ctx.rank], sharded=training.sharded)
        seen.append(body(loop, *args))
    return seen


def follow_plain(run: Run, world_size: int, body: Body, *args: Any) -> Seen:
    """What `body` sees on the plain model, with the batches of all ranks."""
    case = run.case()
    return body(Loop(run=run, case=case, model=case.build(), ranks=range(world_size)), *args)


def assert_same_loop(
    ranks: RankPool, world_size: int, runs: list[Run], body: Body, *args: Any, tolerance: float = 2e-6
) -> None:
    """Every rank sees in each of `runs` what plain training sees."""
    plain: dict[Run, Seen] = {}
    found = ranks(world_size, follow, runs, body, *args, ranks_per_node=2)
    for index, run in enumerate(runs):
        alike = run.replace(config=runs[0].config)  # how a model is sharded makes no difference
        if alike not in plain:
            plain[alike] = follow_plain(alike, world_size, body, *args)
        expected = plain[alike]
        assert expected
        for of_rank in found:
            assert len(of_rank[index]) == len(expected)
            for values, wanted in zip(of_rank[index], expected, strict=True):
                assert_same(values, wanted, tolerance)
